"""Random inputs by the names of arguments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engine.errors import InputError
from lightning_compress.stock.inputs import random_like, sensible_inputs


class Reads(nn.Module):
    """A model that takes tokens and what a decoder takes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor, use_cache: bool = True) -> Tensor:
        """Return a sum."""
        assert not use_cache
        return self.table(input_ids).sum() + self.table(decoder_input_ids).sum()


class Odd(nn.Linear):
    """A model that takes something that has no usual name."""

    def forward(self, odd: Tensor) -> Tensor:  # type: ignore[override]
        """Return a product."""
        return super().forward(odd)


def test_inputs_are_in_the_range_of_the_configuration() -> None:
    """Tokens are below the size of the vocabulary, and nothing is cached."""
    inputs = sensible_inputs(Reads(), {"vocab_size": 10})
    assert inputs.keys() == {"input_ids", "decoder_input_ids", "use_cache"} and int(inputs["input_ids"].max()) < 10


def test_a_model_that_takes_something_else_needs_an_example() -> None:
    """The message says how to pass it."""
    with pytest.raises(InputError, match="example_input="):
        sensible_inputs(Odd(1, 1), {})


def test_integers_change_places_or_stay() -> None:
    """Floats are drawn again; flags stay."""
    example = {"x": torch.zeros(3), "ids": torch.arange(20), "mask": torch.tensor([True, False])}
    other = random_like(example, 1, True)
    assert other["x"].any() and not torch.equal(other["ids"], example["ids"])
    assert torch.equal(other["ids"].sort().values, example["ids"]) and torch.equal(other["mask"], example["mask"])
    assert torch.equal(random_like(example, 1, False)["ids"], example["ids"])

"""What the code of a model remembers is not what a recording or a verification computed."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import engine
from engine.recording.memos import forgetting
from tests.engine.exactness import check_exact, randomised


@functools.lru_cache
def ramp(size: int) -> Tensor:
    """Return a table that is made once per size."""
    return torch.arange(size, dtype=torch.float64)


def behind(f: Any) -> Any:
    """Hide a function in a closure, as decorators do."""

    def wrapper(*args: Any) -> Any:
        return f(*args)

    return wrapper


hidden = behind(functools.lru_cache(lambda size: torch.arange(size, dtype=torch.float64)))


class Positions(nn.Module):
    """Multiplies by a remembered table, whose size it reads from its input."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.up, self.down, self.table = nn.Linear(4, 8), nn.Linear(8, 3), table

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        y: Tensor = self.down(self.up(x).relu() * self.table(x.shape[1])[:, None])
        return y


def test_a_model_computes_with_data_after_it_was_recorded() -> None:
    """A tensor without data that was remembered made all further outputs tensors without data."""
    for table in (ramp, hidden):
        model, x = randomised(Positions(table)), torch.rand(2, 5, 4, dtype=torch.float64)
        engine.trace(model, x)
        assert type(model(x)) is Tensor


def test_a_model_that_remembers_is_compacted_exactly_and_trains() -> None:
    """A tensor of inference mode that was remembered could not be used in training."""
    model, x = randomised(Positions(ramp)), torch.rand(2, 7, 4, dtype=torch.float64)
    kept = torch.arange(8) % 2
    masks = {"up": {"weight": kept[:, None].expand(8, 4), "bias": kept}}
    plan = check_exact(model, masks, x, torch.rand(3, 9, 4, dtype=torch.float64))
    assert "up.weight" in plan.slices


def test_what_was_known_before_stays_known() -> None:
    """A function that the body does not call, or only asks again, forgets nothing."""
    ramp.cache_clear()
    ramp(3)
    with forgetting(Positions(ramp)):
        ramp(3)
    assert ramp.cache_info().currsize == 1

"""Which inputs a model of transformers is given."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from torch import Tensor, nn
from transformers import PretrainedConfig

from benchmarks import modalities


class Reader(nn.Module):
    """Reads text, and pictures in the place of as many tokens as they have features."""

    def __init__(self, said: str = "Image features and image tokens do not match, tokens: {}, features: {}") -> None:
        super().__init__()
        self.config = PretrainedConfig()
        self.embedding, self.projection, self.said = nn.Embedding(99, 4), nn.Linear(3, 4), said
        self.double()

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None, image_sizes: Any = None) -> Tensor:
        """Return the words, with the features of pictures between them."""
        words = self.embedding(input_ids)
        if pixel_values is None:
            return words
        features = self.projection(pixel_values.mean((2, 3))).repeat(1, 3, 1).flatten(0, 1).view(-1, 4)
        places = input_ids == modalities.PLACEHOLDERS["image"]
        if int(places.sum()) != len(features):
            raise ValueError(self.said.format(int(places.sum()), len(features)))
        return words.masked_scatter(places[:, :, None], features)


def test_a_model_gets_as_many_tokens_as_it_asks_for() -> None:
    """In inputs of both batch sizes, and what says how a picture is laid out as well."""
    one, two = modalities.accepted(Reader())
    assert sorted(one) == sorted(two) == ["image_sizes", "input_ids", "pixel_values"]
    assert [int((x["input_ids"] == 91).sum()) for x in (one, two)] == [3, 6]
    assert modalities.is_fed(Reader(), one)


def test_text_alone_where_pictures_do_not_fit() -> None:
    """It is told from a model that is given all that it takes."""
    model = Reader("another number, please")
    one, _ = modalities.accepted(model)
    assert sorted(one) == ["input_ids"] and not modalities.is_fed(model, one)


def test_what_is_not_read_is_left_out() -> None:
    """Pictures that change nothing are no input."""

    class Deaf(Reader):
        def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None, image_sizes: Any = None) -> Tensor:
            return self.embedding(input_ids)

    assert sorted(modalities.accepted(Deaf())[0]) == ["input_ids"]


def test_a_model_that_runs_on_nothing_says_why() -> None:
    """Its own words are in the error."""

    class Broken(Reader):
        def forward(self, input_ids: Tensor) -> Tensor:
            raise ValueError("no lungs")

    with pytest.raises(modalities.NotRun, match="ValueError: no lungs"):
        modalities.accepted(Broken())


def test_tokens_with_a_meaning_differ_by_kind() -> None:
    """Pictures, videos and sound have one each; all others share one, which random text does not contain."""
    names = ("image_token_id", "video_token_index", "audio_token_id", "image_start_token_id", "pad_token_id")
    assert [modalities.small_identifier(name, 32_000) for name in names] == [91, 92, 93, 90, 90]
    assert modalities.small_identifier("bos_token_id", 1) == 1

"""What the parts of a compacted model carry of its history."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.compaction.format import KEY
from engine.compaction.history import history
from engine.compaction.parts import part_entry
from engine.errors import CheckpointError
from tests.engine.nets import dead, image, plain


class Saving(nn.Module):
    """A model that is saved as those of transformers and diffusers are."""

    def __init__(self) -> None:
        super().__init__()
        self.body = plain()

    def forward(self, x: Tensor) -> Tensor:
        """Return the body's output."""
        return self.body(x)

    def save_pretrained(self, folder: Path) -> None:
        """Write the weights."""
        torch.save(self.state_dict(), folder / "model.pt")


class Whole(nn.Module):
    """What stands for a LightningModule: the model is a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Saving()

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's output."""
        return self.model(x)


def compacted(*closed: int) -> Whole:
    """A whole that lost channels of its body's first layer, in one compaction for each."""
    whole = Whole().eval()
    for channel in closed:
        masks = dead(whole, {"model.body.0": [channel], "model.body.1": [channel]}, bias=True)
        engine.ModelSpeedup(whole, image(), masks).speedup_model()
    return whole


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    """The outputs are the same bits."""
    assert torch.equal(one.eval()(image()), other.eval()(image()))


@pytest.mark.parametrize("closed", [(1,), (1, 2)])
def test_the_state_dict_of_a_part_loads(closed: tuple[int, ...], tmp_path: Path) -> None:
    """By ``load_state_dict``, from a file, and from safetensors."""
    small = compacted(*closed).model
    assert not history(small)
    fresh = engine.compactable(Saving())
    fresh.load_state_dict(small.state_dict())
    assert_equal(small, fresh)
    torch.save(small.state_dict(), tmp_path / "part.pt")
    assert_equal(small, engine.load_compacted_state(Saving(), tmp_path / "part.pt"))
    engine.save_safetensors(small, tmp_path / "part.safetensors")
    assert_equal(small, engine.load_compacted_state(Saving(), tmp_path / "part.safetensors"))


def test_parts_of_parts_load() -> None:
    """Each part writes its own share, in its own names."""
    small = compacted(1)
    body = engine.compactable(plain())
    body.load_state_dict(small.model.body.state_dict())
    assert_equal(small.model.body, body)


def test_copies_of_a_part_carry_the_plan() -> None:
    """A deep copy, and one that went through pickle."""
    small = compacted(3).model
    for part in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        fresh = engine.compactable(Saving())
        fresh.load_state_dict(part.state_dict())
        assert_equal(small, fresh)
        with pytest.raises(CheckpointError, match="lightning_compress.save_pretrained"):
            part.save_pretrained(Path())


def test_the_whole_tells_once() -> None:
    """In the state dict of the whole, the parts add nothing."""
    metadata = compacted(1).state_dict()._metadata
    assert [name for name, entry in metadata.items() if KEY in entry] == [""]


def test_a_part_loads_its_own_state() -> None:
    """A part that follows what it loads takes weights of the same compactions."""
    small = compacted(1).model
    state = small.state_dict()
    assert part_entry(small) is not None
    engine.compactable(small).load_state_dict(state)


def test_untouched_parts_tell_nothing() -> None:
    """A part in which nothing was narrowed has an ordinary state dict."""
    small = compacted(1)
    assert part_entry(small.model.body[1]) is not None and part_entry(small.model.body[2]) is None


def test_save_pretrained_of_a_compacted_model_is_an_error(tmp_path: Path) -> None:
    """Of the model itself, of a part, and of a model around the compacted one; nothing is written."""
    small = compacted(1)
    with pytest.raises(CheckpointError, match="lightning_compress.save_pretrained"):
        small.model.save_pretrained(tmp_path)
    outer = Saving().eval()
    masks = dead(outer.body, {"0": [1], "1": [1]}, bias=True)
    engine.ModelSpeedup(outer.body, image(), masks).speedup_model()
    with pytest.raises(CheckpointError, match="lightning_compress.save_pretrained"):
        outer.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="lightning_compress.save_pretrained"):
        Saving.save_pretrained(small.model, tmp_path)  # past what the part holds
    around = Saving()
    around.body = nn.Sequential(small.model)  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match="lightning_compress.save_pretrained"):
        around.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_save_pretrained_comes_back_with_the_channels() -> None:
    """A model that grew back is an ordinary one; so is one whose compaction was rolled back."""
    small = compacted(1)
    with pytest.warns(UserWarning, match="grows back"):
        small.load_state_dict(Whole().state_dict())
    assert "save_pretrained" not in vars(small.model) and part_entry(small.model) is None
    plan = engine.Plan.from_state_dict(history(compacted(1))[0].plan)
    whole = Whole()
    change = plan.prepare(whole)
    change.commit()
    assert "save_pretrained" in vars(whole.model)
    change.rollback()
    assert "save_pretrained" not in vars(whole.model) and not whole.model._state_dict_hooks

"""Models that take the shapes of what they load."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.compaction.follow import is_compactable, reshape
from engine.compaction.history import entry_of, history
from engine.errors import CheckpointError
from tests.engine.attentions import Attention, tokens, without_heads
from tests.engine.exactness import channel_masks, randomised
from tests.engine.nets import dead, image, plain, snapshot, unchanged


def encoder() -> nn.Module:
    """A norm over channels, attention written by hand, and torch's own."""
    own = nn.TransformerEncoderLayer(16, 4, 12, dropout=0.0, batch_first=True, norm_first=True)
    return randomised(nn.Sequential(nn.Linear(8, 16), own, nn.LayerNorm(16), nn.Linear(16, 8)))


def attention() -> nn.Module:
    """Attention whose sizes are pinned when heads go."""
    return randomised(nn.Sequential(nn.Linear(5, 8), Attention(), nn.Linear(8, 3)))


def cases() -> dict[str, tuple[Any, Any]]:
    """By name: what makes a model, and masks with an input."""
    return {
        "cnn": (plain, lambda m: (channel_masks(m, 1), image())),
        "attention": (attention, lambda m: ({"1.qkv": without_heads(m[1].qkv, [0, 3])}, tokens())),
        "encoder": (encoder, lambda m: (channel_masks(m, 1), torch.randn(2, 5, 8).double())),
    }


def compacted(make: Any, masks: Any) -> tuple[nn.Module, torch.Tensor]:
    """A compacted model and an input."""
    model = make()
    given, x = masks(model)
    engine.ModelSpeedup(model, x, engine.fix_mask_conflict(given, model, x)).speedup_model()
    assert history(model)
    return model.eval(), x


@pytest.mark.parametrize("case", cases())
def test_there_and_back(case: str) -> None:
    """A fresh model takes small weights and puts out the same bits; it takes the large ones again, with a warning."""
    make, masks = cases()[case]
    small, x = compacted(make, masks)
    fresh = engine.compactable(make())
    large, kinds = copy.deepcopy(fresh.state_dict()), [type(m) for m in fresh.modules()]
    expected = fresh.eval()(x)
    fresh.load_state_dict(small.state_dict())
    assert torch.equal(fresh.eval()(x), small(x))
    assert not torch.equal(fresh(x), expected)
    with pytest.warns(UserWarning, match="grows back"):
        fresh.load_state_dict(large)
    assert torch.equal(fresh(x), expected)
    assert [type(m) for m in fresh.modules()] == kinds and not history(fresh)


@pytest.mark.parametrize("case", cases())
def test_what_grows_back_is_zero(case: str) -> None:
    """Before weights are loaded, what was removed comes back as zeros, so that growing and shrinking change nothing."""
    make, masks = cases()[case]
    small, x = compacted(make, masks)
    before, plans = snapshot(small), entry_of(small)
    with pytest.warns(UserWarning, match="grows back"):
        reshape(small, {}, {})
    assert {k: v.shape for k, v in small.state_dict().items()} == {k: v.shape for k, v in make().state_dict().items()}
    reshape(small, {}, {"": plans})
    assert unchanged(small, before)


def test_one_compaction_after_the_other() -> None:
    """A fresh model, and one that saw the first compaction only, take the weights of after the second."""
    model, x = plain(), image()
    engine.ModelSpeedup(model, x, dead(model, {"0": [1, 2]}, bias=True)).speedup_model()
    between = copy.deepcopy(model)
    engine.ModelSpeedup(model, x, dead(model, {"3": [0, 2]}, bias=True)).speedup_model()
    assert len(history(between)) == 1
    for other in (engine.compactable(plain()), between):
        other.load_state_dict(model.state_dict())
        assert torch.equal(other.eval()(x), model.eval()(x)) and len(history(other)) == 2


def test_compacted_otherwise() -> None:
    """A model compacted one way takes the weights of one compacted another way."""
    x, models = image(), [plain(), plain()]
    for model, closed in zip(models, ([0, 1, 2], [5]), strict=True):
        engine.ModelSpeedup(model, x, dead(model, {"0": closed}, bias=True)).speedup_model()
    with pytest.warns(UserWarning, match="grows back"):
        models[0].load_state_dict(models[1].state_dict())
    assert torch.equal(models[0].eval()(x), models[1].eval()(x))


def test_a_part_inside_of_a_part() -> None:
    """Where a part was compacted and then the whole, a fresh whole goes through both, whichever is named first."""

    def whole() -> nn.Sequential:
        return nn.Sequential(plain(), nn.Linear(3, 4), nn.Linear(4, 2)).double()

    model, x = whole(), image()
    engine.ModelSpeedup(model[0], x, dead(model[0], {"0": [1, 2]}, bias=True)).speedup_model()
    engine.ModelSpeedup(model, x, dead(model, {"0.0": [1], "1": [3]}, bias=True)).speedup_model()
    fresh = engine.compactable(whole())
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh.eval()(x), model.eval()(x))


def test_two_parts_of_a_whole() -> None:
    """Parts that were compacted each for itself are found by their paths."""
    whole, x = nn.ModuleDict({"a": plain(), "b": plain()}), image()
    engine.ModelSpeedup(whole["a"], x, dead(whole["a"], {"0": [1, 2]}, bias=True)).speedup_model()
    engine.ModelSpeedup(whole["b"], x, dead(whole["b"], {"3": [0]}, bias=True)).speedup_model()
    fresh = engine.compactable(nn.ModuleDict({"a": plain(), "b": plain()}))
    fresh.load_state_dict(whole.state_dict())
    assert all(torch.equal(fresh[n].eval()(x), whole[n].eval()(x)) for n in "ab")


def test_weights_alone_leave_the_model_alone() -> None:
    """Weights of unknown history that fit are loaded as they are; a compactable model is a model like any other."""
    model, x = compacted(*cases()["cnn"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(dict(model.state_dict()))
        engine.compactable(engine.compactable(plain())).load_state_dict(plain().state_dict())
    assert history(model)
    assert is_compactable(model) and is_compactable(engine.compactable(plain())) and not is_compactable(plain())


def damaged(kind: str, state: Any) -> Any:
    """The state dict with a fault."""
    content = copy.deepcopy(state._metadata[""]["lightning_compress"])
    entry = content["compacted"][""]
    if kind == "newer":
        content["version"] = 99
    if kind == "incomplete":
        del entry["plans"]
    if kind == "no version":
        content = []
    if kind == "another path":
        content["compacted"] = {"body": entry}
    if kind == "another shape":
        state["0.weight"] = torch.zeros(7, 3, 3, 3)
    if kind == "another model's plan":
        other, _ = compacted(*cases()["encoder"])
        content["compacted"][""] = entry_of(other)
    if kind == "a claim":
        index = entry["plans"][0]["slices"]["0.weight"]["cuts"][0]
        index["index"] = torch.zeros(1, dtype=torch.int32).expand(2_500_000_000)
    state._metadata[""]["lightning_compress"] = content
    return state


KINDS = ["newer", "incomplete", "no version", "another path", "another shape", "another model's plan", "a claim"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fresh", [True, False])
def test_what_does_not_fit_changes_nothing(kind: str, fresh: bool) -> None:
    """It is refused with one clear error, and the model is bit for bit as it was, its history too."""
    small, x = compacted(*cases()["cnn"])
    model = engine.compactable(plain()) if fresh else copy.deepcopy(small)
    before, steps, shown = snapshot(model), history(model), repr(model)
    with pytest.raises(
        CheckpointError,
        match="newer|damaged|no compaction plan|not a compaction plan|to another model|do not fit|claims",
    ):
        model.load_state_dict(damaged(kind, small.state_dict()))
    assert unchanged(model, before) and history(model) == steps and repr(model) == shown

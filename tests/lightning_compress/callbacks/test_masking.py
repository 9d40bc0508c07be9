"""Tests of masks held by a callback."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch.nn.utils import prune

from lightning_compress.callbacks import masking
from lightning_compress.callbacks.masking import MaskingCallback
from lightning_compress.callbacks.zeroing import zero_weights
from tests.lightning_compress.models import Net, Wrapped, fit, seeded


@pytest.fixture
def net() -> Net:
    """A network with random weights."""
    return seeded(Net)


def half(size: int) -> torch.Tensor:
    """A mask that drops the first half."""
    return torch.arange(size) >= size // 2


def test_write_buffers_sets_the_masks_of_prune(net: Net) -> None:
    """A mask goes into the buffer of torch.nn.utils.prune and shows in the masked weight at once, revived entries
    too.
    """
    original = net.wide.weight.detach().clone()
    prune.ln_structured(net.wide, "weight", 0.5, n=1, dim=0)
    mask = half(16).reshape(-1, 1, 1, 1).expand(16, 8, 3, 3)
    masking.write_buffers(net, {"wide": {"weight": mask}, "norm": {"weight": half(8)}})
    assert torch.equal(net.wide.weight_mask, mask.float())
    assert torch.equal(net.wide.weight, original * mask)


def test_weights_under_prune_keep_their_original(net: Net) -> None:
    """Zeroing leaves `weight_orig` alone: its buffer masks it."""
    prune.identity(net.wide, "weight")
    original = net.wide.weight_orig.detach().clone()
    zero_weights(masking.zeroings(net, {"wide": {"weight": torch.zeros(16, 8, 3, 3, dtype=torch.bool)}}))
    assert torch.equal(net.wide.weight_orig, original)


def test_rebase() -> None:
    """Masks of a part are named from the whole and the other way round; what lies outside is left out."""
    masks = {"a": {"w": torch.ones(1)}, "": {"w": torch.ones(1)}}
    assert list(masking.rebase(masks, "net", "")) == ["net.a", "net"]
    assert list(masking.rebase({"net.a": {}, "net": {}, "network": {}}, "", "net")) == ["a", ""]
    assert list(masking.rebase(masks, "net", "net")) == ["a", ""]


def test_active_masks_combine_all_holders() -> None:
    """The masks of two callbacks over different paths and those of prune are multiplied; without any it is empty."""
    module = seeded(Wrapped)
    outer, inner = MaskingCallback(model=""), MaskingCallback(model="net")
    assert masking.active_masks([outer, inner, object()], module, "net") == {}
    outer.impose(module, {"net.norm": {"weight": half(8)}})
    inner.impose(module, {"norm": {"weight": ~half(8)}, "wide": {"bias": half(16)}})
    prune.random_unstructured(module.net.fc, "weight", 0.5)
    found = masking.active_masks([outer, inner], module, "net")
    assert not found["norm"]["weight"].any()
    assert torch.equal(found["wide"]["bias"], half(16))
    assert torch.equal(found["fc"]["weight"], module.net.fc.weight_mask.bool())


def test_masks_that_keep_everything_count_as_none() -> None:
    """Masks of ones are as good as no masks."""
    module = seeded(Wrapped)
    holder = MaskingCallback()
    holder.impose(module, {"norm": {"weight": torch.ones(8)}})
    assert masking.active_masks([holder], module, "net") == {}


def test_state_survives_a_round_trip() -> None:
    """State is bool tensors, equal after loading; the callback can be pickled (processes may be spawned)."""
    module, holder, other = seeded(Wrapped), MaskingCallback(), MaskingCallback()
    holder.impose(module, {"norm": {"weight": half(8).float()}})
    other.load_state_dict(holder.state_dict())
    assert other.masks["norm"]["weight"].dtype == torch.bool
    assert masking.same(holder.masks, other.masks)
    assert masking.same(pickle.loads(pickle.dumps(holder)).masks, holder.masks)


def test_restored_masks_hold_from_the_start(tmp_path: Path) -> None:
    """Masks that come from a checkpoint are in force before the first step, also where its weights are not zero."""
    module, holder = seeded(Wrapped), MaskingCallback()
    holder.load_state_dict({"masks": {"norm": {"weight": half(8)}}})
    seen: list[torch.Tensor] = []

    class See(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            seen.append(pl_module.net.norm.weight.detach().clone())

    fit(module, tmp_path, See(), holder, max_epochs=1)
    assert torch.equal(seen[0], half(8).float())
    assert not module.net.norm.weight[:4].any()


def test_masks_differ() -> None:
    """Masks that differ in an entry or a name are not the same."""
    one = {"a": {"w": torch.tensor([1, 0])}}
    assert not masking.same(one, {"a": {"w": torch.tensor([0, 1])}})
    assert not masking.same(one, {"a": {"v": torch.tensor([1, 0])}})

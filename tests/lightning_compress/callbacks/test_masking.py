"""Tests of masks held by a callback."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch.nn.utils import prune
from torch.optim.optimizer import _global_optimizer_post_hooks

from lightning_compress import ChannelPruning, MaskConflictRepair, ModelCompaction
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


class AnotherOptimizer(Wrapped):
    """Makes a new optimizer in its second epoch."""

    def on_train_epoch_start(self) -> None:
        """Begin anew."""
        if self.current_epoch == 1:
            self.trainer.strategy.setup_optimizers(self.trainer)


class TwoSteps(Wrapped):
    """Steps by an optimizer around another one, as Lookahead and SAM are written."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Slow weights around SGD."""
        return Slow(super().configure_optimizers())


class Slow(torch.optim.Optimizer):
    """Goes back half of the way every step; the constructor of torch's class does not run."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, {}
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        """Step, and average."""
        loss = self.inner.step(closure)
        with torch.no_grad():
            for slow, fast in zip(self.slow, (p for g in self.param_groups for p in g["params"]), strict=True):
                slow.lerp_(fast, 0.5)
                fast.copy_(slow)
        return loss


class Noisy(Wrapped):
    """Adds noise to its weights behind each batch, as Langevin dynamics do."""

    def on_train_batch_end(self, *_: Any) -> None:
        """Shake."""
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))


class Masked(Callback):
    """Looks at the masked weights before each batch's forward, and before a validation's."""

    def __init__(self, pruning: ChannelPruning) -> None:
        self.pruning, self.largest = pruning, 0.0

    def look(self, pl_module: LightningModule) -> None:
        """Note the largest masked weight."""
        for name, own in self.pruning.masks.items():
            for key, mask in own.items():
                weight = pl_module.net.get_submodule(name).get_parameter(key)  # type: ignore[union-attr]
                self.largest = max(self.largest, float((weight.detach() * ~mask).abs().max()))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Look."""
        self.look(pl_module)

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Look."""
        self.look(pl_module)


@pytest.mark.parametrize("make", [Wrapped, AnotherOptimizer, TwoSteps, Noisy])
def test_masks_hold_whatever_writes_to_the_weights(make: type[Wrapped], tmp_path: Path) -> None:
    """New optimizers, optimizers around others, noise: what runs next has zeros there."""
    pruning = ChannelPruning(amount=0.5, schedule="one_shot", start=2)
    look = Masked(pruning)
    fit(make(), tmp_path, pruning, look, max_epochs=4)
    assert pruning.masks and look.largest == 0


def test_hooks_go_with_the_fit(tmp_path: Path) -> None:
    """Also with one that ends in an error: other trainings in the process are none of its business."""

    class Fails(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            """Fail."""
            raise ValueError("no data")

    before = dict(_global_optimizer_post_hooks)
    fit(Wrapped(), tmp_path, ChannelPruning(amount=0.5, start=0), max_epochs=1)
    assert dict(_global_optimizer_post_hooks) == before
    with pytest.raises(ValueError, match="no data"):
        fit(Wrapped(), tmp_path, ChannelPruning(amount=0.5, start=0), Fails(), max_epochs=1)
    assert dict(_global_optimizer_post_hooks) == before


class Restored(Callback):
    """Loads the weights of the first epoch when training ends."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the first ones."""
        if trainer.current_epoch == 0:
            self.state = {name: value.clone() for name, value in pl_module.state_dict().items()}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load them."""
        pl_module.load_state_dict(self.state)


def test_weights_that_are_loaded_behind_the_masks(tmp_path: Path) -> None:
    """A warning says which are zeroed, and that this may change what is computed."""
    pruning = ChannelPruning(amount=0.5, schedule="one_shot", start=1)
    compaction = ModelCompaction(tmp_path / "small.ckpt", save=False, on_failure="raise")
    with pytest.warns(UserWarning, match="Masked weights of .*wide.weight.* are not zero"):
        fit(Wrapped(), tmp_path, pruning, MaskConflictRepair(), compaction, Restored(), max_epochs=2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Masked weights")
        compaction = ModelCompaction(tmp_path / "small.ckpt", save=False, on_failure="raise")
        fit(Wrapped(), tmp_path, ChannelPruning(amount=0.5, start=0), MaskConflictRepair(), compaction, max_epochs=2)


def test_a_copy_of_a_used_callback_belongs_to_its_module(tmp_path: Path) -> None:
    """On another module it starts anew, like the original; on the same one its masks hold from the start."""
    used, module = ChannelPruning("random", seed=1), seeded(Wrapped)
    fit(module, tmp_path, used)
    again, fresh, anew = copy.deepcopy(used), ChannelPruning("random", seed=1), seeded(Wrapped)
    assert masking.same(again.masks, used.masks)
    again.setup(fit(anew, tmp_path, fresh), anew, "fit")
    assert not again.masks and not again.finished
    other = seeded(Wrapped)
    copied = copy.deepcopy(used)
    fit(other, tmp_path, copied)
    assert all(torch.equal(a, b) for a, b in zip(anew.parameters(), other.parameters(), strict=True))
    goes_on = copy.deepcopy(used)
    fit(module, tmp_path, goes_on, max_epochs=1)
    assert masking.same(goes_on.masks, used.masks)
    pair = copy.deepcopy((module, used))
    assert pair[1]._owner is not None and pair[1]._owner() is pair[0]

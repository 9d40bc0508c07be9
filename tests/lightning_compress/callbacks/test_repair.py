"""Tests of mask conflict repair while training."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelPruning
from torch import Tensor

from lightning_compress import ChannelPruning, MaskConflictRepair
from tests.lightning_compress.models import Wrapped, fit, seeded, trainer


def structured(module: Wrapped, *names: str, **options: Any) -> ModelPruning:
    """Lightning's own pruning of whole channels, half of them once."""
    settings: dict[str, Any] = {
        "parameters_to_prune": [(module.net.get_submodule(name), "weight") for name in names],
        "pruning_fn": "ln_structured",
        "pruning_dim": 0,
        "pruning_norm": 1,
        "amount": lambda epoch: 0.5 if epoch == 0 else 0.0,
        "use_lottery_ticket_hypothesis": False,
        "use_global_unstructured": False,
    }
    return ModelPruning(**{**settings, **options})


class Watch(Callback):
    """Notes before each step which channels of each layer are all zero."""

    def __init__(self) -> None:
        self.dead: list[dict[str, list[int]]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        """Note."""
        net = pl_module.net
        self.dead.append(
            {name: dead(getattr(net, name).weight) for name in ("stem", "norm", "wide", "wide_norm", "back")}
        )


def dead(weight: Tensor) -> list[int]:
    """Channels that are all zero."""
    return (
        (weight.detach().flatten(1) if weight.ndim > 1 else weight.detach()[:, None])
        .eq(0)
        .all(1)
        .nonzero()
        .flatten()
        .tolist()
    )


ORDERS = list(itertools.permutations(("pruning", "repair", "watch")))


@pytest.mark.parametrize("order", ORDERS)
def test_model_pruning_is_repaired_in_any_order(tmp_path: Path, order: tuple[str, ...]) -> None:
    """Masks of ModelPruning on `wide` alone reach its norm before the next forward, in either order, and stay there."""
    module = seeded(Wrapped)
    callbacks = {"pruning": structured(module, "wide"), "repair": MaskConflictRepair(), "watch": Watch()}
    fit(module, tmp_path, *[callbacks[name] for name in order])
    first, later = callbacks["watch"].dead[:3], callbacks["watch"].dead[3:]
    assert all(seen["wide_norm"] == [] for seen in first)
    assert all(len(seen["wide"]) == 8 and seen["wide_norm"] == seen["wide"] for seen in later)
    assert dead(module.net.wide.weight) == dead(module.net.wide_norm.weight) == dead(module.net.wide_norm.bias)
    assert not module.net.wide.bias[dead(module.net.wide.weight)].any()


@pytest.mark.parametrize("repair_first", [True, False])
def test_pruning_after_the_last_epoch_is_repaired(tmp_path: Path, repair_first: bool) -> None:
    """ModelPruning prunes at the end of the only epoch and makes it permanent at the end of training: still
    repaired.
    """
    module = seeded(Wrapped)
    callbacks = [MaskConflictRepair(), structured(module, "wide")]
    fit(module, tmp_path, *(callbacks if repair_first else reversed(callbacks)), max_epochs=1)
    assert not hasattr(module.net.wide, "weight_mask")
    assert len(dead(module.net.wide.weight)) == 8
    assert dead(module.net.wide.weight) == dead(module.net.wide_norm.weight)


def test_union_revives_what_one_layer_keeps(tmp_path: Path) -> None:
    """`stem` and `back` share channels: only those that both masked stay masked, with their old weights where
    revived.
    """
    module = seeded(Wrapped)
    watch = Watch()
    fit(module, tmp_path, structured(module, "stem", "back"), MaskConflictRepair(policy="union"), watch, max_epochs=2)
    last = watch.dead[-1]
    assert last["stem"] == last["back"] == last["norm"]
    assert len(last["stem"]) < 4


def test_channel_pruning_asks_the_repair_in_any_order(tmp_path: Path) -> None:
    """ChannelPruning's masks go through the repair before weights are zeroed, wherever the repair stands."""
    asked: list[int] = []

    class Counting(MaskConflictRepair):
        def repaired(self, masks: Any, *rest: Any) -> Any:
            asked.append(len(masks))
            return super().repaired(masks, *rest)

    for order in (1, -1):
        asked.clear()
        pruning = ChannelPruning(amount=0.5, schedule="one_shot", start=1)
        fit(seeded(Wrapped), tmp_path, *[pruning, Counting()][::order])
        assert [n for n in asked if n] == [len(pruning.masks)]
        assert dead_channels(pruning, "norm") == dead_channels(pruning, "back")


def dead_channels(pruning: ChannelPruning, module: str) -> list[int]:
    """Channels that are masked in a module."""
    mask = pruning.masks[module]["weight"]
    return (~mask.reshape(len(mask), -1).any(1)).nonzero().flatten().tolist()


def test_resume_keeps_the_added_masks(tmp_path: Path) -> None:
    """After a resume the norms that the repair masked stay zero."""
    first, second = seeded(Wrapped), seeded(Wrapped)
    stopped = fit(first, tmp_path, structured(first, "wide"), MaskConflictRepair(), max_epochs=2)
    stopped.save_checkpoint(tmp_path / "last.ckpt")
    watch = Watch()
    trainer(tmp_path, MaskConflictRepair(), watch, max_epochs=3).fit(second, ckpt_path=str(tmp_path / "last.ckpt"))
    assert all(len(seen["wide"]) == 8 and seen["wide_norm"] == seen["wide"] for seen in watch.dead)
    assert len(watch.dead) == 3


def test_masks_that_model_pruning_forgot_stay(tmp_path: Path) -> None:
    """ModelPruning starts anew after a resume; what was repaired before stays masked when it prunes a little again."""
    first, second = seeded(Wrapped), seeded(Wrapped)
    stopped = fit(first, tmp_path, structured(first, "wide"), MaskConflictRepair(), max_epochs=2)
    stopped.save_checkpoint(tmp_path / "last.ckpt")
    again = structured(second, "wide", amount=lambda epoch: 0.25 if epoch == 2 else 0.0)
    trainer(tmp_path, again, MaskConflictRepair(), max_epochs=4).fit(second, ckpt_path=str(tmp_path / "last.ckpt"))
    assert dead(second.net.wide.weight) == dead(first.net.wide.weight) == dead(second.net.wide_norm.weight)


def test_nothing_masked_changes_nothing(tmp_path: Path) -> None:
    """Alone on an unpruned model the callback leaves the fit bit for bit as it is."""
    plain, repaired = seeded(Wrapped), seeded(Wrapped)
    fit(plain, tmp_path)
    fit(repaired, tmp_path, MaskConflictRepair())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), repaired.parameters(), strict=True))


def test_unknown_policy_is_refused() -> None:
    """A policy that does not exist is an error where it is written, which names those that do."""
    with pytest.raises(ValueError, match="one of union, .*got 'majority'"):
        MaskConflictRepair(policy="majority")

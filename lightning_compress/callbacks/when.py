"""The epochs in which `ModelCompaction` compacts during training, and checks that the fit reaches them."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn

import engine
from engine.bounds import is_list
from engine.compaction import check_entrywise, is_entrywise
from engine.errors import PlanError
from lightning_compress.callbacks.masking import masking_callbacks
from lightning_compress.callbacks.timing import length
from lightning_compress.trainer.packages import MisconfigurationException

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer
    from torch import nn

    from lightning_compress.callbacks.base import CompressionCallback

When = float | tuple[int, ...] | None


def parse_when(when: int | float | Sequence[int] | None) -> When:
    """Normalise the argument ``when`` of `ModelCompaction` to a fraction, a tuple of epochs, or None.

    Raises:
        MisconfigurationException: for any other value.

    Example:
        >>> parse_when(2), parse_when([1, 3]), parse_when(0.5)
        ((2,), (1, 3), 0.5)
    """
    if when is None:
        return None
    if isinstance(when, (float, numbers.Real)) and 0 < float(when) < 1:
        return float(when)
    epochs: list[Any] = list(when) if is_list(when) else [when]  # type: ignore[arg-type]
    if epochs and all(_is_whole(epoch) and epoch >= 0 for epoch in epochs):
        return tuple(int(epoch) for epoch in epochs)
    raise MisconfigurationException(
        f"`when` must be an epoch >= 0, a list of such epochs, or a fraction of the parameters in (0, 1); got {when!r}."
    )


def _is_whole(epoch: object) -> bool:
    return isinstance(epoch, numbers.Integral) and not isinstance(epoch, bool)


def check_source(when: When, trainer: Trainer, model: nn.Module) -> None:
    """Check that some callback masks channels during training if `when` is set.

    Args:
        when: as `parse_when` returns it.
        trainer: the Trainer of the fit.
        model: the model to compact.

    Raises:
        MisconfigurationException: if no callback does.
    """
    if when is None or engine.read_masks(model):
        return
    if not any(callback.first_epoch(trainer) is not None for callback in masking_callbacks(trainer)):
        raise MisconfigurationException(
            f"`ModelCompaction(when={when!r})` removes channels that callbacks mask during training, but no callback "
            "of this Trainer masks any. Add `ChannelPruning`, or omit `when` to remove zeros at the end of the fit."
        )


def check_epochs(when: When, trainer: Trainer) -> None:
    """Check that masks exist by the given epochs, and warn of epochs that the fit does not reach.

    Args:
        when: as `parse_when` returns it.
        trainer: the Trainer of the fit that is about to start.

    Raises:
        MisconfigurationException: if all epochs precede the first masks.
    """
    if not isinstance(when, tuple) or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    firsts = [first for c in masking_callbacks(trainer) if (first := c.first_epoch(trainer)) is not None]
    if firsts and when and max(when) < min(firsts):
        raise MisconfigurationException(
            f"`ModelCompaction(when={list(when)})` never removes anything: no channel is masked before epoch "
            f"{min(firsts)}. Compact later, or start pruning earlier."
        )
    epochs = length(trainer, "epoch")
    late = [] if epochs is None else [epoch for epoch in when if epoch >= epochs]
    if late:
        rank_zero_warn(
            f"`ModelCompaction(when={list(when)})` does not compact in epoch {', '.join(map(str, late))}: the fit has "
            f"only {epochs} epochs, counted from 0. Train longer, or compact earlier; it always compacts at the end of "
            "the fit."
        )


def check_optimizers(compaction: CompressionCallback, trainer: Trainer, pl_module: LightningModule) -> None:
    """Check that each optimizer would update narrowed parameters as it does masked ones.

    Args:
        compaction: the callback, which compacts during training.
        trainer: the Trainer of the fit that is about to start.
        pl_module: the LightningModule.

    Raises:
        PlanError: naming an optimizer and a parameter that may be narrowed, if one would not.
    """
    others = [optimizer for optimizer in trainer.optimizers if not is_entrywise(optimizer)]
    if not others:
        return
    graph = compaction.trace(trainer, pl_module)
    with compaction.planning(trainer, pl_module) as (model, example):
        groups = engine.dependency_groups(model, example, graph=graph)
    members = {member.parameter for group in groups if group.reason is None for member in group.members}
    parameters = compaction.target(pl_module)[1].named_parameters()
    names = {id(parameter): name for name, parameter in parameters if name in members}
    for optimizer, options in ((other, group) for other in others for group in other.param_groups):
        for parameter in options["params"]:
            if id(parameter) in names:
                check_entrywise(optimizer, options, parameter.ndim, names[id(parameter)])


def check_start(
    compaction: CompressionCallback, trainer: Trainer, pl_module: LightningModule, when: When, raises: bool
) -> None:
    """Run all checks of a compaction before the first epoch.

    Args:
        compaction: the callback.
        trainer: the Trainer of the fit that is about to start.
        pl_module: the LightningModule.
        when: as `parse_when` returns it.
        raises: whether to raise an error if an optimizer would not continue as with masks, instead of a warning.

    Raises:
        MisconfigurationException: if nothing would be removed during training.
        PlanError: if an optimizer would not continue as with masks.
    """
    check_source(when, trainer, compaction.target(pl_module)[1])
    check_epochs(when, trainer)
    if when is None:
        return
    try:
        check_optimizers(compaction, trainer, pl_module)
    except PlanError as error:
        if raises:
            raise
        rank_zero_warn(f"The model stays masked until the end of the fit: {error}")

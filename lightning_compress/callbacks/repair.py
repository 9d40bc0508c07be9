"""Repair of mask conflicts during training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

import engine
from engine.bounds import check_kinds
from engine.repair import check_policy
from lightning_compress.callbacks.masking import MaskingCallback, combine, masks_anything, same
from lightning_compress.selection.amounts import Masks
from lightning_compress.trainer.packages import MisconfigurationException
from lightning_compress.trainer.target import to_device

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer
    from torch import nn


class MaskConflictRepair(MaskingCallback):
    """Keep the masks of coupled layers consistent, and extend them to norm layers and biases.

    :class:`ChannelPruning` calls it at each pruning, before weights are zeroed, so the order of the two callbacks does
    not matter. The masks of Lightning's ``ModelPruning`` (and of `torch.nn.utils.prune` in general) are repaired in
    their buffers; parameters without a buffer (norm layers, biases) are masked by this callback. This happens at the
    end of each epoch, at the start of the next and at the end of training, so that in either order of the callbacks
    it precedes the next forward pass, and ``ModelPruning`` making its masks permanent.

    Args:
        policy: ``"union"`` keeps a channel if any of its layers keeps it; see ``engine.fix_mask_conflict``.
        model: path of the model inside the LightningModule.
        example_input: example input of the model.

    Raises:
        InputError: for an unknown policy.

    Example:
        >>> MaskConflictRepair(policy="union").masks
        {}
    """

    def __init__(self, policy: str = "union", model: str | None = None, example_input: Any = None) -> None:
        check_kinds(MaskConflictRepair.__init__, locals(), MisconfigurationException)
        super().__init__(model, example_input)
        check_policy(policy)
        self.policy = policy
        self.report: Any = None
        self._repaired: Masks = {}

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(model=self.model)

    @override
    def first_epoch(self, trainer: Trainer) -> int | None:
        return None  # only extends the masks of other callbacks

    def repaired(self, masks: Masks, model: nn.Module, example: Any, graph: Any = None) -> Masks:
        """Return repaired masks, and store the changes in ``report``.

        Args:
            masks: masks relative to ``model``.
            model: the model.
            example: example input of the model.
            graph: graph of the model, to save a trace.

        Returns:
            New masks of the same form.
        """
        repaired_masks = engine.fix_mask_conflict(masks, model, example, policy=self.policy, graph=graph)
        self.report = repaired_masks.report
        return dict(repaired_masks)

    @override
    def forget(self) -> None:
        super().forget()
        self._repaired = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A wrong example input fails here, before the first epoch, and not at the first repair.
        if self.is_tried(trainer):
            self.report = engine.repair.RepairReport(self.policy, tuple)
        else:
            self._repaired_in({}, trainer, pl_module)
        self._repair_buffers(trainer, pl_module)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._repair_buffers(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._repair_buffers(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._repair_buffers(trainer, pl_module)

    def _repaired_in(self, masks: Masks, trainer: Trainer, pl_module: LightningModule) -> Masks:
        graph = self.trace(trainer, pl_module)
        with self.planning(trainer, pl_module) as (model, example):
            return self.repaired(masks, model, example, graph)

    @override
    def why_not_sharded(self) -> str | None:
        return None

    def _repair_buffers(self, trainer: Trainer, pl_module: LightningModule) -> None:
        model = self.target(pl_module)[1]
        buffer_masks = engine.read_masks(model)
        if not masks_anything(buffer_masks) or same(buffer_masks, self._repaired):
            return
        # ModelPruning does not know of earlier repairs, which stay masked.
        masks = self._repaired_in(combine([buffer_masks, self._masks]), trainer, pl_module)
        self.impose(pl_module, trainer.strategy.broadcast(to_device(masks, "cpu")))
        self._repaired = combine([engine.read_masks(model)])
        rank_zero_info(f"Mask conflicts repaired.\n{self.report}")

"""Cost of the model during training, before and after compaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from typing_extensions import override

import engine
from engine.bounds import check_kinds
from lightning_compress.callbacks.base import CompressionCallback
from lightning_compress.callbacks.masking import active_masks, masking_callbacks
from lightning_compress.report.latency import check_runs, latency
from lightning_compress.report.loggers import log_distribution, log_layout
from lightning_compress.selection.amounts import kept_units
from lightning_compress.trainer.packages import MisconfigurationException
from lightning_compress.trainer.strategy import parallel

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

    from lightning_compress.selection.amounts import Masks

LATENCY = "latency/forward_ms"
DISTRIBUTION = "sparsity/groups"
CHARTS = {
    "sparsity of the groups": r"sparsity/(?!channels).*",
    "MACs, now and after compaction": r"complexity/macs.*",
    "parameters, now and after compaction": r"complexity/params.*",
}


def measure(
    model: nn.Module, example: Any, masks: Masks | None = None, graph: engine.Graph | None = None
) -> dict[str, int | float]:
    """Measure the cost of a model, now and after compaction.

    Args:
        model: the model.
        example: example input of the model.
        masks: masks relative to the model; ``None`` reads zeros from the weights.
        graph: graph of the model, to save a trace.

    Returns:
        ``complexity/macs`` and ``complexity/flops`` (two per multiply-accumulate) per sample, ``complexity/params``,
        the predicted ``…_compacted``, and the fractions ``sparsity/channels`` and ``sparsity/<group>``.
    """
    graph = engine.trace(model, example) if graph is None else graph
    chosen = engine.ZEROS if masks is None else masks
    macs, params, _ = engine.count_flops_params(model, example, verbose=False, masks={}, graph=graph)
    small = engine.count_flops_params(model, example, verbose=False, masks=chosen, graph=graph)
    costs: dict[str, int | float] = {
        "complexity/macs": int(macs),
        "complexity/flops": 2 * int(macs),
        "complexity/params": int(params),
        "complexity/macs_compacted": int(small[0]),
        "complexity/params_compacted": int(small[1]),
    }
    groups = engine.dependency_groups(model, example, graph=graph)
    return {**costs, **sparsity(groups, nonzero_masks(model) if masks is None else masks)}


def nonzero_masks(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return masks of the entries that are not zero, after applying those of `torch.nn.utils.prune`.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> _ = nn.init.zeros_(layer.weight)
        >>> nonzero_masks(layer)[""]["weight"]
        tensor([[False, False]])
    """
    masks = {
        module: {name: parameter.detach() != 0 for name, parameter in owner.named_parameters(recurse=False)}
        for module, owner in model.named_modules()
    }
    for module, own in engine.read_masks(model).items():
        for name, mask in own.items():
            stored = f"{name}_orig" if f"{name}_orig" in masks[module] else name
            masks[module][stored] = masks[module][stored] & (mask != 0)
    return {module: own for module, own in masks.items() if own}


def sparsity(groups: Sequence[engine.Group], masks: Mapping[str, Mapping[str, Tensor]]) -> dict[str, float]:
    """Return the fractions of masked channels, of each prunable group and in total.

    Args:
        groups: dependency groups.
        masks: masks relative to the model.

    Returns:
        ``{"sparsity/channels": …, "sparsity/<group>": …}``.
    """
    prunable = [group for group in groups if group.reason is None]
    gone = {name: int((~keep).sum()) for name, keep in kept_units(prunable, masks).items()}
    total = sum(group.size for group in prunable)
    each = {f"sparsity/{group.name}": gone[group.name] / group.size for group in prunable}
    return {"sparsity/channels": sum(gone.values()) / total if total else 0.0, **each}


def _of_groups(metrics: Mapping[str, float]) -> list[float]:
    return [value for name, value in metrics.items() if name.startswith("sparsity/") and name != "sparsity/channels"]


class ComplexityMonitor(CompressionCallback):
    """Log MACs, FLOPs, parameters and sparsity, now and after compaction, to every logger.

    It logs at the start of training, after each epoch, and before and after each compaction by
    :class:`ModelCompaction`, whatever the order of the callbacks. All entries are kept in ``history``.

    Args:
        model: path of the model inside the LightningModule.
        example_input: example input of the model.
        latency_runs: number of timed forward passes of the example input, whose median is logged in milliseconds as
            ``latency/forward_ms``; 0: latency is not measured.

    Raises:
        MisconfigurationException: for an invalid number of runs.

    Example:
        >>> ComplexityMonitor().history
        []
    """

    def __init__(self, model: str | None = None, example_input: Any = None, latency_runs: int = 3) -> None:
        check_kinds(ComplexityMonitor.__init__, locals(), MisconfigurationException)
        super().__init__(model, example_input)
        check_runs(latency_runs)
        self.latency_runs = latency_runs
        self.history: list[dict[str, int | float]] = []

    def record(self, trainer: Trainer, pl_module: LightningModule, compacted: bool = False) -> None:
        """Measure and log, on rank 0.

        Args:
            trainer: the Trainer.
            pl_module: the LightningModule.
            compacted: whether the model is compacted, so that no masks are active.
        """
        strategy = parallel(trainer)
        if not trainer.is_global_zero and not strategy.shards:
            return
        path, model = self.target(pl_module)
        # Without explicit masks, ModelCompaction reads zeros from the weights, so the prediction must do the same.
        masks = active_masks(trainer.callbacks, pl_module, path) or None  # type: ignore[attr-defined]
        if compacted or (masks is None and (strategy.shards or not trainer.global_step) and masking_callbacks(trainer)):
            masks = {}  # zeros before the first step, as in the head of a ViT, are not masked
        graph = self.trace(trainer, pl_module)
        with self.planning(trainer, pl_module) as (whole, example):
            metrics = measure(whole, example, masks, graph)
        # There is no step between the two records of a compaction; offset the second so that charts show both.
        entry = {"step": trainer.global_step + compacted, **metrics}
        if self.history and {k: v for k, v in self.history[-1].items() if k != LATENCY} == entry:
            return
        if self.latency_runs:
            entry[LATENCY] = latency(model, self.example(trainer, pl_module), self.latency_runs, strategy.running)
        self.history.append(entry)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.log_metrics({k: v for k, v in entry.items() if k != "step"}, step=int(entry["step"]))
            log_distribution(logger, DISTRIBUTION, _of_groups(metrics), int(entry["step"]))

    @override
    def why_not_sharded(self) -> str | None:
        return None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers if trainer.is_global_zero else ():
            log_layout(logger, "compression", CHARTS)
        self.record(trainer, pl_module)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.record(trainer, pl_module)

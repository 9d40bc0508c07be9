"""What the model costs, and what it will cost once compacted, over the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from typing_extensions import override

import engine
from lightning_compress.callbacks.base import CompressionCallback
from lightning_compress.callbacks.masking import active_masks, holders
from lightning_compress.report.latency import check_runs, latency
from lightning_compress.report.loggers import log_distribution, log_layout
from lightning_compress.selection.amounts import kept_units
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
    """Costs of a model, now and after a compaction.

    Args:
        model: the model.
        example: what it takes.
        masks: masks relative to the model; ``None`` reads zeros from the weights.
        graph: its trace, where there is one.

    Returns:
        ``complexity/macs`` and ``complexity/flops`` (two per multiply-accumulate) per sample, ``complexity/params``,
        the
        predicted ``…_compacted``, and as fractions ``sparsity/channels`` and ``sparsity/<group>``.
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
    """Masks of the entries that are not zero; those of `torch.nn.utils.prune` apply.

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
    """Fractions of masked channels, of each prunable group and of all together.

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
    """Logs MACs, FLOPs, parameters and sparsity, and what they will be after compaction, to every logger.

    It does so at the start of training, after each epoch, and before and after :class:`ModelCompaction` compacts,
    which asks for it, so that their order in the list of callbacks does not matter. All that was logged is in
    ``history``.

    Args:
        model: path of the model inside the LightningModule.
        example_input: what the model takes.
        latency_runs: number of timed forward passes of the example input, whose median is logged in milliseconds as
            ``latency/forward_ms``; 0: none.

    Raises:
        MisconfigurationException: for a number of runs that is none.

    Example:
        >>> ComplexityMonitor().history
        []
    """

    def __init__(self, model: str | None = None, example_input: Any = None, latency_runs: int = 3) -> None:
        super().__init__(model, example_input)
        check_runs(latency_runs)
        self.latency_runs = latency_runs
        self.history: list[dict[str, int | float]] = []

    def record(self, trainer: Trainer, pl_module: LightningModule, compacted: bool = False) -> None:
        """Measure and log, on rank 0.

        Args:
            trainer: the Trainer.
            pl_module: the LightningModule.
            compacted: whether the model is compacted, so that no mask is in force.
        """
        spread = parallel(trainer)
        if not trainer.is_global_zero and not spread.shards:
            return
        path, model = self.target(pl_module)
        # Without explicit masks, ModelCompaction reads zeros from the weights: the prediction has to do the same.
        masks = active_masks(trainer.callbacks, pl_module, path) or None  # type: ignore[attr-defined]
        if compacted or (masks is None and (spread.shards or not trainer.global_step) and holders(trainer)):
            masks = {}  # what is zero by itself before the first step (a ViT's head) has yet to learn
        graph = self.trace(trainer, pl_module)
        with self.planning(trainer, pl_module) as (whole, example):
            metrics = measure(whole, example, masks, graph)
        # Right after the compaction no step has been made: one later, both can be seen in a chart.
        entry = {"step": trainer.global_step + compacted, **metrics}
        if self.history and {k: v for k, v in self.history[-1].items() if k != LATENCY} == entry:
            return
        if self.latency_runs:
            entry[LATENCY] = latency(model, self.example(trainer, pl_module), self.latency_runs, spread.running)
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

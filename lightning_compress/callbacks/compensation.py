"""Compensation during training: consumers of masked channels compensate for them by a least-squares fit."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

import engine
from engine.bounds import check_kinds, check_number
from engine.compensation import CompensationReport
from engine.program import stored_tensors
from lightning_compress.callbacks.base import CompressionCallback
from lightning_compress.callbacks.masking import active_masks, combine, same
from lightning_compress.callbacks.pruning import ChannelPruning
from lightning_compress.trainer.averages import averages
from lightning_compress.trainer.calibration import train_batches
from lightning_compress.trainer.packages import MisconfigurationException
from lightning_compress.trainer.ranks import alone, from_rank_zero, gathered
from lightning_compress.trainer.strategy import parallel

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

    from lightning_compress.selection.amounts import Masks

_METHODS = ("least_squares", "norms")


class Compensation(CompressionCallback):
    """Preserve the model's outputs when channels are masked, by a closed-form fit of the weights.

    It acts at each pruning by a :class:`ChannelPruning`, after mask repair, whatever the order of the callbacks. The
    fit targets the outputs of the model right before the pruning. Between prunings it does nothing.

    Inputs come from the train dataloader, without labels; its order and all random states are preserved. Weights
    change in place, and optimizers keep their states. Averaged copies of averaging callbacks change by the same
    amounts. With several processes, rank 0 fits on its share of the data, and the others copy its weights. With
    sharded parameters, all ranks fit together on their shares: they sum the statistics of the fit, and no process
    holds more than one whole parameter at a time.

    After a fit, batch norms adopt the statistics of the inputs, and their weights and biases compensate for the change.
    Train mode, which normalises by the statistics of each batch, then starts from the function of eval mode. If a
    callback averages weights, norms keep their statistics.

    Args:
        samples: number of samples at each pruning; with sharded parameters, per process.
        method: ``"least_squares"`` fits the weights that read masked channels, see `engine.compensate`; ``"norms"``
            only updates the statistics of batch norms, see `engine.recalibrate_norms`, which is faster but recovers
            less.
        ridge: weight of the ridge penalty.
        model: path of the pruned model inside the LightningModule.
        example_input: example input of the model.
        seed: seed of the choice of samples.

    Attributes:
        report: the errors by group at the last pruning; None before it, and with ``method="norms"``.

    Raises:
        MisconfigurationException: for an invalid argument, or if no `ChannelPruning` prunes this model.

    Example:
        >>> callbacks = [ChannelPruning(amount=0.5), Compensation(samples=512)]
        >>> callbacks[1].report is None
        True
    """

    def __init__(
        self,
        samples: int = 1024,
        method: str = "least_squares",
        ridge: float = 1e-3,
        model: str | None = None,
        example_input: Any = None,
        seed: int = 0,
    ) -> None:
        check_kinds(Compensation.__init__, locals(), MisconfigurationException)
        super().__init__(model, example_input)
        if method not in _METHODS:
            raise MisconfigurationException(f"`method` must be one of {', '.join(_METHODS)}, got {method!r}.")
        check_number("samples", samples, 2, whole=True, error=MisconfigurationException)
        check_number("ridge", ridge, 0, error=MisconfigurationException)
        check_number("seed", seed, whole=True, error=MisconfigurationException)
        self.samples, self.method, self.ridge, self.seed = samples, method, ridge, seed
        self.report: CompensationReport | None = None
        self._due = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self.report, self._due = None, False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Fail before the first epoch, not at the first pruning.
        path = self.target(pl_module)[0]
        prunings = [c for c in trainer.callbacks if isinstance(c, ChannelPruning)]  # type: ignore[attr-defined]
        if not any(pruning.target(pl_module)[0] == path for pruning in prunings):
            raise MisconfigurationException(
                f"`Compensation` needs a `ChannelPruning` of the model {path!r}, but the Trainer has none."
            )
        graph, strategy = self.trace(trainer, pl_module), parallel(trainer)
        if strategy.shards and averages(trainer.callbacks, pl_module, path):  # type: ignore[attr-defined]
            raise MisconfigurationException(
                "`Compensation` cannot change averaged copies of a model with sharded parameters. Omit one of the two, "
                "or train with `strategy='ddp'`."
            )
        strategy.decided(lambda: self._check(trainer, pl_module, graph))

    @override
    def why_not_sharded(self) -> str | None:
        return None

    def _check(self, trainer: Trainer, pl_module: LightningModule, graph: engine.Graph) -> None:
        if graph.decided and self.method == "least_squares":
            raise MisconfigurationException(
                f"`{type(self.target(pl_module)[1]).__name__}` has data-dependent control flow, so its weights cannot "
                "be fitted on other data. Use `Compensation(method='norms')`."
            )
        if not self._batches(trainer, pl_module, samples=1):
            raise MisconfigurationException("`Compensation` needs samples, but the train dataloader is empty.")

    def _batches(self, trainer: Trainer, pl_module: LightningModule, samples: int) -> list[Any]:
        model, example = self.target(pl_module)[1], self.example(trainer, pl_module)
        return train_batches(trainer, pl_module, model, example, samples, self.seed)

    @override
    def during_masking(
        self, trainer: Trainer, pl_module: LightningModule, path: str, masks: Masks, graph: engine.Graph
    ) -> None:
        own, model = self.target(pl_module)
        if own != path:
            return
        before = active_masks(trainer.callbacks, pl_module, path)  # type: ignore[attr-defined]
        after = combine([before, masks])
        self._due = not same(after, combine([before, _all_kept(after)]))
        if self._due and self.method == "least_squares":

            def fit() -> CompensationReport:
                batches, strategy = self._batches(trainer, pl_module, self.samples), parallel(trainer)
                example = self.example(trainer, pl_module) if strategy.shards else graph.kwargs or graph.args
                with trainer.precision_plugin.forward_context():
                    return engine.compensate(
                        model, example, after, batches, samples=self.samples, ridge=self.ridge,
                        graph=graph, processes=strategy.processes,
                    )  # fmt: skip

            self.report = self._on_all_ranks(trainer, pl_module, fit)
            rank_zero_info(f"Compensation: {_brief(self.report)}")

    @override
    def after_masking(self, trainer: Trainer, pl_module: LightningModule, path: str) -> None:
        own, model = self.target(pl_module)
        if own != path or not self._due:
            return
        fitted = self.method == "least_squares"
        if fitted and averages(trainer.callbacks, pl_module, path):  # type: ignore[attr-defined]
            return  # averaging weights that belong to different statistics would be meaningless

        def estimate() -> None:
            batches, processes = self._batches(trainer, pl_module, self.samples), parallel(trainer).processes
            if processes is not None:
                del batches[min(gathered(len(batches))) :]
            with trainer.precision_plugin.forward_context(), alone() if processes is None else nullcontext():
                engine.recalibrate_norms(model, batches, keep_outputs=fitted, processes=processes)

        self._on_all_ranks(trainer, pl_module, estimate)

    def _on_all_ranks(self, trainer: Trainer, pl_module: LightningModule, change: Any) -> Any:
        """Change the model on rank 0, and apply the same change on the other ranks and in averaged copies."""
        strategy, model = parallel(trainer), self.target(pl_module)[1]
        if strategy.shards:
            return strategy.decided(change)
        stored = stored_tensors(model)
        before = {name: tensor.detach().clone() for name, tensor in stored.items()}

        def changed() -> tuple[Any, dict[str, Tensor]]:
            result = change()
            values = {n: t.detach().cpu() for n, t in stored.items() if not torch.equal(t, before[n])}
            return result, values

        result, values = from_rank_zero(trainer, changed)
        with torch.no_grad():
            for name, value in values.items():
                stored[name].copy_(value)
        if self.method == "least_squares":
            self._change_averages(trainer, pl_module, {name: stored[name] - before[name] for name in values})
        return result

    @torch.no_grad()
    def _change_averages(self, trainer: Trainer, pl_module: LightningModule, changes: Mapping[str, Tensor]) -> None:
        path = self.target(pl_module)[0]
        for average in averages(trainer.callbacks, pl_module, path):  # type: ignore[attr-defined]
            prefix = f"{average.path}." if average.path else ""
            stored = stored_tensors(average.module)
            for name in {name.removeprefix(prefix): None for name in changes if name.startswith(prefix)}:
                stored[name] += changes[prefix + name].to(stored[name])


def _all_kept(masks: Masks) -> Masks:
    return {
        module: {name: torch.ones_like(mask, dtype=torch.bool) for name, mask in own.items()}
        for module, own in masks.items()
    }


def _brief(report: CompensationReport) -> str:
    """Summarise a compensation in one line.

    Example:
        >>> from engine.compensation.report import Compensated
        >>> _brief(CompensationReport({"0": Compensated(0.25, 0.01, ("2", "4"))}))
        "2 layers fitted, largest error 0.01 (group '0', 0.25 before)."
    """
    layers = sum(len(row.layers) for row in report.values())
    if not layers:
        return "no layer was fitted."
    name, row = max(report.items(), key=lambda item: item[1].after)
    return f"{layers} layers fitted, largest error {row.after:.2g} (group {name!r}, {row.before:.2g} before)."

"""Sensitivity analysis with the validation metric of a Trainer, distributed over its ranks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torchmetrics import Metric

import engine
from engine.bounds import check_kinds
from engine.program import copied
from lightning_compress.trainer.packages import TREES, MisconfigurationException
from lightning_compress.trainer.ranks import gathered, grouped, together
from lightning_compress.trainer.strategy import check_strategy
from lightning_compress.trainer.target import find_example, find_model

if TYPE_CHECKING:
    from pytorch_lightning import LightningDataModule, LightningModule, Trainer


def analyze_sensitivity(
    trainer: Trainer,
    module: LightningModule,
    datamodule: LightningDataModule | None = None,
    dataloaders: Any = None,
    metric: str = "val_loss",
    sparsities: Sequence[float] | None = None,
    prune_type: str = "l1",
    early_stop_mode: str | None = None,
    early_stop_value: float | None = None,
    *,
    specified_layers: Sequence[str] | None = None,
    group: bool = False,
    model: str | None = None,
    example_input: Any = None,
    results_path: str | Path | None = None,
) -> engine.SensitivityTable:
    """Measure how the validation metric changes when layers are pruned one by one.

    Each evaluation runs ``validate`` on a copy of the module, with a separate Trainer on the same device and in the
    same precision; ``module`` and ``trainer`` are not changed. Under DDP the layers are divided among the ranks. Every
    rank validates on all of the data with the weights of rank 0, and returns the complete table.

    Args:
        trainer: the Trainer of the module; it launches its processes if it has not done so yet.
        module: the LightningModule; its validation step has to log the metric.
        datamodule: source of the validation data; by default that of the Trainer, or the module itself.
        dataloaders: validation dataloaders, instead of a datamodule.
        metric: name of the logged metric.
        sparsities: fractions of each layer, in [0, 1); 0.1, 0.2 … 0.9 by default.
        prune_type: ``"l1"``, ``"l2"``, ``"fpgm"``, or ``"level"`` for single weights.
        early_stop_mode: ``"minimize"``, ``"maximize"``, ``"dropped"`` or ``"raised"``; see
            `engine.SensitivityAnalysis`.
        early_stop_value: threshold of ``early_stop_mode``.
        specified_layers: names of layers inside the model; all by default.
        group: whether to prune coupled layers together.
        model: path of the model inside the LightningModule; ``None``: as for the callbacks.
        example_input: example input of the model, for ``group``; by default the module's ``example_input_array``, else
            the first batch of the data.
        results_path: file for intermediate results, from which an interrupted analysis resumes; rank r > 0 writes to
            ``<name>.rank<r>.<ending>`` beside it.

    Returns:
        Layer -> sparsity -> metric, with ``export``, ``plot`` and ``suggest``.

    Raises:
        MisconfigurationException: for a metric that is not logged, a strategy that shards parameters, or a failure on
            another rank.
        InputError: for other invalid arguments.

    Example:
        >>> from pytorch_lightning import Trainer
        >>> from pytorch_lightning.demos.boring_classes import BoringModel
        >>> class Model(BoringModel):
        ...     def validation_step(self, batch, batch_idx):
        ...         self.log("val_zeros", (self.layer(batch) == 0).float().mean())
        >>> trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, limit_val_batches=1)
        >>> model = Model()
        >>> table = analyze_sensitivity(trainer, model, metric="val_zeros", sparsities=[0.5])
        >>> table
        metric with one layer pruned (0 with none)
        layer  50%
        layer  0.5
        >>> table.suggest(0.1)
        {'layer': 0.0}
    """
    check_kinds(analyze_sensitivity, locals())
    check_strategy(trainer, "The sensitivity analysis validates copies of the model.")
    task = _Task(
        trainer=trainer,
        module=module,
        data=_data(trainer, datamodule, dataloaders),
        metric=metric,
        path=model,
        example_input=example_input,
        settings={
            "sparsities": sparsities,
            "prune_type": prune_type,
            "early_stop_mode": early_stop_mode,
            "early_stop_value": early_stop_value,
            "group": group,
        },
        layers=specified_layers,
        results_path=None if results_path is None else Path(results_path),
    )
    launcher = trainer.strategy.launcher
    # In a process that the Trainer has launched, launching again would start more processes.
    rows, columns, baseline, better = task() if launcher is None or grouped() else launcher.launch(task)
    return engine.SensitivityTable(rows, columns, baseline, better)


def validation_metric(
    trainer: Trainer,
    module: LightningModule,
    datamodule: LightningDataModule | None = None,
    dataloaders: Any = None,
    metric: str = "val_loss",
    *,
    model: str | None = None,
    example_input: Any = None,
) -> tuple[nn.Module, Any, Callable[[nn.Module], float]]:
    """Copy a module's network, and return it with an example input and a function that validates it.

    Use it as `anneal_amounts(*validation_metric(trainer, module), amount=0.5)`. Validation runs in a separate Trainer
    on the same device and in the same precision; ``module`` and ``trainer`` are not changed.

    Args:
        trainer: the Trainer of the module.
        module: the LightningModule; its validation step has to log the metric.
        datamodule: source of the validation data; by default that of the Trainer, or the module itself.
        dataloaders: validation dataloaders, instead of a datamodule.
        metric: name of the logged metric.
        model: path of the model inside the LightningModule; ``None``: as for the callbacks.
        example_input: example input of the model; by default the module's ``example_input_array``, else the first batch
            of the data.

    Returns:
        ``(network, example input, evaluate)``.

    Raises:
        MisconfigurationException: for a strategy that shards parameters, or without an example input; by ``evaluate``,
            for a metric that is not logged.

    Example:
        >>> from lightning_compress import anneal_amounts
        >>> net, example, evaluate = validation_metric(trainer, module, metric="val_acc")  # doctest: +SKIP
        >>> amounts = anneal_amounts(net, example, evaluate, amount=0.5).amounts  # doctest: +SKIP
    """
    check_strategy(trainer, "The sensitivity analysis validates copies of the model.")
    replica, own = _replica(trainer, module), _own_trainer(trainer)
    network = find_model(replica, model)[1]
    data = _data(trainer, datamodule, dataloaders)
    evaluate = partial(_validate, own, replica, data, metric)
    example = _example(trainer, replica, network, data, example_input)
    return network, example, lambda _: evaluate()


def _data(trainer: Trainer, datamodule: LightningDataModule | None, dataloaders: Any) -> dict[str, Any]:
    if dataloaders is not None:
        return {"dataloaders": dataloaders, "datamodule": datamodule}  # Lightning raises an error if both are given
    return {"datamodule": getattr(trainer, "datamodule", None) if datamodule is None else datamodule}


def _not_distributed() -> bool:
    return False


@dataclass
class _Task:
    """The analysis, as every process runs it."""

    trainer: Trainer
    module: LightningModule
    data: dict[str, Any]
    metric: str
    path: str | None
    example_input: Any
    settings: dict[str, Any]
    layers: Sequence[str] | None
    results_path: Path | None

    def __call__(self) -> tuple[dict[str, dict[float, float]], list[float], float, str | None]:
        """Analyse this rank's share and gather all shares, as plain data that can be sent between processes."""
        self.trainer.strategy.setup_environment()
        # Every rank reads all results before any rank adds its own, so that all agree on what remains to be measured.
        analyzer = together(self._analyzer)
        order = list(analyzer.target_layer)
        shares = gathered(together(lambda: analyzer.analysis(specified_layers=self.layers, shard=self._shard())))
        rows = {layer: row for share in shares for layer, row in share.items()}
        first = shares[0]
        return {n: rows[n] for n in order if n in rows}, first.sparsities, first.baseline, first.better

    def _shard(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if grouped() else (0, 1)

    def _analyzer(self) -> engine.SensitivityAnalysis:
        replica = _replica(self.trainer, self.module)
        model = find_model(replica, self.path)[1]
        own = _own_trainer(self.trainer)
        by_group = self.settings["group"]
        example = _example(self.trainer, replica, model, self.data, self.example_input) if by_group else None
        rank = self._shard()[0]
        analyzer = engine.SensitivityAnalysis(
            model,
            partial(_validate, own, replica, self.data, self.metric),
            **self.settings,
            dummy_input=example,
            results_path=_of_rank(self.results_path, rank),
            progress=rank == 0,
        )
        if self.results_path is not None:  # of all ranks before an interruption, maybe with another division
            pattern = f"{self.results_path.stem}.rank*{self.results_path.suffix}"
            paths = [self.results_path, *sorted(self.results_path.parent.glob(pattern))]
            analyzer.load_results(*(path for path in paths if path.is_file()), required=False)
        return analyzer


def _example(
    trainer: Trainer, replica: LightningModule, model: nn.Module, data: dict[str, Any], example_input: Any
) -> Any:
    """Return the example input: the argument, `example_input_array`, or the first validation batch."""
    own, loader = _own_trainer(trainer, limit_val_batches=1), None
    if example_input is None and replica.example_input_array is None:
        _run_validation(own, replica, data)  # sets up the data, or raises if there are none
        loader = own.val_dataloaders
        loader = loader[0] if isinstance(loader, (list, tuple)) else loader
    return find_example(own, replica, model, example_input, loader)


def _replica(trainer: Trainer, module: LightningModule) -> LightningModule:
    replica = copied(module)
    # Lightning caches metrics by identity once one is logged, but those of the copy are different objects.
    replica._metric_attributes = None
    for part in replica.modules():
        if isinstance(part, Metric):  # ranks validate unequally often, so synchronisation would hang
            part.distributed_available_fn = _not_distributed
    if grouped():
        replica.load_state_dict(trainer.strategy.broadcast(replica.state_dict()))
    return replica


def _of_rank(path: Path | None, rank: int) -> Path | None:
    return path if path is None or rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def _own_trainer(trainer: Trainer, limit_val_batches: int | None = None) -> Trainer:
    """Create a Trainer on this process's device only; that of the run would broadcast the weights of rank 0."""
    origins = [cls.__module__ for cls in type(trainer).__mro__]
    tree = importlib.import_module(next(t for t, _ in reversed(TREES) if any(o.startswith(f"{t}.") for o in origins)))
    device = trainer.strategy.root_device
    own_trainer: Trainer = tree.Trainer(
        accelerator=device.type,
        devices=1,
        strategy=tree.strategies.SingleDeviceStrategy(device=device),
        precision=trainer.precision,
        limit_val_batches=trainer.limit_val_batches if limit_val_batches is None else limit_val_batches,
        default_root_dir=trainer.default_root_dir,
        use_distributed_sampler=False,
        inference_mode=False,  # tensors created in inference mode could not be restored
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return own_trainer


def _run_validation(own: Trainer, replica: LightningModule, data: dict[str, Any]) -> None:
    datamodule = data.get("datamodule")
    before = getattr(datamodule, "trainer", None)
    try:
        own.validate(replica, **data, verbose=False)
    finally:
        if datamodule is not None:
            datamodule.trainer = before


def _validate(own: Trainer, replica: LightningModule, data: dict[str, Any], metric: str) -> float:
    _run_validation(own, replica, data)
    if metric not in own.callback_metrics:
        logged = ", ".join(own.callback_metrics) or "nothing"
        raise MisconfigurationException(
            f"`metric={metric!r}` is not logged in validation; `{type(replica).__name__}` logs {logged}. Log it in "
            f"`validation_step`, as in `self.log({metric!r}, value)`."
        )
    return float(own.callback_metrics[metric])

"""Sensitivity analysis with a Trainer's validation as the metric, divided among the ranks of a run."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torchmetrics import Metric

import engine
from lightning_compress.trainer.packages import TREES, MisconfigurationException
from lightning_compress.trainer.ranks import gathered, grouped
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
    """How the validation metric suffers when one layer is pruned, layer by layer.

    Each evaluation is a run of ``validate`` on a copy of the module, by a Trainer of its own on the same device and in
    the same precision; ``module`` and ``trainer`` stay as they are. Under DDP the layers are divided among the ranks,
    and every rank returns the table that one process would: each validates on all of the data, with rank 0's weights.

    Args:
        trainer: the Trainer that trains the module; where it has not launched its processes yet, it does so now.
        module: the LightningModule; its validation step has to log the metric.
        datamodule: where the validation data come from; by default the Trainer's, or the module itself.
        dataloaders: validation dataloaders, in place of a datamodule.
        metric: name of the logged metric.
        sparsities: fractions of each layer, in [0, 1); 0.1, 0.2 … 0.9 by default.
        prune_type: ``"l1"``, ``"l2"``, ``"fpgm"``, or ``"level"`` for single weights.
        early_stop_mode: ``"minimize"``, ``"maximize"``, ``"dropped"`` or ``"raised"``; see
            `engine.SensitivityAnalysis`.
        early_stop_value: the value that goes with it.
        specified_layers: names of layers inside the model; all by default.
        group: prune coupled layers together.
        model: path of the model inside the LightningModule; ``None``: as for the callbacks.
        example_input: what the model takes, for ``group``; by default the module's ``example_input_array``, else the
            first batch of the data.
        results_path: file that keeps the results as they come, so that an analysis that was interrupted goes on; rank r
            above 0 has ``<name>.rank<r>.<ending>`` beside it.

    Returns:
        Layer -> sparsity -> metric, with ``export``, ``plot`` and ``suggest``.

    Raises:
        MisconfigurationException: for a metric that is not logged, a strategy that shards parameters, or where another
            rank failed.
        InputError: for the other arguments.

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
    # Within a process that the Trainer has launched already, launching again would start more of them.
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
    """A copy of a module's network, what it takes, and a function that validates it as it is then.

    Made for `anneal_amounts(*validation_metric(trainer, module), amount=0.5)`. The validation is a Trainer's of its
    own, on the same device and in the same precision; ``module`` and ``trainer`` stay as they are.

    Args:
        trainer: the Trainer that trains the module.
        module: the LightningModule; its validation step has to log the metric.
        datamodule: where the validation data come from; by default the Trainer's, or the module itself.
        dataloaders: validation dataloaders, in place of a datamodule.
        metric: name of the logged metric.
        model: path of the model inside the LightningModule; ``None``: as for the callbacks.
        example_input: what the model takes; by default the module's ``example_input_array``, else the first batch of
            the data.

    Returns:
        ``(network, example input, evaluate)``.

    Raises:
        MisconfigurationException: for a strategy that shards parameters, or without an example input; when it is
            called, for a metric that is not logged.

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
        return {"dataloaders": dataloaders, "datamodule": datamodule}  # Lightning says that it wants one of them
    return {"datamodule": getattr(trainer, "datamodule", None) if datamodule is None else datamodule}


def _not_distributed() -> bool:
    return False


@dataclass
class _Task:
    """What every process does."""

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
        """Analyse this rank's share and put all shares together; plain data, as it may travel between processes."""
        self.trainer.strategy.setup_environment()
        table: engine.SensitivityTable | None = None
        order: list[str] = []
        failure: Exception | None = None
        try:
            analyzer = self._analyzer()
            order = list(analyzer.target_layer)
            table = analyzer.analysis(specified_layers=self.layers, shard=self._shard())
        except Exception as error:  # raised again below, once no other rank waits for this one
            failure = error
        shares: list[Any] = gathered((table, None if failure is None else f"{type(failure).__name__}: {failure}"))
        if failure is not None:
            raise failure
        failed = [(rank, message) for rank, (_, message) in enumerate(shares) if message is not None]
        if failed:
            raise MisconfigurationException(f"The analysis failed on rank {failed[0][0]}: {failed[0][1]}")
        rows = {layer: row for share, _ in shares for layer, row in share.items()}
        first = shares[0][0]
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
        if self.results_path is not None:  # what other ranks found before an interruption, maybe with other shares
            pattern = f"{self.results_path.stem}.rank*{self.results_path.suffix}"
            paths = [self.results_path, *sorted(self.results_path.parent.glob(pattern))]
            analyzer.load_results(*(path for path in paths if path.is_file()), required=False)
        return analyzer


def _example(
    trainer: Trainer, replica: LightningModule, model: nn.Module, data: dict[str, Any], example_input: Any
) -> Any:
    """What the model takes: as asked for, else the first validation batch."""
    own, loader = _own_trainer(trainer, limit_val_batches=1), None
    if example_input is None and replica.example_input_array is None:
        _run_validation(own, replica, data)  # which sets the data up, and says so where there are none
        loader = own.val_dataloaders
        loader = loader[0] if isinstance(loader, (list, tuple)) else loader
    return find_example(own, replica, model, example_input, loader)


def _replica(trainer: Trainer, module: LightningModule) -> LightningModule:
    replica = copy.deepcopy(module)
    # Lightning remembers metrics by their identity once one is logged, and the copy's are other objects.
    replica._metric_attributes = None
    for part in replica.modules():
        if isinstance(part, Metric):  # ranks validate unequally often: waiting for each other, they would hang
            part.distributed_available_fn = _not_distributed
    if grouped():
        replica.load_state_dict(trainer.strategy.broadcast(replica.state_dict()))
    return replica


def _of_rank(path: Path | None, rank: int) -> Path | None:
    return path if path is None or rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def _own_trainer(trainer: Trainer, limit_val_batches: int | None = None) -> Trainer:
    """A Trainer on this process's device alone: that of the run would hand rank 0's weights to all."""
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
        inference_mode=False,  # tensors that are made there could not be restored
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
            f"`metric={metric!r}` is not logged in validation, where `{type(replica).__name__}` logs {logged}. Log it "
            f"in `validation_step`, as in `self.log({metric!r}, value)`."
        )
    return float(own.callback_metrics[metric])

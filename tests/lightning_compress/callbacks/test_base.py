"""What all callbacks share."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.strategies import FSDPStrategy
from torch import nn

import engine
from engine.errors import InputError
from lightning_compress import (
    ChannelPruning,
    Compensation,
    ComplexityMonitor,
    CompressionReport,
    Distillation,
    FinalMetric,
    MaskConflictRepair,
    ModelCompaction,
    SparseTraining,
    prune,
    summarize,
)
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.models import Base, OnDemand, Wrapped, data, fit, seeded


def test_engine_imports_no_lightning() -> None:
    """The dependency goes one way: no module of the engine imports Lightning, torchmetrics or the callbacks."""
    modules = list((Path(__file__).parents[3] / "engine").rglob("*.py"))
    assert modules
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [n for n in names if "lightning" in n or n.startswith("torchmetrics")], path


@pytest.mark.parametrize(
    "callback",
    [ChannelPruning, ComplexityMonitor, CompressionReport, MaskConflictRepair, ModelCompaction, SparseTraining],
)
def test_each_callback_checks_the_strategy(callback: type) -> None:
    """Each callback refuses in `setup` of a fit."""
    holder = SimpleNamespace(strategy=object.__new__(FSDPStrategy), callbacks=[])
    with pytest.raises(MisconfigurationException, match="FSDPStrategy"):
        callback().setup(holder, Wrapped(), "fit")


class Counted(ChannelPruning):
    """Keeps every example input that a model is tried with."""

    def __init__(self, **options: object) -> None:
        super().__init__(amount=0.5, **options)
        self.before_training = 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """All callbacks have had their start."""
        self.before_training = self.before_training or len(TRACED)
        super().on_train_epoch_start(trainer, pl_module)


TRACED: list[object] = []


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_callbacks_of_one_model_try_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool, last: bool
) -> None:
    """With one example input: whether the model accepts it, and whether it can be followed; with others, each tries."""
    trace = engine.trace

    def counting(model: Base, example: object, **options: object) -> engine.Graph:
        TRACED.append(example)
        return trace(model, example, **options)

    monkeypatch.setattr(engine, "trace", counting)
    x = torch.rand(2, 3, 8, 8)
    inputs = [x if same else x.clone() for _ in range(3)]
    for _ in range(2):
        TRACED.clear()
        pruning = Counted(example_input=inputs[0])
        others = MaskConflictRepair(example_input=inputs[1]), ModelCompaction(example_input=inputs[2])
        fit(seeded(Wrapped), tmp_path, *((*others, pruning) if last else (pruning, *others)))
        assert pruning.before_training == (2 if same else 6)
        assert others[0].report is not None and others[1].certificate.verified


def test_a_second_fit_draws_its_own_batch(tmp_path: Path) -> None:
    """Of its own loader: what callbacks share is of one fit."""
    callbacks = Counted(), MaskConflictRepair(), ModelCompaction()
    sizes = []
    for batch in (2, 1):
        module = seeded(Wrapped)
        module.train_dataloader = lambda batch=batch: data(4, batch)
        fitted = fit(module, tmp_path, *callbacks, max_epochs=1)
        sizes.append([len(callback.example(fitted, module)) for callback in callbacks])
    assert sizes == [[2, 2, 2], [1, 1, 1]]


@pytest.mark.parametrize("last", [True, False])
def test_an_example_input_of_one_callback_is_that_of_the_others(tmp_path: Path, last: bool) -> None:
    """A callback without one does not draw a batch."""
    x = torch.rand(5, 3, 8, 8)
    callbacks = [Counted(example_input=x), MaskConflictRepair(), ModelCompaction()]
    module = seeded(Wrapped)
    fitted = fit(module, tmp_path, *(reversed(callbacks) if last else callbacks), max_epochs=1)
    assert [len(callback.example(fitted, module)) for callback in callbacks] == [5, 5, 5]


def test_without_pruning_the_model_is_tried_all_the_same(tmp_path: Path) -> None:
    """By the first callback that needs it later: before the first epoch."""
    wrong = {"example_input": torch.rand(2, 5, 8, 8)}
    for callback in (ModelCompaction(**wrong), MaskConflictRepair(**wrong)):
        with pytest.raises(MisconfigurationException, match="rejects the example input"):
            fit(seeded(Wrapped), tmp_path, callback)


class _OnDemand(Wrapped):
    def __init__(self) -> None:
        super().__init__()
        self.net = OnDemand()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("path", [None, "net"])
def test_what_one_callback_declares_holds_for_all(tmp_path: Path, path: str | None, first: bool) -> None:
    """Of those on the same model, whether they name it or find it: all analyse one program."""
    declared, plain = {"constants": "embed", "model": path}, dict[str, str]()
    pruning = ChannelPruning(amount=0.5, **(declared if first else plain))
    compaction = ModelCompaction(on_failure="raise", **(plain if first else declared))
    module = seeded(_OnDemand)
    fit(module, tmp_path, pruning, MaskConflictRepair(), compaction)
    assert compaction.certificate.verified and module.net.head.in_features == 4


def test_a_declaration_of_nothing_is_named(tmp_path: Path) -> None:
    """It is no step that cannot be traced."""
    with pytest.raises(InputError, match="^`constants` names 'nothing'; the model has no such"):
        fit(seeded(_OnDemand), tmp_path, ChannelPruning(amount=0.5, constants="nothing"), ModelCompaction())


def test_what_is_not_declared_stays(tmp_path: Path) -> None:
    """Another argument may ask for it; a declaration for another model is none for this one."""
    module = seeded(_OnDemand)
    other = ComplexityMonitor("net.stem", torch.rand(2, 3, 8, 8))
    other.constants = ("embed",)
    with pytest.raises(MisconfigurationException, match="stem: could be read by the code at .*, which did not run"):
        fit(module, tmp_path, ChannelPruning(amount=0.5, model="net"), ModelCompaction(model="net"), other)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (ChannelPruning, {"criterion": None}), (ChannelPruning, {"criterion": 3}), (ChannelPruning, {"scope": []}),
        (ChannelPruning, {"schedule": None}), (ChannelPruning, {"schedule": 0.5}), (ChannelPruning, {"seed": "a"}),
        (ChannelPruning, {"normalize": ["mean"]}), (ChannelPruning, {"widths": [8, 16]}),
        (ChannelPruning, {"widths": {"fc": 8}}), (ChannelPruning, {"uniform": "no"}),
        (ChannelPruning, {"model": nn.ReLU()}), (ModelCompaction, {"model": ["net"]}),
        (ModelCompaction, {"filename": None}), (ModelCompaction, {"filename": Path("small.ckpt")}),
        (ModelCompaction, {"dirpath": 3}), (ModelCompaction, {"save": "no"}), (ModelCompaction, {"when": object()}),
        (ModelCompaction, {"when": np.float32(1.5)}), (ModelCompaction, {"steps": None}),
        (MaskConflictRepair, {"policy": ["union"]}), (ComplexityMonitor, {"model": 3}),
        (Compensation, {"seed": None}), (Compensation, {"method": {}}), (Distillation, {"loss": None}),
        (SparseTraining, {"penalty": ["bn_scale"]}), (SparseTraining, {"growth": 3}),
        (SparseTraining, {"growth": [2.0]}), (SparseTraining, {"growth": {}}), (CompressionReport, {"terminal": None}),
        (CompressionReport, {"figures": 1}), (CompressionReport, {"dirpath": []}), (FinalMetric, {"monitor": 3}),
    ],
)  # fmt: skip
def test_arguments_of_another_kind_are_named(kind: Any, arguments: dict[str, Any]) -> None:
    """By each constructor, before a Trainer sees the callback."""
    with pytest.raises(MisconfigurationException, match=next(iter(arguments))):
        kind(**arguments)


def test_numbers_of_numpy_are_numbers() -> None:
    """As results of other computations are."""
    assert ModelCompaction(when=np.int64(2)).when == (2,) and ModelCompaction(when=np.float64(0.5)).when == 0.5
    assert ModelCompaction(when=np.arange(2)).when == (0, 1) and ChannelPruning(seed=np.int64(3)).seed == 3


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (prune, {"criterion": 3}), (prune, {"criterion": None}), (prune, {"data": 5}), (prune, {"scope": []}),
        (prune, {"compensate": "no"}), (summarize, {"amounts": None}), (summarize, {"amounts": 0.5}),
        (summarize, {"path": 3}), (summarize, {"stock": "yes"}),
    ],
)  # fmt: skip
def test_functions_without_a_trainer_name_them_too(function: Any, options: dict[str, Any]) -> None:
    """Before they analyse the model."""
    with pytest.raises((MisconfigurationException, InputError), match=f"`{next(iter(options))}`"):
        function(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)), torch.ones(1, 2), **options)
    with pytest.raises(InputError, match="^`model` must be a `Module`, got None"):
        function(None, torch.ones(1, 2))

"""Strategies: which are accepted, which are refused, and what those that spread parameters refuse."""

from __future__ import annotations

import ast
import copy
import re
import tokenize
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from torch import nn

import engine
import lightning_compress
from engine.compaction.parts import part_entry
from engine.errors import PlanError, VerificationError
from lightning_compress import ChannelPruning, Distillation, ModelCompaction
from lightning_compress.trainer import ranks, strategy
from lightning_compress.trainer.packages import MisconfigurationException
from lightning_compress.trainer.strategy import Copied, Job, Sharded, Whole, check_strategy, parallel


def holder(strategy: type) -> Any:
    """A Trainer with a strategy that was never set up, as on a GPU."""
    kind = type(strategy.__name__, (strategy,), {"root_device": torch.device("cuda")})
    return SimpleNamespace(strategy=object.__new__(kind), world_size=1, is_global_zero=True)


@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy])
def test_flattening_strategies_are_refused(strategy: type) -> None:
    """FSDP of the first kind and DeepSpeed are errors that say what works, subclasses included."""
    for cls in (strategy, type("Mine", (strategy,), {})):
        with pytest.raises(MisconfigurationException, match=f"(?s){cls.__name__}.*ModelParallelStrategy.*offline"):
            check_strategy(holder(cls))


def test_unknown_strategies_are_refused() -> None:
    """Nobody knows how they spread parameters."""
    with pytest.raises(MisconfigurationException, match="not `Other`"):
        parallel(holder(type("Other", (), {})))


@pytest.mark.parametrize(
    ("strategy", "kind"), [(SingleDeviceStrategy, Whole), (DDPStrategy, Copied), (ModelParallelStrategy, Sharded)]
)
def test_others_are_accepted(strategy: type, kind: type) -> None:
    """One device, DDP and model parallelism, and what derives from them."""
    for cls in (strategy, type("Mine", (strategy,), {})):
        check_strategy(holder(cls))
        assert type(parallel(holder(cls))) is kind


@pytest.mark.parametrize(
    "callback",
    [
        Distillation(),
        ChannelPruning("taylor"),
        ChannelPruning("reconstruction"),
        ChannelPruning(target="latency", amount=0.5),
        ModelCompaction(reindex=True),
        ModelCompaction(latency_runs=2),
        ModelCompaction(plain_norms=True),
    ],
)
def test_what_needs_whole_parameters_is_refused(callback: Any) -> None:
    """In ``setup``, by the name of the callback, and only where parameters are sharded."""
    reason = callback.why_not_sharded()
    check_strategy(holder(DDPStrategy), reason)
    with pytest.raises(MisconfigurationException, match=f"(?s)`{type(callback).__name__}.*ModelParallelStrategy"):
        check_strategy(holder(ModelParallelStrategy), reason)


def test_callbacks_refuse_unless_they_say_otherwise() -> None:
    """A further callback works on sharded parameters only once somebody has made sure."""
    works = {
        *("ChannelPruning", "Compensation", "ComplexityMonitor", "CompressionReport", "MaskConflictRepair"),
        *("ModelCompaction", "SparseTraining"),
    }
    base = lightning_compress.ChannelPruning.__mro__[2]
    assert base.why_not_sharded(base()) is not None
    for name in works:
        assert getattr(lightning_compress, name)().why_not_sharded() is None


def test_versions_that_cannot_shard_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in ``setup`` that says what works, in place of one in the first forward pass."""
    on_cpu = holder(type("Mine", (ModelParallelStrategy,), {}))
    type(on_cpu.strategy).root_device = torch.device("cpu")
    monkeypatch.setattr(torch.cpu, "Stream", SimpleNamespace(record_event=None))
    check_strategy(on_cpu)
    monkeypatch.setattr(torch.cpu, "Stream", SimpleNamespace())
    check_strategy(holder(ModelParallelStrategy))
    with pytest.raises(MisconfigurationException, match="cannot run FSDP2 on the CPU.*newer torch"):
        ChannelPruning().setup(on_cpu, LightningModule(), "fit")


def test_decisions_in_one_process() -> None:
    """A function's result, and no communication."""
    assert parallel(holder(SingleDeviceStrategy)).decided(lambda: 3) == 3


def test_ranks_fail_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another rank fails, this one takes back what it did; models that differ end the fit."""
    spread, undone = Sharded(holder(ModelParallelStrategy)), []
    monkeypatch.setattr(ranks, "gathered", lambda value: [value, "no memory"])
    with pytest.raises(VerificationError, match="On rank 1: no memory"):
        spread.together(lambda: 3, lambda: undone.append(True))
    assert undone == [True]
    monkeypatch.setattr(strategy, "gathered", lambda value: [value, "other"])
    with pytest.raises(MisconfigurationException, match="different models"):
        spread._check_agreement("digest")
    for module in (ranks, strategy):
        monkeypatch.setattr(module, "gathered", lambda value: [value, value])
    assert spread.together(lambda: 3, lambda: undone.append(True)) == 3
    spread._check_agreement("digest")
    assert undone == [True]


def test_other_ranks_learn_of_any_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 tells them before it raises, or they would wait for its plan forever."""
    sent: list[Any] = []
    trainer = holder(DDPStrategy)
    trainer.world_size, trainer.strategy.broadcast = 2, lambda payload: sent.append(payload) or payload
    shrunk: Any = Copied(trainer).shrunk
    for error in (VerificationError("differs"), torch.OutOfMemoryError("no memory")):
        monkeypatch.setattr(Whole, "shrunk", lambda self, *args, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(type(error), match=str(error)), shrunk(LightningModule(), SimpleNamespace(path=""), False):
            pass
        assert sent.pop() == (None, str(error))
    trainer.is_global_zero, trainer.strategy.broadcast = False, lambda payload: (None, "no memory")
    with (
        pytest.raises(VerificationError, match="no memory"),
        shrunk(LightningModule(), SimpleNamespace(path=""), alone=False),
    ):
        pass


class Pair(LightningModule):
    """Two layers, of which the first loses a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
        with torch.no_grad():
            self.net[0].weight[1], self.net[0].bias[1] = 0, 0

    def job(self) -> Job:
        """The compaction."""
        graph = engine.trace(self.net, torch.ones(4, 2))
        return Job("net", torch.ones(4, 2), None, graph, 1, training=False)


def test_rank_zero_restores_its_model_if_another_rank_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan does not fit there: both keep what they had, and neither waits for the other."""
    module, trainer = Pair(), holder(DDPStrategy)
    trainer.world_size, trainer.strategy.broadcast, trainer.optimizers = 2, lambda payload: payload, []
    before = copy.deepcopy(module.state_dict())
    monkeypatch.setattr(ranks, "gathered", lambda value: [value, "PlanError: another shape"])
    with (
        pytest.raises(VerificationError, match="On rank 1: PlanError: another shape"),
        Copied(trainer).shrunk(module, module.job(), alone=False),
    ):
        raise AssertionError("no rank may go on")
    assert same(before, module.state_dict())


def test_another_rank_restores_its_model_if_the_rest_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has applied the plan of rank 0 by then; a failure of its own reaches the others."""
    module, trainer = Pair(), holder(DDPStrategy)
    with Whole(SimpleNamespace(optimizers=[])).shrunk(copy.deepcopy(module), module.job(), True) as result:
        payload = tuple(part.state_dict() for part in result), None
    trainer.world_size, trainer.is_global_zero, trainer.optimizers = 2, False, []
    trainer.strategy.broadcast = lambda own: payload
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(OSError, match="full"), Copied(trainer).shrunk(module, module.job(), alone=False):
        share = part_entry(module.net[0])
        assert module.net[0].out_features == 2 and share is not None and None not in share["certificates"]
        raise OSError("full")
    assert module.net[0].out_features == 3 and same(before, module.state_dict())
    messages: list[Any] = []
    monkeypatch.setattr(ranks, "gathered", lambda value: messages.append(value) or [None, value])
    job, module.net[0] = module.job(), nn.Linear(2, 5)
    with pytest.raises(PlanError, match="shape"), Copied(trainer).shrunk(module, job, alone=False):
        pass
    assert "PlanError" in messages[0]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two states hold the same numbers."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


PACKAGES = [Path(module.__file__ or "").parent for module in (engine, lightning_compress)]
# What was written for parameters that are spread over processes, and one class of the seam.
SHARDED = ("engine/program/dtensors.py", "engine/compaction/sharded.py", "lightning_compress/trainer/shards.py")
SEAM = ("lightning_compress/trainer/strategy.py", *SHARDED)
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
OF_STRATEGIES = re.compile(r"(\w+Strategy|DistributedDataParallel|FSDPModule|DTensor|DeviceMesh)")


def checks_of_classes(tree: ast.AST) -> list[str]:
    """Classes of strategies, and of what they put in the place of modules and parameters, that code asks about."""
    asked: list[str] = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            names = re.findall(r"\w+", ast.unparse(node))
        elif isinstance(node, ast.Compare):
            names = re.findall(r"\w+", ast.unparse(node))
        asked += [name for name in names if OF_STRATEGIES.fullmatch(name)]
    return asked


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_only_the_seam_asks_for_classes(package: Path) -> None:
    """A further strategy is one class in one file; whatever else works on shards asks what they can do."""
    for path in package.rglob("*.py"):
        if path.relative_to(package.parent).as_posix() not in SEAM:
            assert checks_of_classes(ast.parse(path.read_text())) == [], path


@pytest.mark.parametrize(
    "code", ["isinstance(x, strategies.DDPStrategy)", "type(x).__name__ == 'FSDPStrategy'", "type(x) is DTensor"]
)
def test_checks_of_classes_are_seen(code: str) -> None:
    """By class and by name."""
    assert checks_of_classes(ast.parse(code))


def lines_of_code(path: Path, name: str | None = None) -> int:
    """Lines of a file, or of one of its classes, that are no docstrings, comments or empty."""
    tree: ast.AST = ast.parse(path.read_text())
    if name is not None:
        tree = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    nodes = [node for node in ast.walk(tree) if hasattr(node, "lineno")]
    texts = [n for n in nodes if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    first, last = min(n.lineno for n in nodes), max(n.end_lineno or 0 for n in nodes)
    with path.open("rb") as file:
        tokens = [t for t in tokenize.tokenize(file.readline) if t.type not in NO_CODE]
    lines = {line for t in tokens for line in range(t.start[0], t.end[0] + 1) if first <= line <= last}
    return len(lines - {line for n in texts for line in range(n.lineno, (n.end_lineno or 0) + 1)})


def test_what_is_for_shards_alone_is_short() -> None:
    """The files that were written for them, and one class of the seam."""
    root = PACKAGES[0].parent
    lines = {name: lines_of_code(root / name) for name in SHARDED} | {SEAM[0]: lines_of_code(root / SEAM[0], "Sharded")}
    assert min(lines.values()) > 50 and sum(lines.values()) <= 600, lines

"""What all callbacks share."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
from pytorch_lightning.strategies import FSDPStrategy

from lightning_compress import (
    ChannelPruning,
    ComplexityMonitor,
    CompressionReport,
    MaskConflictRepair,
    ModelCompaction,
    SparseTraining,
)
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.models import Wrapped


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

"""Every way of loading, for a network of each kind: the same bits as the module in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.compaction.history import history
from engine.errors import CheckpointError
from engine.files.checkpoint import seal
from engine.program.trees import tensors_in
from lightning_compress import ModelCompaction, load_compacted
from tests.lightning_compress.ddp_load import stages
from tests.lightning_compress.models import trainer
from tests.lightning_compress.shipped import NETWORKS, Made, Mixed, Ship, equal, example

ROOT = Path(__file__).parents[2]
# Lightning's advice about states of callbacks, of which these Trainers have none.
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")


# A detector is recorded at sixty sizes and settings, five times in the fit.
KINDS = [pytest.param(kind, marks=pytest.mark.slow if kind == "detector" else ()) for kind in NETWORKS]


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A compacted module, with the optimizer's state in its checkpoint."""
    return Made(Mixed, request.param, tmp_path_factory.mktemp(request.param))


def through(stage: str, cls: type[Ship], *callbacks: Any) -> Callable[[Made], Ship]:
    """A Trainer's ``ckpt_path``, with a module that is not compacted."""

    def way(made: Made) -> Ship:
        module = cls(made.kind)
        getattr(trainer(made.folder, *callbacks, max_epochs=2, limit_val_batches=1), stage)(module, ckpt_path=made.path)
        assert stage == "fit" or equal(module.seen, made.module.outputs())
        return module

    return way


def plainly(made: Made) -> Ship:
    """The weights alone, as PyTorch stores and loads them."""
    module = Mixed(made.kind)
    module.load_state_dict(torch.load(made.path, weights_only=True)["state_dict"])
    return module


def by_tensors(made: Made) -> Ship:
    """Safetensors, which hold the plan in their header."""
    pytest.importorskip("safetensors")
    engine.save_safetensors(made.module, made.folder / "m.safetensors")
    module: Any = engine.load_compacted_state(Ship(made.kind), made.folder / "m.safetensors")
    return module


def whole(made: Made) -> Ship:
    """The network as an object, without the checkpoint."""
    module = Ship(made.kind)
    torch.save(made.module.net, made.folder / "net.pt")
    module.net = torch.load(made.folder / "net.pt", weights_only=False)
    return module


WAYS: dict[str, Callable[[Made], Ship]] = {
    "load_compacted": lambda made: load_compacted(made.path, Ship),
    "load_compacted, not strict": lambda made: load_compacted(made.path, Ship, strict=False),
    "load_compacted, on a device": lambda made: load_compacted(made.path, Ship, map_location=torch.device("cpu")),
    "load_from_checkpoint": lambda made: Mixed.load_from_checkpoint(made.path),
    "load_from_checkpoint, not strict": lambda made: Mixed.load_from_checkpoint(made.path, strict=False),
    "load_from_checkpoint, weights only": lambda made: Mixed.load_from_checkpoint(made.path, weights_only=True),
    **{f"{stage}, mixin": through(stage, Mixed) for stage in ("test", "validate", "predict", "fit")},
    **{f"{stage}, callback": through(stage, Ship, ModelCompaction()) for stage in ("test", "validate", "predict")},
    "weights": plainly,
    "safetensors": by_tensors,
    "pickle": whole,
}


@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits(made: Made, way: str) -> None:
    """As many parameters, and the very bits of the module in memory."""
    loaded = WAYS[way](made)
    assert equal(loaded.outputs(), made.module.outputs())
    assert [p.shape for p in loaded.parameters()] == [p.shape for p in made.module.parameters()]
    assert sum(p.numel() for p in loaded.parameters()) < sum(p.numel() for p in Ship(made.kind).parameters())


def test_into_a_plain_module(made: Made) -> None:
    """The network alone takes the checkpoint, without Lightning, and remembers what was removed."""
    plain: nn.Module = engine.load_compacted_state(NETWORKS[made.kind](), made.path).eval()
    with torch.no_grad():
        assert equal(list(tensors_in(plain(*example(made.kind)))), made.module.outputs())
    assert len(history(plain)) == 1


@pytest.mark.parametrize("strict", [True, False])
def test_a_weight_too_many(made: Made, tmp_path: Path, strict: bool) -> None:
    """Strictly it is refused and the target stays as it is; else it is passed over."""
    checkpoint, target = torch.load(made.path, weights_only=True), NETWORKS[made.kind]()
    checkpoint["state_dict"]["net.more"] = torch.zeros(3)
    torch.save(seal(checkpoint), tmp_path / "more.ckpt")
    before = repr(target)
    if strict:
        with pytest.raises(CheckpointError, match="more"):
            load_compacted(tmp_path / "more.ckpt", Ship)
        with pytest.raises(CheckpointError, match="more"):
            engine.load_compacted_state(target, tmp_path / "more.ckpt")
        assert repr(target) == before
    else:
        loaded = load_compacted(tmp_path / "more.ckpt", Ship, strict=False)
        engine.load_compacted_state(target, tmp_path / "more.ckpt", strict=False)
        assert equal(loaded.outputs(), made.module.outputs()) and len(history(target)) == 1


def test_grows_back(made: Made) -> None:
    """The best weights of before the compaction: a warning, and the network that they are of, bit for bit."""
    module, dense = load_compacted(made.path, Mixed), Ship.load_from_checkpoint(made.best)
    with pytest.warns(UserWarning, match="grows back"):
        trainer(made.folder).test(module, ckpt_path=str(made.best), verbose=False)
    assert equal(module.outputs(), dense.outputs()) and not history(module.net)
    module.load_state_dict(made.module.state_dict())
    assert equal(module.outputs(), made.module.outputs())


def test_training_goes_on(made: Made) -> None:
    """A fit from the checkpoint takes the optimizer's state along: each step as if nothing had been written."""
    resumed = Mixed(made.kind)
    trainer(made.folder, max_epochs=3).fit(resumed, ckpt_path=made.path)
    expected = load_compacted(made.path, Ship).train()
    optimizer = expected.configure_optimizers()
    optimizer.load_state_dict(made.trainer.optimizers[0].state_dict())
    for step in range(2):
        optimizer.zero_grad()
        expected.training_step(None, step).backward()
        optimizer.step()
    assert equal(resumed.outputs(), expected.outputs())
    assert not equal(resumed.outputs(), made.module.outputs())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_fork", "ddp_spawn"])
def test_on_two_processes(tmp_path: Path, strategy: str) -> None:
    """Compacted there, loaded there in every stage, and back in the process that started them: the same bits."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = [sys.executable, str(Path(__file__).with_name("ddp_load.py")), str(tmp_path), strategy]
    subprocess.run(script, env=environment, cwd=tmp_path, check=True, timeout=600)
    for kind in NETWORKS:
        expected = load_compacted(tmp_path / kind / "compacted.ckpt", Ship).outputs()
        found = {path.stem: torch.load(path, weights_only=True) for path in tmp_path.glob(f"{kind}-*.pt")}
        wanted = stages(strategy, kind)
        names = {f"{kind}-{what}-{rank}" for what in {"fit", *wanted} for rank in (0, 1)} | {f"{kind}-main-0"}
        assert names | ({f"{kind}-again-0"} if "fit" in wanted else set()) <= found.keys()
        assert all(equal(outputs, expected) for outputs in found.values()), kind

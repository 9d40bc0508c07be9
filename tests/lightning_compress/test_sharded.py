"""Fits whose parameters are spread over CPU processes (FSDP2, tensor parallelism), against fits in one process."""

from __future__ import annotations

import functools
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_compress import load_compacted
from tests.engine.files.test_folders import Code
from tests.lightning_compress import sharded_fit

ROOT = Path(__file__).parents[2]
# What is equal in exact arithmetic differs by the order of the sums of gradients over samples.
LIMIT = 1e-9
# With a plus, over gradients that are accumulated over two batches and clipped.
OPTIMIZERS = ("sgd", "adam", "adamw", "sgd+", "adam+", "adamw+")
# FSDP2, tensor parallelism and both, each on two and on four processes.
MESHES = [
    *[(model, mesh) for model in ("decoder", "encoder", "cnn") for mesh in ("2", "4")],
    *[("heads", "1x2"), ("many heads", "1x4"), ("heads", "2x2")],
]
FITS = [("decoder, least_squares", "adamw", "2"), ("heads", "adam+", "2x2")]
SLOW = [(model, optimizer, mesh) for model, mesh in MESHES for optimizer in OPTIMIZERS]
SLOW += [(f"{model}, least_squares", "adamw", mesh) for model, mesh in MESHES if mesh != "1x2"]
SLOW += [("heads, least_squares", "adam+", "1x2")]
SLOW += [("decoder, offload", "adamw+", "2"), ("cnn, offload, least_squares", "sgd", "2")]
SLOW += [("cnn, norms", "sgd", "2"), ("cnn, norms", "adam+", "4")]
for fit in FITS:
    SLOW.remove(fit)


def launch(folder: Path, *arguments: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the fit in processes of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    script = [sys.executable, str(Path(__file__).with_name("sharded_fit.py")), str(folder), *arguments]
    ended = subprocess.run(script, env=environment, cwd=folder, timeout=320, capture_output=True, text=True)
    assert ended.returncode == 0 or not check, ended.stderr[-5000:]
    return ended


def read(folder: Path, name: str) -> dict[str, Any]:
    """What a process wrote."""
    return torch.load(folder / f"{name}.pt", weights_only=True)


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest difference of tensors of the same names and shapes."""
    assert one.keys() == other.keys() and all(one[name].shape == other[name].shape for name in one)
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, str], Path]:
    """The folder that a fit on several processes wrote to; each fit is run once."""

    @functools.cache
    def folder(model: str, optimizer: str, mesh: str) -> Path:
        path = tmp_path_factory.mktemp(f"{model}-{optimizer}-{mesh}")
        launch(path, model, optimizer, mesh)
        return path

    return folder


@pytest.mark.parametrize(
    ("model", "optimizer", "mesh"), [*FITS, *[pytest.param(*fit, marks=pytest.mark.slow) for fit in SLOW]]
)
def test_sharded_as_in_one_process(
    model: str,
    optimizer: str,
    mesh: str,
    sharded: Callable[[str, str, str], Path],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Masks, shapes, weights after each step, optimizers' states and the checkpoint, and no rank is another."""
    folder, alone = sharded(model, optimizer, mesh), tmp_path
    sharded_fit.run(alone, model, optimizer)
    ranks, one = [read(folder, "rank0"), read(folder, "rank1")], read(alone, "rank0")
    assert len(ranks[0]["steps"]) == len(one["steps"]) == 12
    steps = [*zip(*([*fit["steps"], fit["weights"]] for fit in (*ranks, one)), strict=True)]
    assert max(difference(first, second) for first, second, _ in steps) == 0
    largest = max(difference(first, single) for first, _, single in steps)
    record_property("largest difference", largest)  # `--junitxml=x.xml -o junit_family=xunit1` writes it
    assert largest < LIMIT
    sizes = [sum(t.numel() for name, t in step.items() if "mask" not in name) for step in ranks[0]["steps"]]
    assert sizes[0] > sizes[-1] > sum(t.numel() for t in ranks[0]["weights"].values())
    states = zip(ranks[0]["states"], one["states"], strict=True)
    assert max(float((a - b).abs().max()) for a, b in states) < LIMIT
    assert ranks[0]["kept"] == one["kept"] and ranks[0]["certificate"]["verified"]
    assert ranks[0]["fitted"] == one["fitted"] and bool(one["fitted"]) == model.endswith("least_squares")
    surveys = [
        str(fit["surveys"]).replace(f"{Path(__file__).parent.relative_to(ROOT)}/", "") for fit in (ranks[0], one)
    ]
    assert surveys[0] == surveys[1] and len(one["surveys"]) == 2 * ("," in model)
    small = load_compacted(ranks[0]["path"], sharded_fit.Spread, spread=False)
    assert difference(dict(small.state_dict()), ranks[0]["weights"]) == 0


@pytest.mark.parametrize(
    ("fit", "resumed_on"),
    [
        (FITS[0], "1x1"),
        pytest.param(("decoder", "adamw", "4"), "2", marks=pytest.mark.slow),
        pytest.param(("decoder", "adamw", "4"), "1x1", marks=pytest.mark.slow),
        pytest.param(("heads", "sgd", "2x2"), "1x2", marks=pytest.mark.slow),
        pytest.param(("heads", "sgd", "2x2"), "2", marks=pytest.mark.slow),
    ],
)
def test_folders_load_and_resume_on_other_processes(
    fit: tuple[str, str, str], resumed_on: str, sharded: Callable[[str, str, str], Path], tmp_path: Path
) -> None:
    """A checkpoint of `torch.distributed.checkpoint` from the middle, after a compaction, optimizer included."""
    folder = sharded(*fit)
    whole = read(folder, "rank0")
    small = load_compacted(folder / "middle.ckpt", sharded_fit.Spread, spread=False)
    weights = {name: value for name, value in whole["steps"][8].items() if "mask" not in name}
    assert difference(dict(small.state_dict()), weights) == 0
    assert difference({"outputs": small.net(whole["words"]).detach()}, {"outputs": whole["outputs"]}) < LIMIT
    launch(tmp_path, *fit[:2], resumed_on, str(folder / "middle.ckpt"))
    resumed = read(tmp_path, "rank0")
    assert len(resumed["steps"]) == 3 and resumed["certificate"]["verified"]
    assert difference(resumed["start"], weights) == 0
    for here, there in zip(resumed["steps"], whole["steps"][9:], strict=True):
        assert difference(here, there) < LIMIT
    assert difference(resumed["weights"], whole["weights"]) < LIMIT


@pytest.mark.slow
def test_a_folder_that_runs_code(sharded: Callable[[str, str, str], Path], tmp_path: Path) -> None:
    """Neither its index nor its values are unpickled when a fit resumes from it: all ranks end with the reason."""
    shutil.copytree(sharded(*FITS[0]) / "middle.ckpt", tmp_path / "evil.ckpt")
    (tmp_path / "evil.ckpt" / ".metadata").write_bytes(pickle.dumps(Code(tmp_path / "ran")))
    ended = launch(tmp_path, *FITS[0][:2], "1x1", str(tmp_path / "evil.ckpt"), check=False)
    assert "CheckpointError" in ended.stderr and "mkdir, which does not belong in an index" in ended.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_mixed_precision(sharded: Callable[[str, str, str], Path]) -> None:
    """FSDP2 rounds parameters before they are used; the tolerance follows, the certificate says it, ranks agree."""
    folder = sharded("decoder, mixed, least_squares", "adamw", "2")
    one, other = read(folder, "rank0"), read(folder, "rank1")
    assert one["certificate"]["verified"] and one["certificate"]["dtype"] == "bfloat16" and one["fitted"]
    for here, there in zip([*one["steps"], one["weights"]], [*other["steps"], other["weights"]], strict=True):
        assert difference(here, there) == 0
    assert sum(t.numel() for t in one["weights"].values()) < sum(t.numel() for t in one["start"].values())


@pytest.mark.slow
def test_widths_that_processes_can_share(sharded: Callable[[str, str, str], Path]) -> None:
    """Without `round_to` an odd number of heads would be left in the middle, which two processes cannot share."""
    whole = read(sharded("free heads", "sgd", "1x2"), "rank0")
    shapes = [[tuple(value.shape) for name, value in step.items() if "k_proj" in name] for step in whole["steps"]]
    assert whole["certificate"]["verified"] and {rows % 4 for step in shapes for rows, _ in step} == {0}
    sizes = [sum(t.numel() for name, t in step.items() if "mask" not in name) for step in whole["steps"]]
    assert sizes[0] > sizes[-1] > sum(t.numel() for t in whole["weights"].values())


@pytest.mark.slow
def test_a_rank_killed_in_a_compaction(sharded: Callable[[str, str, str], Path], tmp_path: Path) -> None:
    """The others end with an error and do not wait, the last checkpoint is whole, a restart comes to the same."""
    whole = read(sharded("decoder", "adamw", "4"), "rank0")
    ended = launch(tmp_path, "decoder", "adamw", "4", check=False, KILLED_RANK="2")
    assert ended.stdout.splitlines()[-1] == str([1, 1, -signal.SIGKILL, 1]), ended.stdout + ended.stderr[-3000:]
    assert not list(tmp_path.rglob("*compacted*"))
    small = load_compacted(tmp_path / "middle.ckpt", sharded_fit.Spread, spread=False)
    weights = {name: value for name, value in whole["steps"][8].items() if "mask" not in name}
    assert difference(dict(small.state_dict()), weights) == 0
    launch(tmp_path, "decoder", "adamw", "4", str(tmp_path / "middle.ckpt"))
    assert difference(read(tmp_path, "rank0")["weights"], whole["weights"]) < LIMIT

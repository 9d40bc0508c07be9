"""Disks that are full, and folders that cannot be written to: before the fit, or one error on all ranks after it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_compress import ChannelPruning, CompressionReport, ModelCompaction, load_compacted
from lightning_compress.checkpoints.saving import bytes_of
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.models import Wrapped, fit, seeded

ROOT = Path(__file__).parents[3]


def lines(folder: Path, rank: int) -> list[str]:
    """What the two ranks say of their fit, in which one of them cannot write."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = [sys.executable, str(Path(__file__).parents[1] / "ddp_disk.py"), str(folder), str(rank)]
    out = subprocess.run(script, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert out.returncode == 0, out.stdout + out.stderr
    return sorted(line for line in out.stdout.splitlines() if line.startswith("rank "))


def test_the_rank_that_writes_has_no_space(tmp_path: Path) -> None:
    """Both end with the same error, which names the file; what was there is as it was, and nothing else is left."""
    old = tmp_path / "compacted.ckpt"
    old.write_text("old")
    zero, one = lines(tmp_path, 0)
    assert zero.removeprefix("rank 0") == one.removeprefix("rank 1")
    assert "compacted-v1.ckpt could not be written: File too large. Existing files are unchanged" in zero
    assert "inline_container" not in zero
    assert [path.name for path in tmp_path.iterdir()] == ["compacted.ckpt"] and old.read_text() == "old"


def test_another_rank_has_no_space(tmp_path: Path) -> None:
    """It writes nothing, so nothing is wrong."""
    zero, one = lines(tmp_path, 1)
    assert zero.removeprefix("rank 0") == one.removeprefix("rank 1")
    assert load_compacted(zero.removeprefix("rank 0: "), Wrapped).net.wide.out_channels == 8


@pytest.mark.parametrize("callback", [ModelCompaction, CompressionReport])
@pytest.mark.parametrize(("where", "said"), [("file/runs", "Not a directory"), ("x" * 300, "File name too long")])
def test_said_before_the_fit(tmp_path: Path, callback: Any, where: str, said: str) -> None:
    """A folder that cannot be, or a name that is too long."""
    (tmp_path / "file").write_text("")
    module = seeded(Wrapped)
    with pytest.raises(MisconfigurationException, match=f"could not be written: {said}"):
        fit(module, tmp_path, ChannelPruning(amount=0.5), callback(dirpath=tmp_path / where))
    assert module.trainer.global_step == 0


def test_too_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the whole model: so large is the file if nothing can be removed."""
    module = seeded(Wrapped)
    usage = shutil.disk_usage(tmp_path)
    for free, fits in ((bytes_of(module) - 1, False), (bytes_of(module), True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        if fits:
            fit(module, tmp_path, ChannelPruning(amount=0.5), ModelCompaction(dirpath=tmp_path / "runs"))
            continue
        with pytest.raises(MisconfigurationException, match="but only 0 MB are free"):
            fit(module, tmp_path, ChannelPruning(amount=0.5), ModelCompaction(dirpath=tmp_path / "runs"))


def test_reports_keep_each_other(tmp_path: Path) -> None:
    """A second run writes beside the first."""
    for _ in range(2):
        fit(seeded(Wrapped), tmp_path, ChannelPruning(amount=0.5), CompressionReport(dirpath=tmp_path, terminal="none"))
    assert len(list(tmp_path.glob("*.html"))) == 2

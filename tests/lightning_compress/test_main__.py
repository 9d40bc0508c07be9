"""The command as a user types it, in processes of its own."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_compress import ChannelPruning, load_compacted
from tests.lightning_compress.models import Reference, Wrapped, difference, fit, seeded

ROOT = Path(__file__).parents[2]
CLASS, SHAPE = "tests.lightning_compress.models:Wrapped", "2,3,8,8"


def test_it_is_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m lightning_compress`` runs it, and ends with its exit code."""
    for arguments, code in ((["--help"], 0), (["inspect", "nowhere.ckpt"], 2)):
        monkeypatch.setattr(sys, "argv", ["lightning_compress", *arguments])
        with pytest.raises(SystemExit) as end:
            runpy.run_module("lightning_compress", run_name="__main__")
        assert end.value.code == code
    shown = capsys.readouterr()
    assert "compact" in shown.out and "There is no checkpoint nowhere.ckpt" in shown.err


def typed(folder: Path, command: str) -> tuple[int, str]:
    """Exit code and what is shown, on both outputs."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "lightning_compress", *command.split()]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_from_a_masked_checkpoint_to_onnx(tmp_path: Path) -> None:
    """Compact, inspect, verify and export, each in a process of its own, in a folder of the user's."""
    pytest.importorskip("onnxscript")
    module = seeded(Wrapped)
    fit(module, tmp_path, Reference(), ChannelPruning(amount=0.5)).save_checkpoint(tmp_path / "last.ckpt")
    torch.save(torch.randn(3, 3, 8, 8), tmp_path / "batch.pt")
    code, shown = typed(tmp_path, f"compact last.ckpt {CLASS} --out small.ckpt --example {SHAPE}")
    assert code == 0 and "wide.weight" in shown and "Certificate: verified" in shown, shown
    assert difference(load_compacted(tmp_path / "small.ckpt", Wrapped), module) <= 1e-5
    assert typed(tmp_path, "inspect small.ckpt") == (0, shown)
    code, shown = typed(tmp_path, f"verify last.ckpt small.ckpt {CLASS} --input batch.pt")
    assert code == 0 and "the same" in shown, shown
    forms = "--onnx n.onnx --program n.pt2 --torchscript n.pt --safetensors n.safetensors"
    code, shown = typed(tmp_path, f"export small.ckpt {CLASS} {forms} --input batch.pt --dynamic batch size")
    assert code == 0 and shown.count("differs by") == 3, shown
    assert typed(tmp_path, "inspect n.safetensors")[0] == 0
    code, shown = typed(tmp_path, f"verify last.ckpt small.ckpt {CLASS}")
    assert code == 2 and "example_input=" in shown, shown
    code, shown = typed(tmp_path, "compact last.ckpt")
    assert code == 2 and "usage: python -m lightning_compress compact" in shown, shown

"""The page of latencies, written on the processor in a small form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import gpu


@pytest.mark.slow
def test_both_tables_are_written(tmp_path: Path) -> None:
    """Each network in each way; masked and compacted for several repetitions; what cannot run is named."""
    out = tmp_path / "gpu.md"
    given = "--device cpu --models resnet18 --batch 1 --size 32 --small-batch 1 --repetitions 1 2 --rounds 2".split()
    assert gpu.main([*given, "--ways", "eager", "channels_last", "--out", str(out)]) == 0
    rows = [line.split(" | ") for line in out.read_text().splitlines() if line.startswith("| ")]
    assert [row[:2] for row in rows if row[0] == "| VGG-19"] == [["| VGG-19", "1"], ["| VGG-19", "2"]]
    found = {(row[1], row[3]): row[4:] for row in rows if row[0] == "| resnet18"}
    assert set(found) == {(d, w) for d in ("float32", "bfloat16") for w in ("eager", "channels_last")}
    assert all(float(cell.rstrip(" |")) > 0 for cells in found.values() for cell in cells)


def test_what_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that does not run leaves dashes in the table, and the reason below it."""

    def refuse(model: torch.nn.Module) -> None:
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setitem(gpu.WAYS, "compiled", refuse)
    failures: list[str] = []
    row = gpu._row({"dense": torch.nn.ReLU()}, torch.ones(1), "compiled", gpu.arguments([]), "net | compiled", failures)
    assert row == "| net | compiled | – | – | – | – |" and failures == ["net, compiled: RuntimeError: no compiler"]


def test_without_a_card_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says so and returns 1."""
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    assert gpu.main(["--out", str(tmp_path / "gpu.md")]) == 1 and not list(tmp_path.iterdir())
    assert "No CUDA device" in capsys.readouterr().out

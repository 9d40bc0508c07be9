"""The run over timm's families and what its page makes of the rows."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("timm")

from benchmarks import families

ROW: dict[str, Any] = {
    "module": "vgg",
    "model": "vgg11",
    "size": 4_000_000,
    "error": 1e-16,
    "parameters": [4_000_000, 1_000_000],
    "macs": [2e9, 5e8],
    "predicted": True,
    "seconds": 2.0,
    "stays": {"is an output of the model": 1},
}


def test_the_page() -> None:
    """A row per module, how many are exact, and why groups stay; what failed has its reason."""
    wrong = ROW | {"module": "nets", "model": "net", "error": 1e-3, "predicted": False}
    assert families.verdict(ROW | {"changed": False}) == "the masks change nothing at the outputs"
    failed = {"module": "big", "model": "huge", "size": 9_000_000, "failed": "took longer than 9 s"}
    text = families.page([ROW, wrong, failed])
    assert "1 of 3 are exact" in text
    assert "| vgg | vgg11 | exact | 1e-16 | 4.00 → 1.00 | 25% | 2.000 → 0.500 | 2.0 |" in text
    assert "relative error 1.0e-03; the counted sizes are not the measured ones" in text
    assert "| big | huge | failed: took longer than 9 s | | 9.00 | | | |" in text
    assert "| is an output of the model | 2 |" in text


def test_a_module_that_timm_has_not(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Is named, with those that it has."""
    monkeypatch.setattr("sys.argv", ["families.py", "vgg16"])
    with pytest.raises(SystemExit):
        families.main()
    assert "timm has no module vgg16; it has" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext", "test_mambaout", "test_coatnet"])
def test_small_models(name: str) -> None:
    """Exact, and a good part of the parameters gone."""
    row = {"module": name, "model": name} | families.check(name)
    assert families.verdict(row) == "exact" and row["parameters"][1] < 0.65 * row["parameters"][0]

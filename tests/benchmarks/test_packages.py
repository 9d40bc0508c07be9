"""The run over networks of other packages and what its page makes of the rows."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("timm")

from benchmarks import packages

ROW: dict[str, Any] = {
    "network": "vit-pytorch ViT",
    "error": 1e-16,
    "parameters": [22_000, 6_000],
    "predicted": True,
    "seconds": 0.5,
    "stays": {"is an output of the model": 1},
}


def test_the_page() -> None:
    """A row per network, how many are exact, and why groups stay; what failed has its reason."""
    failed = {"network": "MONAI UNet", "failed": "took longer than 9 s"}
    text = packages.page([ROW, failed], ["einops 0.8"])
    assert "1 of 2 are exact" in text and "einops 0.8" in text
    assert "| vit-pytorch ViT | exact | 1e-16 | 22 → 6 | 27% | 0.5 |" in text
    assert "| MONAI UNet | failed: took longer than 9 s | | | |" in text
    assert "| is an output of the model | 1 |" in text


def test_an_unknown_network(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Is named, with those that there are."""
    monkeypatch.setattr("sys.argv", ["packages.py", "ViT"])
    with pytest.raises(SystemExit):
        packages.main()
    assert "There is no network ViT; there are vit-pytorch ViT" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("key", ["vit-pytorch ViT", "segmentation-models-pytorch MAnet", "MONAI SwinUNETR"])
def test_small_networks(key: str) -> None:
    """Exact, and at least half of the parameters gone."""
    pytest.importorskip(packages.NETWORKS[key][0].partition(".")[0])
    row = {"network": key} | packages.check(key)
    assert packages.verdict(row) == "exact" and row["parameters"][1] < 0.55 * row["parameters"][0]

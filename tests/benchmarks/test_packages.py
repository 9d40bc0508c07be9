"""The run over networks of other packages and what its page makes of the rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import packages
from benchmarks.networks.network import Network, noise

ROW: dict[str, Any] = {
    "network": "vit-pytorch ViT",
    "error": 1e-16,
    "parameters": [22_000, 6_000],
    "predicted": True,
    "stays": {"is an output of the model": 1},
}


def test_the_page() -> None:
    """A row per network, how many are exact, and why groups stay; what failed has its reason."""
    assert packages.verdict(ROW | {"changed": False}) == "the masks change nothing at the outputs"
    failed = {"network": "monai UNet", "failed": "took longer than 9 s"}
    whole = ROW | {
        "network": "peft LoRA",
        "parameters": [20, 19],
        "stays": {"a": 3, "b": 5},
        "exported": 2e-3,
        "undeclared": 0.97,
    }
    unbuilt = {"network": "effdet lite", "unbuilt": "RuntimeError: no such op", "state": "old"}
    text = packages.page([ROW | {"state": "new"}, failed, whole, unbuilt], ["einops 0.8"], "new")
    said = "1 are exact, 0 refused, 2 failed, 1 cannot be built beside this torch."
    assert said in text.replace("\n", " ") and "einops 0.8" in text
    assert "61% of its parameters, 1 keep more than 60 %" in text.replace("\n", " ")
    assert "3 of the rows are of earlier states of the code." in text.replace("\n", " ")
    assert "| effdet lite | its package does not build it here: RuntimeError: no such op |" in text
    assert "| vit-pytorch ViT | exact | 1e-16 | 22 → 6 | 27% |  |  |  |" in text
    assert "| monai UNet | failed: took longer than 9 s | | | | | |" in text
    assert "| peft LoRA | exported with an error of 2e-03 | 1e-16 | 0 → 0 | 95% | 97% | 2e-03 | b |" in text
    assert "| is an output of the model | 1 |" in text
    stream = whole | {"stays": {"is an output of the model": 8, "b": 5}}
    assert packages.line(stream).endswith("| is an output of the model |")


def test_an_unknown_network(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Is named, with those that there are."""
    monkeypatch.setattr("sys.argv", ["packages.py", "ViT"])
    with pytest.raises(SystemExit):
        packages.main()
    assert "There is no network ViT; there are" in capsys.readouterr().err


def test_the_list() -> None:
    """Eighty networks of fifteen packages, whichever of them are installed."""
    networks = [n for n in packages.NETWORKS.values() if n.package != "ultralytics"]
    assert len(networks) >= 80 and len({n.package for n in networks}) >= 15


def test_the_smallest_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that needs no package goes through what all others do."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))

    small = Network("none", "small", make, noise(3, 8, 8), constants=("0.padding",))
    monkeypatch.setattr(packages, "NETWORKS", {small.key: small})
    row = {"network": small.key} | packages.check(small.key)
    assert packages.verdict(row) == "exact" and row["changed"]
    assert packages.left(row) < 0.6 and not packages.dearest(row)
    assert row["undeclared"] == packages.left(row)  # the declaration changes nothing here


class Half(nn.Module):
    """Converts to float32 inside, as code does that was written for one precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return maps."""
        return self.last(self.first(x.float() * 255).relu())  # type: ignore[no-any-return]


def test_a_network_of_one_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets inputs of its precision, and is compared with the tolerance of that."""
    single = Network("none", "single", Half, noise(3, 8, 8), dtype=torch.float32)
    monkeypatch.setattr(packages, "NETWORKS", {single.key: single})
    row = {"network": single.key} | packages.check(single.key)
    assert packages.verdict(row) == "exact" and row["tolerance"] > 1e-9
    x, n = packages.in_precision((torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.long)), torch.float32)
    assert x.dtype is torch.float32 and n.dtype is torch.long


@pytest.mark.slow
@pytest.mark.parametrize("key", ["vit-pytorch ViT", "segmentation-models-pytorch MAnet", "monai SwinUNETR"])
def test_small_networks(key: str) -> None:
    """Exact, and at least half of the parameters gone."""
    pytest.importorskip(key.partition(" ")[0].replace("-", "_"))
    row = {"network": key} | packages.check(key)
    assert packages.verdict(row) == "exact" and row["parameters"][1] < 0.55 * row["parameters"][0]

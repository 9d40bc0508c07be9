"""What the README shows runs as it stands there, with a small model under the names that it leaves to the reader."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from lightning_compress import load_compacted
from tests.lightning_compress.models import Root, data, seeded

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
PRUNE, CALLBACKS, ENGINE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


class Net(nn.Module):
    """A plain network, whose first convolution is masked by its L1 norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.conv2 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, 4, H - 4, W - 4)."""
        return self.conv2(self.bn1(self.conv1(x)).relu())


def test_one_call(capsys: pytest.CaptureFixture[str]) -> None:
    """The first block runs as it stands, in any folder, and says that half of the cost is gone."""
    names: dict[str, Any] = {}
    exec(PRUNE, names)
    before, after = (
        engine.count_flops_params(names[name], names["images"], verbose=False)[0] for name in ("model", "small")
    )
    assert 0.45 * before < after <= 0.5 * before and "verified" in capsys.readouterr().out


def test_it_is_short() -> None:
    """The first page is read in one go."""
    assert len(README.splitlines()) <= 150


def test_the_callbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fit of the first block, in three epochs, ends with a small module that is loaded again."""
    monkeypatch.chdir(tmp_path)
    module = seeded(Root)
    names: dict[str, Any] = {"module": module, "datamodule": data(), "MyLightningModule": Root}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on loaders and loggers
        exec(CALLBACKS.replace("max_epochs=20", "max_epochs=3, accelerator='cpu', enable_progress_bar=False"), names)
    small = names["small"]
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in Root().parameters()) / 2
    assert torch.equal(small.eval()(torch.ones(1, 3, 8, 8)), module.eval()(torch.ones(1, 3, 8, 8)))
    assert load_compacted(names["compaction"].checkpoint_path, Root) is not small


def test_the_engine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks by the words behind the block, repaired, counted, removed, saved and loaded by a plain network."""
    monkeypatch.chdir(tmp_path)
    model = Net().eval()
    masked: dict[str, Any] = {"w": model.conv1.weight.detach()}
    for assignment in re.findall(r"`((?:norms|weight_mask) = .*?)`", README, re.DOTALL):
        exec(assignment, masked)
    expected = Net().eval()
    expected.load_state_dict(model.state_dict())
    keep = masked["weight_mask"][:, 0, 0, 0]
    for parameter in (expected.conv1.weight, expected.conv1.bias, expected.bn1.weight, expected.bn1.bias):
        parameter.data[~keep] = 0
    x = torch.ones(1, 3, 8, 8)
    names: dict[str, Any] = {"Net": Net, "model": model, "dummy_input": x, "weight_mask": masked["weight_mask"]}
    exec(ENGINE, names)
    small = names["model"].eval()
    assert small is not model and small.conv1.out_channels == int(keep.sum()) < 8
    assert names["params"] == sum(p.numel() for p in small.parameters())
    assert torch.equal(small(x), model(x)) and torch.allclose(small(x), expected(x), rtol=1e-4, atol=1e-6)

"""The two protocols by which packages save networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import InputError
from lightning_compress import save_pretrained
from lightning_compress.stock.formats import format_of


class Diffuser(nn.Module):
    """A model with the protocol of diffusers: the configuration is a mapping."""

    def __init__(self, width: int = 8, inner: int = 12) -> None:
        super().__init__()
        self.config = {"width": width, "inner": inner}
        self.one, self.two = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, sample: Tensor) -> Tensor:
        """Return something of the sample's shape."""
        return self.two(self.one(sample).relu())

    @classmethod
    def from_config(cls, config: Any) -> Diffuser:
        """Build one."""
        return cls(**config)

    def save_pretrained(self, folder: str) -> None:
        """Write the configuration and the weights."""
        torch.save((self.config, self.state_dict()), Path(folder, "all.pt"))

    @classmethod
    def from_pretrained(cls, folder: str, torch_dtype: torch.dtype) -> Diffuser:
        """Read them."""
        config, state = torch.load(Path(folder, "all.pt"), weights_only=False)
        model = cls(**config).to(torch_dtype)
        model.load_state_dict(state)
        return model


def test_a_configuration_may_be_a_mapping(tmp_path: Path) -> None:
    """As in diffusers; the example says what the model takes."""
    model, x = Diffuser(), torch.randn(2, 8)
    keep = torch.arange(12) < 5
    masks = {"one": {"weight": keep[:, None].expand(12, 8), "bias": keep}}
    engine.ModelSpeedup(model, x, masks).speedup_model()
    saved = save_pretrained(model, tmp_path / "small", example_input=x)
    assert saved.config == {"inner": 5} and saved.error == 0.0
    again = Diffuser.from_pretrained(str(tmp_path / "small"), torch.float32)
    assert torch.equal(again(x), model(x))


def test_a_class_without_a_protocol_is_refused() -> None:
    """The message says what to call instead."""
    with pytest.raises(InputError, match="save_stock"):
        format_of(nn.Linear(1, 1))
    assert format_of(Diffuser()).build({("inner",): 3}).one.weight.shape == (3, 8)

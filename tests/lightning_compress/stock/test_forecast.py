"""Whether a package could load what pruning would leave."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from lightning_compress import save_pretrained
from lightning_compress.stock.forecast import Forecast, forecast, part_of

CONFIG = {"width": 8, "inner": 12, "eps": 1e-5, "centred": True}


class Decoder(nn.Module):
    """Two blocks with one number for the neurons of both, in the protocol of diffusers."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = {**CONFIG, **config}
        width, inner, eps = (self.config[name] for name in ("width", "inner", "eps"))
        norm = nn.LayerNorm if self.config["centred"] else nn.RMSNorm
        self.stem, self.head = nn.Linear(4, width), nn.Linear(width, 2)
        self.norms = nn.ModuleList(norm(width, eps=eps) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(width, inner) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(inner, width) for _ in range(2))

    def forward(self, sample: Tensor) -> Tensor:
        """(N, 4) -> (N, 2)."""
        x = self.stem(sample)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=False):
            x = x + down(up(norm(x)).relu())
        return self.head(self.norms[2](x))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Decoder:
        """Build one."""
        return cls(**config)

    def save_pretrained(self, folder: str) -> None:
        """Write the configuration and the weights."""
        torch.save((self.config, self.state_dict()), Path(folder, "all.pt"))

    @classmethod
    def from_pretrained(cls, folder: str, torch_dtype: torch.dtype) -> Decoder:
        """Read them."""
        config, state = torch.load(Path(folder, "all.pt"), weights_only=False)
        model = cls(**config).to(torch_dtype)
        model.load_state_dict(state)
        return model


class Around(nn.Module):
    """A model that holds it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """(N, 4) -> (N, 2)."""
        return self.body(2 * x)


X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def tried(model: nn.Module, plain_norms: bool, **stays: int) -> Forecast:
    """A dry run that keeps half of each group, or as many units as are named."""
    graph = engine.trace(model, X)
    groups = engine.dependency_groups(model, X, graph=graph)
    free = [group for group in groups if group.reason is None]
    keep = {g.name: torch.arange(g.size) < stays.get(g.name.replace(".", "_"), g.size // 2) for g in free}
    part = part_of(model, X)
    assert part is not None
    return forecast(model, graph, groups, keep, part, amount=0.5, plain_norms=plain_norms)


def test_norms_stand_in_the_way_of_the_stream() -> None:
    """The neurons can be pruned without it; with ordinary norms everything can."""
    exact = tried(Decoder(), False)
    assert [obstacle.groups for obstacle in exact.obstacles] == [("stem",)]
    assert exact.config == {"inner": 6} and not exact.is_loadable
    assert "LayerNorm 'norms.0' and 2 more" in exact.obstacles[0].reason
    plain = tried(Decoder(), True)
    assert plain.is_loadable and plain.config == {"width": 4, "inner": 6} and plain.params < exact.params


def test_root_mean_squares_do_not() -> None:
    """Another eps makes them ordinary ones."""
    exact = tried(Decoder(centred=False), False)
    assert exact.is_loadable and exact.config == {"width": 4, "inner": 6, "eps": pytest.approx(2e-5)}


def test_layers_that_differ_are_named() -> None:
    """One field is the number of neurons of both."""
    uneven = tried(Decoder(), True, up_1=3)
    assert [set(obstacle.groups) for obstacle in uneven.obstacles] in ([{"up.0", "up.1"}], [{"up.0"}, {"up.1"}])
    assert "no field gives" in uneven.obstacles[0].reason and uneven.config == {"width": 4}


def test_a_part_is_taken_with_what_it_gets() -> None:
    """The model around it is not what the package loads."""
    model = Around(Decoder())
    part = part_of(model, X)
    assert part is not None and part.name == "body" and torch.equal(part.example["sample"], 2 * X)
    assert tried(model, True).is_loadable


def test_the_model_stays_as_it_is() -> None:
    """It is compacted in copies."""
    model = Decoder()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tried(model, True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_is_said_is_true(tmp_path: Path) -> None:
    """What could be saved is saved, under the same configuration."""
    model, said = Decoder(), tried(Decoder(), True)
    free = [group for group in engine.dependency_groups(model, X) if group.reason is None]
    masks = engine.group_masks(free, {g.name: torch.arange(g.size) < g.size // 2 for g in free})
    engine.ModelSpeedup(model, X, masks, confidence=1, plain_norms=True).speedup_model()
    assert save_pretrained(model, tmp_path / "small", example_input=X).config == said.config

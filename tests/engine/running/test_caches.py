"""What the code of a model remembers is not what a recording or a verification computed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.running.caches import bypassing_caches, clearing_caches
from tests.engine.exactness import check_exact, randomised


@functools.lru_cache
def ramp(size: int) -> Tensor:
    """Return a table that is made once per size."""
    return torch.arange(size, dtype=torch.float64)


def behind(f: Any) -> Any:
    """Hide a function in a closure, as decorators do."""

    def wrapper(*args: Any) -> Any:
        return f(*args)

    return wrapper


hidden = behind(functools.lru_cache(lambda size: torch.arange(size, dtype=torch.float64)))


class Positions(nn.Module):
    """Multiplies by a remembered table, whose size it reads from its input."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.up, self.down, self.table = nn.Linear(4, 8), nn.Linear(8, 3), table

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        y: Tensor = self.down(self.up(x).relu() * self.table(x.shape[1])[:, None])
        return y


def test_a_model_computes_with_data_after_it_was_recorded() -> None:
    """A tensor without data that was remembered made all further outputs tensors without data."""
    for table in (ramp, hidden):
        model, x = randomised(Positions(table)), torch.rand(2, 5, 4, dtype=torch.float64)
        engine.trace(model, x)
        assert type(model(x)) is Tensor


def test_a_model_that_remembers_is_compacted_exactly_and_trains() -> None:
    """A tensor of inference mode that was remembered could not be used in training."""
    model, x = randomised(Positions(ramp)), torch.rand(2, 7, 4, dtype=torch.float64)
    kept = torch.arange(8) % 2
    masks = {"up": {"weight": kept[:, None].expand(8, 4), "bias": kept}}
    plan = check_exact(model, masks, x, torch.rand(3, 9, 4, dtype=torch.float64))
    assert "up.weight" in plan.slices


def test_what_was_known_before_stays_known() -> None:
    """A function that the body does not call, or only asks again, forgets nothing."""
    ramp.cache_clear()
    ramp(3)
    with clearing_caches(Positions(ramp)):
        ramp(3)
    assert ramp.cache_info().currsize == 1


@functools.lru_cache
def split_up(sizes: tuple[int, ...], heads: int) -> list[int]:
    """Return the sizes with the last one split into heads."""
    if sizes[-1] % heads != 0:
        raise ValueError(f"{sizes[-1]} channels do not make {heads} heads")
    return [*sizes[:-1], heads, sizes[-1] // heads]


class Headed(nn.Module):
    """Attention whose sizes a function works out that remembers them, as those of einops do."""

    def __init__(self, rearrange: Any) -> None:
        super().__init__()
        self.heads, self.rearrange = 4, rearrange
        self.qkv, self.out = nn.Linear(8, 48, bias=False), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        q, k, v = (self.rearrange(t, self.heads) for t in self.qkv(x).chunk(3, -1))
        scores = (q @ k.mT / 2).softmax(-1)
        y: Tensor = self.out((scores @ v).transpose(1, 2).flatten(2))
        return y


def by_hand(x: Tensor, heads: int) -> Tensor:
    """Split heads, with sizes that are remembered."""
    return x.reshape(split_up(x.shape, heads)).transpose(1, 2)


def by_einops(x: Tensor, heads: int) -> Tensor:
    """Split heads with einops."""
    return pytest.importorskip("einops").rearrange(x, "b n (h d) -> b h n d", h=heads)


@pytest.mark.parametrize("rearrange", [by_hand, by_einops])
def test_sizes_that_are_remembered_follow_all_the_same(rearrange: Any) -> None:
    """Also if the model ran before with the same shapes: plain numbers would be found then, and heads stay whole."""
    model = randomised(nn.Sequential(nn.Linear(5, 8), Headed(rearrange), nn.Tanh(), nn.Linear(8, 3)))
    x = torch.randn(2, 6, 5, dtype=torch.float64)
    model(x)
    groups = [g for g in engine.dependency_groups(model, x) if "1.qkv" in g.layers]
    assert [(g.size, g.reason) for g in groups if len(g.layers) == 1] == [(4, None)]
    heads = next(g.name for g in groups if len(g.layers) == 1)
    masks = engine.group_masks(groups, {heads: torch.tensor([True, False, True, True])})
    plan = check_exact(model, masks, x, torch.randn(3, 4, 5, dtype=torch.float64))
    assert plan.slices["1.qkv.weight"].shape == (36, 8) and plan.attributes["1"] == {"heads": 3}
    model(x)  # what is remembered is what was remembered before


def test_functions_that_remember_are_put_back() -> None:
    """They keep what they know, and what they can be asked, meanwhile."""
    split_up.cache_clear()
    before = split_up
    model = nn.Sequential(Headed(by_hand))
    split_up((2, 8), 4)
    with pytest.raises(ValueError, match="do not make"), bypassing_caches(model):
        assert split_up is not before and split_up.cache_info().currsize == 1
        assert split_up((2, 8), 4) is before((2, 8), 4)
        split_up((2, 9), 4)
    assert split_up is before


class Layered(nn.Module):
    """Attention that splits its heads with a layer of einops."""

    def __init__(self) -> None:
        super().__init__()
        layers = pytest.importorskip("einops.layers.torch")
        self.split = layers.Rearrange("b n (h d) -> b h n d", h=4)
        self.join = layers.Rearrange("b h n d -> b n (h d)")
        self.qkv, self.out = nn.Linear(8, 48), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        q, k, v = (self.split(t) for t in self.qkv(torch.tanh(x)).chunk(3, -1))
        y: Tensor = self.out(self.join((q @ k.mT / 2).softmax(-1) @ v))
        return y


def test_layers_of_einops(tmp_path: Path) -> None:
    """What their pattern leaves open is a number of theirs, and follows; a fresh model takes the weights."""
    model, x = randomised(Layered()), torch.randn(2, 6, 8, dtype=torch.float64)
    heads = next(g for g in engine.dependency_groups(model, x) if g.layers == ("qkv",))
    masks = engine.group_masks([heads], {heads.name: torch.tensor([True, False, False, True])})
    plan = check_exact(model, masks, x, torch.randn(3, 4, 8, dtype=torch.float64))
    assert plan.slices["qkv.weight"].shape == (24, 8) and plan.attributes["split"] == {"_axes_lengths[0]": 2}
    engine.ModelSpeedup(model, x, masks).speedup_model()
    torch.save(model.state_dict(), tmp_path / "small.pt")
    fresh = engine.load_compacted_state(Layered().double(), tmp_path / "small.pt").eval()
    assert torch.equal(fresh(x), model(x))

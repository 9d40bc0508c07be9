"""Layers that die as a whole: nothing crashes, one channel stays at most, and the function is the same."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import engine
from tests.engine.attentions import Attention, tokens
from tests.engine.exactness import Masks, check_exact, masked, parameters, randomised, relative_error, run
from tests.engine.nets import Mean, Net, image


def closed(model: nn.Module, *names: str) -> Masks:
    """Masks that close layers as a whole, with or without their biases."""
    return {
        name: {key: torch.zeros(p.shape) for key, p in model.get_submodule(name).named_parameters() if key != "bias"}
        for name in names
    }


def with_biases(model: nn.Module, masks: Masks) -> Masks:
    """The same masks, of the biases too."""
    found = {name: dict(entries) for name, entries in masks.items()}
    for name in masks:
        bias = model.get_submodule(name).bias
        found[name] |= {} if bias is None else {"bias": torch.zeros(bias.shape)}
    return found


def chain() -> nn.Module:
    """Three convolutions, the one in the middle padded and with a norm behind."""
    layers = [nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU()]
    return randomised(nn.Sequential(*layers, nn.Conv2d(5, 4, 3, padding=1), Mean(), nn.Linear(4, 2)))


def residual() -> nn.Module:
    """A branch of two convolutions beside a shortcut."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head(torch.relu(x + m.norm(m.last(torch.relu(m.first(x))))).mean((2, 3)))

    parts = {"first": nn.Conv2d(6, 5, 3, padding=1), "last": nn.Conv2d(5, 6, 3, padding=1), "norm": nn.BatchNorm2d(6)}
    return randomised(Net(forward, stem=nn.Conv2d(3, 6, 1), head=nn.Linear(6, 2), **parts))


def grouped(groups: int) -> nn.Module:
    """A grouped convolution between two dense ones."""
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=groups), nn.ReLU()]
    return randomised(nn.Sequential(*layers, nn.Conv2d(8, 4, 1), Mean(), nn.Linear(4, 2)))


def transformer() -> nn.Module:
    """A block: attention and two linear layers, each behind a norm and beside a shortcut."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = x + m.attention(m.norm1(x))
        return m.head((x + m.down(torch.relu(m.up(m.norm2(x))))).mean(1))

    parts = {"norm1": nn.LayerNorm(8), "norm2": nn.LayerNorm(8), "attention": Attention(), "up": nn.Linear(8, 12)}
    return randomised(Net(forward, stem=nn.Linear(5, 8), down=nn.Linear(12, 8), head=nn.Linear(8, 3), **parts))


def recurrent() -> nn.Module:
    """A layer of units that are read at each step."""
    net = Net(lambda m, x: m.out(m.layer(x)[0]), layer=nn.LSTM(8, 6, batch_first=True), out=nn.Linear(6, 3))
    return randomised(net)


# What makes the network, its input, what dies, and how large weights of it and around it are afterwards at most.
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, tuple[str, ...], dict[str, tuple[int, ...]]]] = {
    "first of a chain": (chain, image(7), ("0",), {"0.weight": (1, 3, 3, 3)}),
    # one carries the constants that the norm behind puts out, and one that is zero was there already
    "in a chain": (chain, image(7), ("2",), {"0.weight": (1, 3, 3, 3), "2.weight": (2, 1, 3, 3)}),
    "first of a branch": (residual, image(), ("first",), {"first.weight": (1, 6, 3, 3), "last.weight": (6, 1, 3, 3)}),
    "last of a branch": (residual, image(), ("last",), {"first.weight": (1, 6, 3, 3), "last.weight": (6, 1, 3, 3)}),
    "both of a branch": (
        residual,
        image(),
        ("first", "last"),
        {"first.weight": (1, 6, 3, 3), "last.weight": (6, 1, 3, 3)},
    ),
    "all groups": (lambda: grouped(4), image(7), ("2",), {"2.weight": (1, 1, 3, 3), "4.weight": (4, 1, 1, 1)}),
    "a depthwise one": (lambda: grouped(8), image(7), ("2",), {"0.weight": (1, 3, 3, 3), "2.weight": (1, 1, 3, 3)}),
    "neurons": (transformer, tokens(), ("up",), {"up.weight": (1, 8), "down.weight": (8, 1)}),
    "what neurons are read by": (transformer, tokens(), ("down",), {"up.weight": (1, 8), "down.weight": (8, 1)}),
}


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_dead_layer(name: str, biases: bool) -> None:
    """One channel of it stays, and what it was made from goes; its constant, where it leaves one, is kept."""
    make, x, names, left = CASES[name]
    model = make()
    masks = with_biases(model, closed(model, *names)) if biases else closed(model, *names)
    plan = check_exact(model, masks, x)
    small = plan.apply(copy.deepcopy(model))
    sizes = {key: tuple(p.shape) for key, p in small.named_parameters()}
    if biases:
        assert all(have <= most for key in left for have, most in zip(sizes[key], left[key], strict=True)), sizes
    told = [note.partition(" is completely masked")[0] for note in plan.notes if "completely masked" in note]
    assert sorted(told) == sorted(map(repr, names))


def test_dead_heads() -> None:
    """Attention without a head: its queries, keys and values go but for one head."""
    model = transformer()
    layer = model.attention.qkv
    masks = {"attention.qkv": {"weight": torch.zeros(layer.weight.shape), "bias": torch.zeros(layer.bias.shape)}}
    plan = check_exact(model, masks, tokens(), tokens(3, 6))
    assert plan.slices["attention.qkv.weight"].shape == (3 * 2, 8)
    assert any("'attention.qkv' is completely masked" in note for note in plan.notes)


def test_a_dead_recurrent_layer() -> None:
    """One unit stays, which is zero at every step."""
    model = recurrent()
    masks = {"layer": {key: torch.zeros(p.shape) for key, p in model.layer.named_parameters()}}
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    plan = check_exact(model, masks, x, torch.randn(3, 2, 8, dtype=torch.float64))
    assert plan.attributes["layer"] == {"hidden_size": 1} and plan.slices["out.weight"].shape == (3, 1)


NETS = {"chain": chain, "residual": residual, "grouped": lambda: grouped(4), "block": transformer}


@pytest.mark.parametrize("name", NETS)
def test_every_layer_dies(name: str) -> None:
    """Nothing is left but a constant, and no step fails; repaired first or not."""
    model = NETS[name]()
    x = tokens() if name == "block" else image(7)
    names = [name for name, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    masks = closed(model, *names[:-1])
    reference = masked(model, masks)
    speedup = engine.ModelSpeedup(copy.deepcopy(model), x, masks)
    small = speedup.speedup_model()
    assert relative_error(run(reference, x), run(small, x)) <= 1e-9
    assert parameters(small) < parameters(model) / 2
    fixed = engine.fix_mask_conflict(masks, model, x)
    check_exact(model, fixed, x)


def test_pruned_once_more() -> None:
    """What is left of a dead layer is one channel, which cannot go either: the second time nothing happens."""
    model = residual()
    first = engine.ModelSpeedup(model, image(), with_biases(model, closed(model, "last")))
    small = first.speedup_model()
    again = engine.ModelSpeedup(small, image(), with_biases(small, closed(small, "last")))
    assert parameters(again.speedup_model()) == parameters(small) and not again.plan.slices

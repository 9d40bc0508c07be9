"""Integers among a module's attributes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import engine
from engine.errors import PlanError
from engine.numbers.integers import _SET_BY_RULES, integers, is_settable, tagged, with_integers


class Holder(nn.Module):
    """Numbers of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.flag, self.rate, self.none = 4, True, 0.5, None
        self.sizes, self.pair, self.mixed, self.empty = [16, 48], (3, 5), [1, "a"], []
        self._hidden, self._list = 7, [8]


def test_which_count() -> None:
    """Neither flags nor floats, nor lists of anything else; of torch's own layers no strides."""
    own = {"heads": 4, "_hidden": 7, "_list[0]": 8}
    assert integers(Holder()) == own | {
        "heads": 4,
        "_hidden": 7,
        "sizes[0]": 16,
        "sizes[1]": 48,
        "pair[0]": 3,
        "pair[1]": 5,
        "_list[0]": 8,
    }
    assert not any("[" in name for name in integers(nn.Conv2d(1, 1, 3)))


def test_tags_go_where_the_numbers_are() -> None:
    """Public ones only; the module itself is left alone."""
    holder = Holder()
    names: list[str] = []
    made = tagged(holder, lambda name, number: names.append(name) or number + 1)
    assert made == {"heads": 5, "sizes": [17, 49], "pair": (4, 6)} and holder.sizes == [16, 48]
    assert names == ["heads", "sizes[0]", "sizes[1]", "pair[0]", "pair[1]"]


def test_several_of_one_list() -> None:
    """Are set at once, in a list of its own."""
    holder = Holder()
    made = with_integers("x", holder, {"sizes[1]": 24, "heads": 2, "sizes[0]": 8, "pair[1]": 1})
    assert made == {"sizes": [8, 24], "heads": 2, "pair": (3, 1)} and holder.sizes == [16, 48]


def test_named_integers() -> None:
    """Pairs of a name and a number follow as well, under a private name too: layers of einops keep them so."""
    layer = Holder()
    vars(layer).update(heads=None, sizes=None, pair=None, mixed=None, _hidden=None, _list=None)
    layer._axes, layer.other = (("h", 4), ("p", 2)), [("a", 1.0)]
    assert integers(layer) == {"_axes[0]": 4, "_axes[1]": 2}
    assert tagged(layer, lambda name, number: number + len(name)) == {"_axes": (("h", 12), ("p", 10))}
    assert with_integers("x", layer, {"_axes[0]": 3}) == {"_axes": (("h", 3), ("p", 2))}


@pytest.mark.parametrize("key", ["missing", "heads[0]", "sizes", "sizes[2]", "rate", "none", "sizes[x]", "sizes[-1]"])
def test_what_a_module_has_not(key: str) -> None:
    """Is named, with the module."""
    with pytest.raises(PlanError, match=r"'a.b' \(Holder\) has no"):
        with_integers("a.b", Holder(), {key: 1})


class Strided(nn.Conv2d):
    """A layer of torch's with a number of the user's."""

    def __init__(self) -> None:
        super().__init__(2, 4, 3)
        self.window, self.automatic_optimization = 7, True


@pytest.mark.parametrize(
    ("name", "value", "settable"),
    [
        ("out_channels", 3, True),
        ("window", 3, True),
        ("out_channels", 5, False),
        ("out_channels", 0, False),
        ("window", -1, False),
        ("training", 0, False),
        ("automatic_optimization", 0, False),
        ("_private", 1, False),
    ],
)
def test_only_what_a_compaction_could_have_set(name: str, value: int, settable: bool) -> None:
    """Sizes that rules set and numbers of the user's own, and smaller ones only; no flags, no strides."""
    layer = Strided()
    layer._private = 2  # type: ignore[assignment]
    if settable:
        assert with_integers("a", layer, {name: value}) == {name: value}
        return
    before = dict(vars(layer))
    with pytest.raises(PlanError, match=name):
        with_integers("a", layer, {name: value})
    assert vars(layer) == before


@pytest.mark.parametrize(
    ("layer", "name"),
    [(nn.Flatten(2), "start_dim"), (nn.AvgPool2d(2), "kernel_size"), (nn.LSTM(2, 2, 3), "num_layers")],
)
def test_other_numbers_of_layers_of_torch(layer: nn.Module, name: str) -> None:
    """Dimensions, strides, numbers of layers: no rule sets them, so no plan does."""
    assert not is_settable(layer, name)
    with pytest.raises(PlanError, match=name):
        with_integers("a", layer, {name: 1})


def test_the_names_are_those_that_rules_set() -> None:
    """The table says neither more nor less than what the rules give on their own samples."""
    names: set[str] = set()
    for rule in engine.RULES.distinct():
        for sample in rule.samples():
            module, example = sample.make(), torch.randn(sample.shape)
            module(example)  # lazy layers
            graph = engine.trace(module, example)
            for node in graph.nodes:
                names |= set(engine.RULES.rule(node.op).attributes(node, lambda value: value.shape))
    assert names <= _SET_BY_RULES

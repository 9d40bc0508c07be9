"""Integers among a module's attributes."""

from __future__ import annotations

import pytest
from torch import nn

from engine.errors import PlanError
from engine.source.integers import integers, tagged, with_integers


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

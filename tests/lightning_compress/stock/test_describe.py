"""The search for the configuration of a narrowed network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_compress.stock.describe import Search, look_at
from lightning_compress.stock.fields import set_numbers

CONFIG = {"width": 12, "heads": 3, "inner": 24, "eps": 1e-5, "unused": 7, "ratio": None}


class Net(nn.Module):
    """A network whose class refuses heads that do not divide its width."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, heads = config["width"], config["heads"]
        if width % heads:
            raise ValueError("heads do not divide the width")
        self.head_dim = width // heads
        self.inner = nn.Linear(width, config["inner"])
        self.outer = nn.Linear(config["inner"], config["ratio"] or 5)
        self.norm = nn.LayerNorm(width, eps=config["eps"])


def search(**fields: Any) -> Search:
    """A search for a network of which only the shapes and numbers are known."""
    target = look_at(Net({**CONFIG, **fields}))
    numbers = {(name,): value for name, value in CONFIG.items()}
    return Search(lambda values: Net(set_numbers(CONFIG, values)), numbers, target)


def test_the_configuration_is_found() -> None:
    """Sizes, what divides them, and eps; what is not a size keeps its value."""
    found = search(width=8, heads=2, inner=10, eps=1e-3).solve()
    assert found[0] == {("width",): 8, ("heads",): 2, ("inner",): 10, ("eps",): 1e-3}


def test_a_field_without_a_value_gets_one() -> None:
    """Where a size follows it once it has one."""
    assert search(ratio=9).solve()[0] == {("ratio",): 9}


def test_a_ratio_is_solved_for() -> None:
    """A size that is a product of the width and a float, also where it is rounded down."""

    def build(values: Mapping[Any, Any]) -> nn.Module:
        return nn.Linear(30, int(30 * {("ratio",): 4.0, **values}["ratio",]))

    for size in (60, 50, 7):
        values = Search(build, {("ratio",): 4.0}, look_at(nn.Linear(30, size))).solve()[0]
        assert int(30 * values["ratio",]) == size


def test_a_whole_number_may_be_a_ratio() -> None:
    """A width that a whole number multiplies may need a fraction of it."""

    def build(values: Mapping[Any, Any]) -> nn.Module:
        return nn.Linear(8, int(8 * {("ratio",): 3, **values}["ratio",]))

    assert Search(build, {("ratio",): 3}, look_at(nn.Linear(8, 12))).solve() == [{("ratio",): 1.5}]


def test_many_fields_change_at_once() -> None:
    """A list of blocks with a size for each."""
    blocks = {("blocks", n): 8 for n in range(30)}

    def build(values: Mapping[Any, Any]) -> nn.Module:
        return nn.ModuleList(nn.Linear(1, size) for size in {**blocks, **values}.values())

    wanted = {("blocks", n): 3 + n % 4 for n in range(30)}
    search = Search(build, blocks, look_at(build(wanted)))
    assert search.solve()[0] == wanted and len(search.looks) < 500


class Heads(nn.Module):
    """Projections of attention, of which one field is the size of all heads."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.size = config["size"]
        self.query = nn.Linear(8, config["heads"] * self.size)
        self.key = nn.Linear(8, config["pairs"] * self.size)


def test_fewer_heads_have_the_shapes_of_smaller_ones() -> None:
    """What leaves the numbers of modules as they are comes next."""
    config = {"heads": 4, "pairs": 2, "size": 6}
    fields = {(name,): value for name, value in config.items()}
    target = look_at(Heads({**config, "heads": 2, "pairs": 1}))
    task = Search(lambda values: Heads(set_numbers(config, values)), fields, target)
    assert task.others({("size",): 3}) == [{("heads",): 2, ("pairs",): 1}]
    assert task.others({("heads",): 2, ("pairs",): 1}) == []


def test_nothing_changes_where_nothing_differs() -> None:
    """The old configuration is the answer."""
    assert search().solve()[0] == {}


def test_the_nearest_is_returned_where_none_fits() -> None:
    """With how far it is."""
    task = search(width=8, heads=2)
    task.target.shapes["outer.weight"] = (5, 23)
    nearest = task.solve()[0]
    assert nearest == {("width",): 8, ("heads",): 2} and task.score(nearest)[0] == 1


def test_a_size_that_was_zero() -> None:
    """An optional part of size 0 gets the size that it has."""

    def build(values: Mapping[Any, Any]) -> nn.Module:
        return nn.ParameterDict({"extra": torch.empty(values.get(("extra",), 0), 2)})

    assert Search(build, {("extra",): 0}, look_at(build({("extra",): 5}))).solve()[0] == {("extra",): 5}

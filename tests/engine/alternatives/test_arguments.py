"""Calls in which numbers, flags and text among the arguments are others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.alternatives.arguments import Arguments


class Net(nn.Module):
    """Takes arguments of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, /, scale: float = 1.0, *sizes: int, kind: str = "layer", **options: Any) -> Tensor:
        """Run one of the layers."""
        return getattr(self, kind)(x) * scale  # type: ignore[no-any-return]


def _calls(*args: Any, **kwargs: Any) -> list[tuple[str, tuple[tuple[Any, ...], dict[str, Any]]]]:
    return [(name, call) for name, way in Arguments(Net(), args, kwargs).alternatives() for call in way]


def test_defaults_and_what_the_example_gives() -> None:
    """One argument is another, and all others are as in the example."""
    calls = _calls(0.5)
    assert ("scale", ((0.5, 0.0), {})) in calls
    assert ("kind", ((0.5,), {"kind": "other"})) in calls
    assert ("x", ((0.0,), {})) in calls


def test_whole_numbers_go_both_ways() -> None:
    """In a row, down to zero from a number that is not negative."""
    alternatives = [list(way) for name, way in Arguments(Net(), (None, 2.0, 2), {}).alternatives() if name == "sizes"]
    assert [[args[2] for args, _ in way] for way in alternatives] == [list(range(3, 19)), [1, 0]]


def test_in_containers() -> None:
    """Of the same kind, with one entry that is another."""
    calls = [kwargs["flags"] for name, (_, kwargs) in _calls(None, flags={"a": [True, 0.0]}) if name == "options"]
    assert {"a": [False, 0.0]} in calls and {"a": [True, 1.0]} in calls


def test_a_forward_without_a_signature() -> None:
    """It has no arguments that are looked into, nor has one that rejects the call."""
    model = Net()
    model.forward = 3  # type: ignore[assignment]
    assert not list(Arguments(model, (1.0,), {}).alternatives())
    assert not list(Arguments(Net(), (), {"scale": 1.0}).alternatives())


def test_the_notes_name_an_argument_without_another_value() -> None:
    """The model rejects all others."""

    class Strict(nn.Linear):
        def forward(self, x: Tensor, version: int = 2, *, act: str = "relu") -> Tensor:
            if version != 2:
                raise ValueError("version")
            return getattr(super().forward(x), act)()  # type: ignore[no-any-return]

    notes = engine.trace(Strict(4, 4), torch.zeros(2, 4)).notes
    assert [note for note in notes if "was recorded: version, act" in note]


@pytest.mark.parametrize("steps", [1, 3])
def test_a_loop_is_recorded_once_more(steps: int) -> None:
    """A longer loop takes no other steps, and is not followed further."""

    class Loop(nn.Linear):
        def forward(self, x: Tensor, steps: int = steps) -> Tensor:
            for _ in range(steps):
                x = super().forward(x).relu()
            return x

    graph = engine.trace(Loop(4, 4), torch.zeros(2, 4))
    assert len([node for node in graph.nodes if node.op == "linear"]) <= steps + 2


def test_declared_arguments_keep_their_value() -> None:
    """They are not recorded at others."""
    names = {name for name, _ in Arguments(Net(), (None,), {}, lambda name: name == "kind").alternatives()}
    assert names == {"scale"}

    example = torch.zeros(2, 4)
    layers = [{n.module for n in engine.trace(Net(), example, constants=c).nodes} for c in (None, ["kind", "scale"])]
    assert [run - {""} for run in layers] == [{"layer", "other"}, {"layer"}]


class Flags(nn.Module):
    """Takes flags."""

    def forward(self, x: Tensor, first: bool = False, second: bool = False, third: bool = True) -> Tensor:
        """Return the input."""
        return x


def test_flags_together() -> None:
    """All on, and all off where several were on."""
    calls = [call for _, way in Arguments(Flags(), (None,), {}).alternatives() for call in way]
    assert len(calls) == 4 and calls[-1] == ((None, True, True, True), {})
    assert len([call for _, way in Arguments(Flags(), (None, True), {}).alternatives() for call in way]) == 4


class Passing(nn.Module):
    """Passes on what it does not name: options, or any number of tensors."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Predict."""
        return self.predict(x, *args, **kwargs)

    def predict(self, x: Tensor, profile: bool = False) -> Tensor:
        """Say how long it takes."""
        return x


class Fusing(Passing):
    """Takes any number, one call further on."""

    def predict(self, x: Tensor, *views: Tensor) -> Tensor:  # type: ignore[override]
        """Fuse."""
        return sum(views, x)


def test_options_are_no_further_tensors() -> None:
    """A tensor in the place of a flag would turn it on, and run what no call runs."""
    assert not list(Arguments(Passing(), (torch.zeros(1),), {}).lengths())
    assert list(Arguments(Fusing(), (torch.zeros(1),), {}).lengths())


class Called(nn.Module):
    """Has an argument of its own call alone."""

    def __call__(self, x: Tensor, flip: bool = False) -> Tensor:
        """Return the input."""
        return super().__call__(x.flip(0) if flip else x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        return x


def test_arguments_of_the_modules_own_call() -> None:
    """They are other ones in other calls, like those of forward."""
    arguments = Arguments(Called(), (torch.zeros(1),), {})
    assert arguments.names == {"flip"}
    [(name, calls)] = arguments.alternatives()
    assert name == "flip"
    assert [args[1:] for args, _ in calls] == [(True,)]

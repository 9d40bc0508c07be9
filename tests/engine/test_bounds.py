"""Tests of the checks of arguments."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import nn

import engine
from engine.bounds import calling, check_kinds, check_number
from engine.errors import InputError, TraceError


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, True, None, "3", torch.tensor(1.0)])
def test_what_is_no_number_is_named(value: Any) -> None:
    """NaN compares False with everything, and text with nothing."""
    with pytest.raises(InputError, match="`x` must be a .*number >= 0, got "):
        check_number("x", value, 0)


def test_bounds_and_kinds() -> None:
    """Numbers of NumPy count; a bound that must be exceeded does not suffice; halves are no integers."""
    for value in (0, 0.5, np.float32(2), np.int64(3)):
        check_number("x", value, 0)
    with pytest.raises(InputError, match="`x` must be a number > 0, got 0"):
        check_number("x", 0, above=0)
    with pytest.raises(InputError, match="`x` must be an integer >= 1, got 1.5"):
        check_number("x", 1.5, 1, whole=True)
    with pytest.raises(ZeroDivisionError, match="`x` must be a number of steps, got nan"):
        check_number("x", math.nan, what="a number of steps", error=ZeroDivisionError)


@pytest.mark.parametrize("options", [{"ridge": math.nan}, {"ridge": math.inf}, {"samples": "8"}, {"samples": math.nan}])
def test_fits_of_weights_refuse_them(options: dict[str, Any]) -> None:
    """Before anything changes, whichever function takes them."""
    net, x = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)), torch.zeros(1, 2)
    before = net[1].weight.clone()
    name = next(iter(options))
    with pytest.raises(InputError, match=f"`{name}` must be "):
        engine.compensate(net, x, {"0": {"bias": torch.tensor([0, 1, 1, 1])}}, [torch.randn(8, 2)], **options)
    with pytest.raises(InputError, match=f"`{name}` must be "):
        engine.reconstruction_losses(net, x, engine.dependency_groups(net, x), [torch.randn(8, 2)], **options)
    assert torch.equal(net[1].weight, before)


@pytest.mark.parametrize("argument", ["constants", "opaque"])
def test_one_name_is_a_list_of_one(argument: str) -> None:
    """A text is not taken for its letters; what is no text is an error that names the argument."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net.register_buffer("scale", torch.ones(1))
    name = {"constants": "scale", "opaque": "0"}[argument]
    assert getattr(engine.trace(net, torch.zeros(1, 2), **{argument: name}), argument) == (name,)
    for wrong in (5, [5], torch.tensor(5)):
        with pytest.raises(InputError, match=f"`{argument}` must be a .* list.*, got"):
            engine.trace(net, torch.zeros(1, 2), **{argument: wrong})


Kind = TypeVar("Kind")


NET = nn.ReLU()


def takes(
    net: nn.Module = NET,
    name: str | None = None,
    flag: bool = False,
    path: str | os.PathLike[str] = "",
    names: str | Sequence[str] = (),
    batches: Iterable[Any] = (),
    sizes: Mapping[str, int] | None = None,
    rule: Callable[[int], int] = abs,
    cls: type[nn.Module] = nn.ReLU,
    size: int = 1,
    share: float | Sequence[float] = 0.5,
    example: Any = None,
    other: Kind | None = None,
    later: OnlyForTypeCheckers = None,  # noqa: F821
) -> None:
    """Take arguments of all kinds."""
    check_kinds(takes, locals())


class Indexed:
    """Data that are read by index alone."""

    def __getitem__(self, index: int) -> int:
        """The index."""
        return range(3)[index]


def numbers_one_by_one() -> Iterator[int]:
    """One number."""
    yield 1


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("net", "resnet18", "a `Module`"), ("net", nn.ReLU, "a `Module`"), ("net", None, "a `Module`"),
        ("name", ["a"], "a string or None"), ("flag", "no", "True or False"), ("flag", None, "True or False"),
        ("path", 3, "a string or a path"), ("names", 3, "a string or a list"), ("names", {}, "a string or a list"),
        ("batches", 5, "an iterable"), ("batches", None, "an iterable"), ("batches", np.float32(1), "an iterable"),
        ("sizes", [("a", 1)], "a mapping or None"), ("rule", "abs", "a function"), ("cls", nn.ReLU(), "a class"),
        ("share", "half", "a number or a list"), ("share", None, "a number or a list"),
        ("batches", torch.tensor(1.0), "an iterable"), ("names", np.array("a"), "a string or a list"),
    ],
)  # fmt: skip
def test_arguments_of_another_kind_are_named(name: str, value: Any, what: str) -> None:
    """With what would do instead, in the order of the annotation."""
    with pytest.raises(InputError, match=f"^`{name}` must be {what}, got "):
        takes(**{name: value})
    defaults = {n: parameter.default for n, parameter in inspect.signature(takes).parameters.items()}
    with pytest.raises(ZeroDivisionError, match=name):
        check_kinds(takes, {**defaults, name: value}, ZeroDivisionError)


def test_arguments_that_serve() -> None:
    """Numbers and truth values of NumPy count, and whatever can be read one by one; the unannotated is not asked."""
    takes(NET, "a", np.bool_(True), Path("a"), ["a"], numbers_one_by_one(), {}, nn.ReLU(), nn.Conv2d)
    takes(size="8")  # `check_number` is for it
    takes(names=("a",), batches=Indexed(), size=np.int64(3), share=np.float32(0.5), example=object(), other=3, later=4)
    takes(share=torch.ones(2), batches=np.ones(2), names={"a"})


def test_a_long_value_is_shortened() -> None:
    """The error is one line."""
    with pytest.raises(InputError) as caught:
        takes("x" * 1000)
    assert len(str(caught.value)) < 120 and "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [None, "resnet18", 3, nn.Linear])
def test_a_model_that_is_none(value: Any, tmp_path: Path) -> None:
    """Each function of the package that takes a model names the argument, and writes nothing."""
    x: Any = torch.ones(1, 2)
    calls: list[Callable[[], Any]] = [
        lambda: engine.trace(value, x), lambda: engine.count_flops_params(value, x),
        lambda: engine.fix_mask_conflict({}, value, x), lambda: engine.dependency_groups(value, x),
        lambda: engine.not_safe_to_prune(value, x), lambda: engine.compensate(value, x, {}, [x]),
        lambda: engine.recalibrate_norms(value, [x]), lambda: engine.reconstruction_losses(value, x, [], [x]),
        lambda: engine.ModelSpeedup(value, x, {}), lambda: engine.paying_widths(value, x),
        lambda: engine.load_compacted_state(value, tmp_path / "a.pt"), lambda: engine.compactable(value),
        lambda: engine.save_safetensors(value, tmp_path / "a.safetensors"), lambda: engine.read_masks(value),
        lambda: engine.set_attention(value, "heads"), lambda: engine.load_shards(value, tmp_path),
        lambda: engine.compact_shards(value, tmp_path, tmp_path / "b", x, {}),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(InputError, match="^`model` must be a `Module`, got "):
            call()
    assert not list(tmp_path.iterdir())


def test_a_function_of_the_user_that_fails() -> None:
    """The error says which one, and has the original as its cause; errors of the engine are as they were."""
    message = r"^`f` for 'a' failed: ZeroDivisionError: division by zero$"
    with pytest.raises(InputError, match=message) as raised, calling("`f` for 'a'"):
        _ = 1 / 0
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    with pytest.raises(TraceError, match="^as it was$"), calling("`f`"):
        raise TraceError("as it was")
    with pytest.raises(KeyboardInterrupt), calling("`f`"):
        raise KeyboardInterrupt


def test_a_class_is_no_iterable() -> None:
    """Not even one whose instances are."""
    with pytest.raises(InputError, match=r"`values` must be an iterable, got <class 'list'>"):
        _iterate(list)  # type: ignore[arg-type]


def _iterate(values: Iterable[int]) -> None:
    check_kinds(_iterate, locals())

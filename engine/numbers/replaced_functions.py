"""Replacements for functions of Python and torch while a model runs, which keep track of sizes and memory.

Numbers keep the expressions of the sizes from which they are computed. A change of a tensor without an op would go
unnoticed, so it is refused, and another object for its memory stands for the same values.
"""

from __future__ import annotations

import builtins
import functools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from engine.errors import TraceError
from engine.numbers.sizes import Scalar, expression, is_tagged, note_exact_values
from engine.program.expressions import Apply
from engine.program.storages import storage_of
from engine.source.sites import user_site

__all__ = ["PASSED_THROUGH", "TRACKED_FUNCTIONS", "Twins", "check_followed", "replaced_functions"]

_PER_NUMBER = frozenset({"apply_", "map_", "map2_"})
"""Methods that call a Python function for each number in a tensor, and change the tensor without an op."""

_ADVICE = "Compute it with torch's ops, or put it into a module of its own and name that in `exclude`."


def check_followed(name: str, arguments: tuple[Any, ...], holds: Callable[[Tensor], bool]) -> None:
    """Refuse a method that changes a tensor without an op.

    Args:
        name: of a function of torch.
        arguments: of its call.
        holds: returns whether a tensor belongs to the program.

    Raises:
        TraceError: naming the method.

    Example:
        >>> check_followed("apply_", (torch.zeros(2),), lambda tensor: False)
    """
    tensors = [t for t in arguments if isinstance(t, Tensor)] if name in _PER_NUMBER else []
    if any(isinstance(tensor, FakeTensor) or holds(tensor) for tensor in tensors):
        site = user_site(name)
        raise TraceError(f"`Tensor.{name}` ({site}) calls Python for each number, which cannot be followed. {_ADVICE}")


class Twins(Protocol):
    """The program of the running code, which is notified that two tensors are one."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is part of the program."""

    def share(self, tensor: Tensor, twin: Tensor) -> None:
        """Note that another object stands for a tensor: it has its memory and its sizes.

        Raises:
            DataDependentOutputException: where the run has tensors without data, so that it starts again with data.
        """


_from_dlpack = torch._C._from_dlpack
_plain_deepcopy = torch.Tensor.__deepcopy__
_plain_as_subclass, _plain_make_subclass = torch.Tensor.as_subclass, torch.Tensor._make_subclass


def _checked_from_dlpack(capsule: Any, *others: Any) -> Tensor:
    """Refuse a capsule, which holds memory without its tensor; a tensor reports the read itself."""
    if type(sys._getframe(1).f_locals.get("ext_tensor")).__name__ == "PyCapsule":
        site = user_site("from_dlpack")
        raise TraceError(
            f"`from_dlpack` ({site}) gets a tensor's memory, which cannot be followed. Pass the tensor itself."
        )
    return _from_dlpack(capsule, *others)


PASSED_THROUGH = __file__
"""The file of functions that ask tensors for numbers on behalf of the code that calls them."""

_MATH = {function.__name__: function for function in (math.exp, math.log, math.log10, math.log2, math.sqrt)}
TRACKED_FUNCTIONS = frozenset(_MATH)
"""Names of the functions of `math` whose results are tracked."""

_range = range


def _tracked_function(plain: Callable[..., float]) -> Callable[..., float]:
    """Return a function of `math` whose result is tracked."""

    @functools.wraps(plain)
    def function(number: Any, /, *base: Any) -> float:
        result = plain(number, *base)
        if is_tagged(number) and not base:
            return Scalar(result, Apply(plain.__name__, expression(number), 0))
        note_exact_values((number, *base))
        return result

    return function


class _RangeType(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _range)

    def __call__(cls, *bounds: Any) -> range:
        note_exact_values(bounds)
        return _range(*bounds)


class _Range(metaclass=_RangeType):
    """Replaces ``range``, which turns its bounds into plain numbers: the length of a loop is a decision, too."""


def _followed(plain: Callable[..., Tensor], position: int, program: Twins) -> Callable[..., Tensor]:
    """Return a method that gives a tensor another class without an op, and notifies the program that both are one."""

    @functools.wraps(plain)
    def method(*arguments: Any, **options: Any) -> Tensor:
        tensor = arguments[position] if len(arguments) > position else options.get("data")
        if not isinstance(tensor, Tensor) or not program.holds(tensor):
            return plain(*arguments, **options)
        twin = plain(*arguments, **options)
        with torch._C.DisableTorchFunction():  # what the program asks of a tensor is no code of the model
            program.share(tensor, twin)
        return twin

    return method


def _followed_deepcopy(program: Twins) -> Callable[[Tensor, dict[int, Any]], Tensor]:
    """Return ``__deepcopy__``, which copies memory without an op, with an op for what belongs to the program."""

    def method(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
        is_plain = type(tensor) is FakeTensor or (type(tensor) is Tensor and not vars(tensor))
        if id(tensor) in memo or not is_plain or not program.holds(tensor) or tensor.requires_grad:
            return _plain_deepcopy(tensor, memo)  # type: ignore[no-untyped-call, no-any-return]
        with torch._C.DisableTorchFunction():
            memory = "memory", storage_of(tensor)
        if memory in memo:
            site = user_site("deepcopy")
            raise TraceError(
                f"`deepcopy` ({site}) copies two tensors that share memory, and so do the copies, which cannot be "
                "followed. Copy one of them, and take the other from the copy."
            )
        memo[memory], memo[id(tensor)] = True, tensor.clone(memory_format=torch.preserve_format)
        return memo[id(tensor)]  # type: ignore[no-any-return]

    return method


@contextmanager
def replaced_functions(program: Twins) -> Iterator[None]:
    """Replace the functions that would return untracked numbers, and those that access the memory of a tensor.

    A recording in a recording restores what the outer one has replaced.

    Args:
        program: that the running code belongs to.
    """
    replacements: list[tuple[Any, str, Any]] = [
        (torch.Tensor, "as_subclass", _followed(_plain_as_subclass, 0, program)),
        (torch.Tensor, "_make_subclass", staticmethod(_followed(_plain_make_subclass, 1, program))),
        (torch.Tensor, "__deepcopy__", _followed_deepcopy(program)),
        (torch._C, "_from_dlpack", _checked_from_dlpack),
        (builtins, "range", _Range),
        *((math, name, _tracked_function(plain)) for name, plain in _MATH.items()),
    ]
    with ExitStack() as undo:
        for owner, name, function in replacements:
            undo.callback(_restore, owner, name, vars(owner).get(name))
            setattr(owner, name, function)
        yield


def _restore(owner: Any, name: str, before: Any) -> None:
    if before is None:
        delattr(owner, name)  # it is inherited
    else:
        setattr(owner, name, before)

"""Where each number among the arguments of an op came from: shapes are handed out with their origin while recording."""

from __future__ import annotations

import builtins
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from engine.program.expressions import Apply, Expr, Guard, ShapeOf
from engine.program.graph import Value
from engine.source.sites import Site, user_site
from engine.source.sizes import LISTENING, Scalar, Shape, Size, expression, is_tagged, numbers_in, tell_numbers

__all__ = ["Provenance"]


def _take_reflected(numbers: Iterable[int | float]) -> bool:
    """Return whether one of the numbers called the tensor from the left, and forget it."""
    found = [n for n in numbers if isinstance(n, (Size, Scalar)) and n.reflected]
    for number in found:
        number.reflected = False
    return bool(found)


_MATH = {function.__name__: function for function in (math.exp, math.log, math.log10, math.log2, math.sqrt)}
_range = range


def _function(plain: Callable[..., float]) -> Callable[..., float]:
    """Return a function of `math` whose result remembers what it was computed from."""

    @functools.wraps(plain)
    def function(number: Any, /, *base: Any) -> float:
        result = plain(number, *base)
        if is_tagged(number) and not base:
            return Scalar(result, Apply(plain.__name__, expression(number), 0))
        tell_numbers((number, *base))
        return result

    return function


class _Counted(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _range)

    def __call__(cls, *bounds: Any) -> range:
        tell_numbers(bounds)
        return _range(*bounds)


class _Range(metaclass=_Counted):
    """Stands for ``range``, which turns its bounds into plain numbers: how often a loop runs is a decision too."""


@contextmanager
def _remembering() -> Iterator[None]:
    """Replace the functions that would drop what a number remembers."""
    try:
        builtins.range = _Range  # type: ignore[assignment, misc]
        vars(math).update({name: _function(plain) for name, plain in _MATH.items()})
        yield
    finally:
        builtins.range = _range  # type: ignore[misc]
        vars(math).update(_MATH)


def _assign(tensor: Tensor, data: Tensor) -> None:
    tensor.data = data


class Provenance(TorchFunctionMode):
    """Hands out tagged shapes, and keeps the integers and the source line of the torch function that is running.

    Comparisons of sizes are kept as guards, and what else the code makes of a number that forgets where it is from.

    Args:
        value_of: gives the recorded value of a tensor, or None where the tensor is not part of the program.
        assign: is told of ``tensor.data = other``, which no op shows, and carries it out.
    """

    _plain: ClassVar[frozenset[str]] = frozenset({"__get__", "__len__", "nelement", "numel", "size"})
    _data: ClassVar[frozenset[str]] = frozenset({"as_tensor", "asarray", "new_tensor", "tensor"})

    def __init__(
        self, value_of: Callable[[Tensor], Value | None], assign: Callable[[Tensor, Tensor], None] = _assign
    ) -> None:
        super().__init__()
        self._value_of, self._assign = value_of, assign
        self.numbers: list[int | float] = []
        self.site: Site | None = None
        self.guards: dict[Apply, Guard] = {}

    def __enter__(self) -> Provenance:
        self._scope = ExitStack()
        self._scope.enter_context(_remembering())
        LISTENING.append(self.guards)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        LISTENING.pop()
        self._scope.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function; tag the result where it is a shape."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__set__" and func.__self__ is Tensor.data:
            return self._assign(*args)
        if name not in self._plain:
            if name in self._data:  # numbers that become entries of a tensor
                tell_numbers(numbers_in((args, kwargs)))
            self._leave(self.numbers)
            self.numbers = list(numbers_in((args, kwargs)))
            self.site = user_site(name, _take_reflected(self.numbers))
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, torch.Size):
            return self._tag(args[0], result)
        if name in ("nelement", "numel"):
            return self._tag(args[0], args[0].size()).numel()
        if name == "__len__":  # a plain number is all that it may return
            self._counted(args[0], result)
        if name == "size":
            dim = args[1] if len(args) > 1 else kwargs["dim"]
            return self._tag(args[0], args[0].size())[dim]
        return result

    def _tag(self, tensor: Tensor, sizes: torch.Size) -> Shape:
        value = self._value_of(tensor)
        if value is None:
            return Shape(sizes)
        return Shape(Size(n, ShapeOf(value, d)) for d, n in enumerate(sizes))

    def _counted(self, tensor: Tensor, length: int) -> None:
        value = self._value_of(tensor)
        if value is not None:
            expr = Apply("==", ShapeOf(value, 0), length)
            self.guards.setdefault(expr, Guard(expr, True, str(user_site("len"))))

    def _leave(self, numbers: Iterable[int | float]) -> None:
        """Note numbers that torch took and that no op was given: a slice that covers a whole tensor is no op."""
        for number in numbers:
            if is_tagged(number):
                expr = Apply("for", expression(number), 0)
                self.guards.setdefault(expr, Guard(expr, True, str(self.site), decides=False))

    def taken(self) -> list[Guard]:
        """Return the decisions of the run, and forget them."""
        self._leave(self.numbers)
        guards = list(self.guards.values())
        self.guards.clear()
        self.numbers = []
        return guards

    @property
    def tagged(self) -> bool:
        """Whether any of the running function's numbers came from a shape or an attribute."""
        return any(map(is_tagged, self.numbers))

    def match(self, number: int | float) -> Expr:
        """Return the expression of a number that reached the op, and forget it and what came before it."""
        for position, candidate in enumerate(self.numbers):
            if candidate == number:
                self._leave(self.numbers[:position])
                del self.numbers[: position + 1]
                return expression(candidate)
        return number

"""Where each number among the arguments of an op came from: shapes are handed out with their origin while recording."""

from __future__ import annotations

import builtins
import functools
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.overrides import TorchFunctionMode

from engine.program.expressions import Apply, Expr, Guard, ShapeOf
from engine.program.graph import Value
from engine.program.trees import tensors_in
from engine.source.coefficients import settable
from engine.source.literals import unsettled
from engine.source.sites import Site, user_site
from engine.source.sizes import (
    LISTENING,
    Scalar,
    Shape,
    Size,
    expression,
    is_tagged,
    numbers_in,
    tell_numbers,
    truths_in,
)
from engine.source.spelled import spelled_out
from engine.source.stepping import Steps

__all__ = ["ASKING", "DESCRIBING", "Provenance"]


def _take_reflected(numbers: Iterable[int | float]) -> bool:
    """Return whether one of the numbers called the tensor from the left, and forget it."""
    reflected = [n for n in numbers if isinstance(n, (Size, Scalar)) and n.reflected]
    for number in reflected:
        number.reflected = False
    return bool(reflected)


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


class Program(Protocol):
    """What the torch functions that run belong to."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is part of the program."""

    def assign(self, tensor: Tensor, data: Tensor) -> None:
        """Carry out ``tensor.data = data``, which no op shows."""

    def read(self, tensor: Tensor) -> None:
        """Note that Python gets at the numbers in a tensor."""

    def adopt(self, tensor: Tensor) -> None:
        """Note that a tensor is made of numbers that may follow from what was read."""


# Functions of a tensor that give neither tensors nor its numbers; so do all whose names start with ``is_``.
DESCRIBING = frozenset(
    """can_cast dense_dim dim dim_order element_size get_device ndimension nelement
    promote_types register_hook register_post_accumulate_grad_hook result_type sparse_dim storage_offset storage_type
    stride sym_numel sym_size sym_storage_offset sym_stride type __dir__ __hash__ __len__ _is_view""".split()
)
ASKING = ("has_", "_has_")
"""How functions begin that say whether a tensor has something."""

_WRAPPERS = tuple(
    os.path.join(os.path.dirname(torch.__file__), *path)
    for path in (("_tensor.py",), ("functional.py",), ("overrides.py",), ("nn", "functional.py"), ("_jit_internal.py",))
)
_LAYERS = os.path.join(os.path.dirname(torch.__file__), "nn", "modules") + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PLAIN_ARGUMENTS = (
    *(type(None), bool, int, float, complex, str, slice, type(Ellipsis), torch.Generator),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def _describes(name: str) -> bool:
    """Whether a function that gives no tensor tells nothing of the numbers in one, or is the engine's own call."""
    if name.startswith(("is_", *ASKING)) or name in DESCRIBING:
        return True
    return _caller().f_code.co_filename.startswith(_PACKAGE)


def _unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor that ops get where vmap, or another transform, hands the code one that stands for it."""
    functions = torch._C._functorch
    while functions.is_functorch_wrapped_tensor(tensor):
        tensor = functions.get_unwrapped(tensor)
    return tensor


def _is_plain(argument: Any) -> bool:
    """Whether an argument hides no numbers, as an array does."""
    if isinstance(argument, (list, tuple)):
        return all(map(_is_plain, argument))
    return isinstance(argument, (Tensor, *_PLAIN_ARGUMENTS))


def _caller() -> FrameType:
    """Return the frame that calls the running torch function: of the user's code, or of torch's own layers."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename in (*_WRAPPERS, __file__):
        frame = frame.f_back
    return frame


class Provenance(TorchFunctionMode):
    """Hands out tagged shapes, and keeps the integers and the source line of the torch function that is running.

    Comparisons of sizes are kept as guards, and what else the code makes of a number that forgets where it is from.

    Args:
        value_of: gives the recorded value of a tensor, or None where the tensor is not part of the program.
        program: is told of what no op shows.
        steps: watches the user's code, and no function of torch.

    Attributes:
        numbers: those that the running function was called with.
        uncertain: those of them that may follow from what Python has read.
        site: where it was called.
        guards: comparisons of sizes.
        reads: whether Python has read the numbers in a tensor.
    """

    _plain: ClassVar[frozenset[str]] = frozenset({"__get__", "__len__", "nelement", "numel", "size"})
    _data: ClassVar[frozenset[str]] = frozenset({"as_tensor", "asarray", "new_tensor", "tensor"})

    def __init__(self, value_of: Callable[[Tensor], Value | None], program: Program, steps: Steps) -> None:
        super().__init__()
        self._steps = steps
        self._value_of, self._program = value_of, program
        self.numbers: list[int | float] = []
        self.uncertain: list[int | float] = []
        self.reads = False
        self.site: Site | None = None
        self.guards: dict[Apply, Guard] = {}

    def __enter__(self) -> Provenance:
        self._scope = ExitStack()
        self._scope.enter_context(_remembering())
        LISTENING.append(self.guards)
        self.reads = False
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        LISTENING.pop()
        self._scope.close()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function; tag the result where it is a shape."""
        kwargs = kwargs or {}
        self._steps.pause()
        try:
            name = getattr(func, "__name__", "")
            if name == "__set__" and func.__self__ is Tensor.data:
                return self._program.assign(*args)
            written = spelled_out(func)
            if written is not None:
                return self._watching(written, args, kwargs)
            if name not in self._plain:
                if name in self._data:  # numbers that become entries of a tensor
                    tell_numbers(numbers_in((args, kwargs)))
                self._leave(self.numbers)
                self.numbers = numbers_in((args, kwargs))
                self.site = user_site(name, _take_reflected(self.numbers))
                self.uncertain = [*(self._uncertain((args, kwargs)) if self.reads else ()), *settable(self.numbers)]
                result = func(*args, **kwargs)
                if not isinstance(result, Tensor) or self.reads or not self._program.holds(result):
                    self._follow(name, func, (*args, *kwargs.values()), result)
                if isinstance(result, (tuple, list)) and len(result) == 1 and isinstance(result[0], Tensor) and args:
                    self._parted(args[0], result[0])
                return result
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
        finally:
            self._steps.resume()

    def _watching(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a function of Python code with this mode on."""
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            return function(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _uncertain(self, arguments: Any) -> list[int | float]:
        """Return the numbers among the arguments that may follow from what was read."""
        plain = [number for number in self.numbers if not is_tagged(number)]
        if not any(map(self._program.holds, tensors_in(arguments))):
            plain += truths_in(arguments)
        caller = _caller() if plain else None
        if caller is None or caller.f_code.co_filename.startswith(_LAYERS):  # attributes of torch's own layers
            return []
        return unsettled(plain, caller)

    def _follow(self, name: str, func: Any, arguments: Any, result: Any) -> None:
        """Note what Python gets to see of the arguments, and a tensor that is made of numbers which were read."""
        results = list(map(_unwrapped, tensors_in(result)))
        if not results and result is not None and not _describes(name):
            for tensor in filter(self._program.holds, tensors_in(arguments)):
                if isinstance(tensor, FakeTensor) and not isinstance(result, str):
                    raise DataDependentOutputException(func)  # there are no numbers to be read: record with data
                self._program.read(tensor)
        listed = [t for item in arguments if isinstance(item, (list, tuple)) for t in tensors_in(item)]
        inner = [t for t in listed if self._program.holds(t)]
        hidden = self.uncertain or not all(map(_is_plain, arguments)) or isinstance(func, OpOverload)
        for tensor in results:
            if (inner or self.reads and hidden) and not self._program.holds(tensor):
                for part in inner:
                    self._program.read(part)
                self._program.adopt(tensor)

    def _tag(self, tensor: Tensor, sizes: torch.Size) -> Shape:
        value = self._value_of(tensor)
        if value is None:
            return Shape(sizes)
        return Shape(Size(n, ShapeOf(value, d)) for d, n in enumerate(sizes))

    def _counted(self, tensor: Tensor, length: int) -> None:
        value = self._value_of(tensor)
        if value is not None:
            expr = Apply("==", ShapeOf(value, 0), length)
            self.guards.setdefault(expr, Guard(expr, True, user_site("len").place))

    def _parted(self, tensor: Any, part: Tensor) -> None:
        """Note that a tensor is divided into one part, which a loop runs over once: a larger one may have more."""
        value = self._value_of(tensor) if isinstance(tensor, Tensor) else None
        if value is not None and part.numel() == tensor.numel():
            for dim, size in enumerate(tensor.size()):
                expr = Apply(">", ShapeOf(value, dim), int(size))
                self.guards.setdefault(expr, Guard(expr, False, "" if self.site is None else self.site.place))

    def _leave(self, numbers: Iterable[int | float]) -> None:
        """Note numbers that torch took and that no op was given: a slice that covers a whole tensor is not an op."""
        for number in numbers:
            if is_tagged(number):
                expr = Apply("for", expression(number), 0)
                place = "" if self.site is None else self.site.place
                self.guards.setdefault(expr, Guard(expr, True, place, decides=False))

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

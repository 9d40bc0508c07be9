"""The origin of each number among the arguments of an op: shapes are tracked while a model is recorded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import CodeType, FrameType
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.overrides import TorchFunctionMode

from engine.flow.coverage import CoverageTracer
from engine.numbers.certainty import Certainty
from engine.numbers.coefficients import settable_values
from engine.numbers.covering import covering_slices
from engine.numbers.inlining import inlined
from engine.numbers.literals import reassigned_numbers, unfixed_numbers
from engine.numbers.lost_sizes import lost_sizes
from engine.numbers.replaced_functions import PASSED_THROUGH, Twins, check_followed, replaced_functions
from engine.numbers.sizes import (
    LOOKUPS,
    RECORDINGS,
    Shape,
    Size,
    booleans_in,
    expression,
    is_tagged,
    note_exact_values,
    numbers_in,
    take_reflected,
    untracked,
)
from engine.program.expressions import Apply, Expr, Guard, ShapeOf, describe, leaves
from engine.program.graph import Value
from engine.program.trees import items_of, tensors_in
from engine.source.reassigned import Reassigned
from engine.source.sites import ENGINE, LAYERS, Site, is_handler, user_site

__all__ = ["QUERY_PREFIXES", "METADATA_FUNCTIONS", "Provenance"]


class Program(Twins, Protocol):
    """The program that the running torch functions belong to."""

    def assign(self, tensor: Tensor, data: Tensor) -> None:
        """Perform ``tensor.data = data``, which is not an op."""

    def read(self, tensor: Tensor) -> None:
        """Note that Python code reads the numbers in a tensor."""

    def adopt(self, tensor: Tensor) -> None:
        """Note that a tensor is built from numbers that may depend on a read."""


class Decisions(Protocol):
    """Answers of tensors to code that decides by their numbers."""

    def has_size_of_data(self, value: Value) -> bool:
        """Whether a size of a value depends on the numbers in a tensor."""

    def answer(self, place: str, answer: Any) -> Any:
        """Return the answer given to code at a file and line, which may differ from the tensor's."""


# Functions of a tensor that return neither tensors nor its numbers; neither do those that start with ``is_``.
METADATA_FUNCTIONS = frozenset(
    """can_cast dense_dim dim dim_order element_size get_device ndimension nelement
    promote_types register_hook register_post_accumulate_grad_hook result_type sparse_dim storage_offset storage_type
    stride sym_numel sym_size sym_storage_offset sym_stride type __dir__ __hash__ __len__ _is_view""".split()
)
QUERY_PREFIXES = ("has_", "_has_")
"""Prefixes of functions that return a property of a tensor as a flag."""

_ADDRESSES = frozenset({"data_ptr"})
"""Functions that return the address of a tensor's memory: a different answer might be written to."""

_WRAPPERS = tuple(
    os.path.join(os.path.dirname(torch.__file__), *path)
    for path in (
        *(("_tensor.py",), ("functional.py",), ("overrides.py",), ("nn", "functional.py"), ("_jit_internal.py",)),
        *(("_ops.py",), ("__init__.py",)),
    )
)
_BETWEEN = frozenset((*_WRAPPERS, __file__, PASSED_THROUGH))
_NUMBERS = (bool, int, float, list, np.ndarray)
_PLAIN_ARGUMENTS = (
    *(type(None), bool, int, float, complex, str, slice, type(Ellipsis), torch.Generator),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def _is_metadata(name: str) -> bool:
    """Whether a function that returns no tensor reads no numbers of one, or the engine itself calls it."""
    if name.startswith(("is_", *QUERY_PREFIXES)) or name in METADATA_FUNCTIONS:
        return True
    return _caller().f_code.co_filename.startswith(ENGINE)


def _unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor that ops receive for a wrapper of vmap or another transform."""
    functions = torch._C._functorch
    while functions.is_functorch_wrapped_tensor(tensor):
        tensor = functions.get_unwrapped(tensor)
    return tensor


def _is_plain(argument: Any) -> bool:
    """Whether an argument contains no hidden numbers, as an array does."""
    if isinstance(argument, (list, tuple)):
        return all(map(_is_plain, argument))
    return isinstance(argument, (Tensor, *_PLAIN_ARGUMENTS))


def _passes_on(code: CodeType) -> bool:
    """Whether a function passes on its arguments: torch's own functions, and modes that other code enters."""
    return code.co_filename in _BETWEEN or is_handler(code)


def _caller() -> FrameType:
    """Return the frame that calls the running torch function, in the user's code or in one of torch's layers."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _passes_on(frame.f_code):
        frame = frame.f_back
    return frame


class Provenance(TorchFunctionMode):
    """Returns tracked shapes, and keeps the numbers and the source line of the running torch function.

    Comparisons of sizes are kept as guards, and so are other uses of a size that are not tracked.

    Args:
        value_of: returns the recorded value of a tensor, or None if the tensor is not part of the program.
        program: is notified of reads and writes that are not ops.
        coverage: traces the user's code; paused inside of torch.
        decisions: answers code that asks a tensor for numbers.
        reassigned: attributes and globals that code of the model assigns later.

    Attributes:
        numbers: numbers that the running function was called with and that no op has matched yet.
        uncertain: those of them that may differ in another call.
        site: place of the call.
        guards: comparisons of sizes.
        reads: whether Python has read the numbers in a tensor.
        certainty: of the numbers in calls.
        returns_more: whether the last run returned a size that no earlier run returned.
    """

    _SIZE_FUNCTIONS: ClassVar[frozenset[str]] = frozenset({"__get__", "__len__", "nelement", "numel", "size"})
    _CONSTRUCTORS: ClassVar[frozenset[str]] = frozenset({"as_tensor", "asarray", "new_tensor", "tensor"})

    def __init__(
        self,
        value_of: Callable[[Tensor], Value | None],
        program: Program,
        coverage: CoverageTracer,
        decisions: Decisions,
        reassigned: Reassigned,
    ) -> None:
        super().__init__()
        self._decisions, self._reassigned = decisions, reassigned
        self._coverage = coverage
        self._value_of, self._program = value_of, program
        self.numbers: list[int | float] = []
        self.uncertain: list[int | float] = []
        self.reads = self.returns_more = False
        self._returned: set[str] = set()
        self.site: Site | None = None
        self.guards: dict[Apply, Guard] = {}
        self.certainty = Certainty()

    def __enter__(self) -> Provenance:
        self._scope = ExitStack()
        self._scope.enter_context(replaced_functions(self._program))
        RECORDINGS.append(self)
        LOOKUPS.restart()
        self.reads = False
        self.certainty.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        RECORDINGS.pop()
        try:
            self._scope.close()
        finally:
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function; track the result if it is a shape."""
        kwargs = kwargs or {}
        self._coverage.pause()
        try:
            name = getattr(func, "__name__", "")
            check_followed(name, args, self._program.holds)
            if name == "__set__" and func.__self__ is Tensor.data:
                return self._program.assign(*args)
            inlined_function = inlined(func)
            if inlined_function is not None:
                return self._run_in_mode(inlined_function, args, kwargs)
            if name not in self._SIZE_FUNCTIONS:
                if name in self._CONSTRUCTORS:  # numbers that become entries of a tensor
                    note_exact_values(numbers_in((args, kwargs)))
                self._note_unmatched(self.numbers)
                self.numbers = numbers_in((args, kwargs))
                self.site = user_site(name, take_reflected(self.numbers))
                self.uncertain = self._uncertain(func, (args, kwargs)) + settable_values(self.numbers)
                self.certainty.note("" if self.site is None else self.site.spot, not self.uncertain)
                if self.uncertain and name in ("__getitem__", "__setitem__") and self._program.holds(args[0]):
                    args = self._with_slices(*args)
                result = func(*args, **kwargs)
                if not isinstance(result, Tensor) or self.reads or not self._program.holds(result):
                    self._note_reads(name, func, (*args, *kwargs.values()), result)
                if type(result) in _NUMBERS:
                    return self._answered(name, result, (args, kwargs))
                if isinstance(result, (tuple, list)) and len(result) == 1 and isinstance(result[0], Tensor) and args:
                    self._note_single_part(args[0], result[0], [*args[1:], *kwargs.values()])
                return result
            result = func(*args, **kwargs)
            if isinstance(result, torch.Size):
                return self._tag(args[0], result)
            if name in ("nelement", "numel"):
                return self._tag(args[0], args[0].size()).numel()
            if name == "__len__":  # a plain number is all that it may return
                return self._length(args[0], result)
            if name == "size":
                dim = args[1] if len(args) > 1 else kwargs["dim"]
                return self._tag(args[0], args[0].size())[dim]
            return result
        finally:
            self._coverage.resume()

    def _with_slices(self, tensor: Tensor, index: Any, *value: Any) -> tuple[Any, ...]:
        """Return arguments of an indexing, with an op for each slice that may cut something off in another call."""
        for dim in list(covering_slices(tensor, index, self.uncertain)):
            size = tensor.shape[dim]
            self.uncertain.append(size)
            tensor = tensor.narrow(dim, 0, size)
        return tensor, index, *value

    def _run_in_mode(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a Python function in this mode."""
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            return function(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _uncertain(self, function: Any, arguments: Any) -> list[int | float]:
        """Return the numbers among the arguments that neither the source nor a size determines."""
        numbers = [number for number in self.numbers if not is_tagged(number)]
        plain = numbers + booleans_in(arguments)
        caller = _caller() if plain else None
        if caller is None:
            return []
        if caller.f_code.co_filename.startswith(LAYERS):
            return reassigned_numbers(plain, caller, self._reassigned)
        file = caller.f_code.co_filename
        for size in lost_sizes([] if file.startswith(ENGINE) else numbers, caller, self._tag):
            self.note(Apply("==", expression(size), untracked(size)), True, f"{file}:{caller.f_lineno}")
        unfixed, frame = unfixed_numbers(plain, caller, self._reassigned, function), sys._getframe(2)
        while unfixed and frame is not caller and frame.f_back is not None:  # torch's own code passes numbers, too
            unfixed, frame = unfixed_numbers(unfixed, frame, self._reassigned), frame.f_back
        return unfixed

    def _note_reads(self, name: str, func: Any, arguments: Any, result: Any) -> None:
        """Note reads of the arguments, and tensors that are built from numbers that were read."""
        results = list(map(_unwrapped, tensors_in(result)))
        if not results and result is not None and not _is_metadata(name):
            for tensor in filter(self._program.holds, tensors_in(arguments)):
                if isinstance(tensor, FakeTensor) and not isinstance(result, str):
                    raise DataDependentOutputException(func)  # a fake tensor has no numbers: record with data
                self._program.read(tensor)
        listed = [t for item in arguments if isinstance(item, (list, tuple)) for t in tensors_in(item)]
        inner = [t for t in listed if self._program.holds(t)]
        hidden = self.uncertain or not all(map(_is_plain, arguments)) or isinstance(func, OpOverload)
        for tensor in results:
            if (inner or self.reads and hidden) and not self._program.holds(tensor):
                for part in inner:
                    self._program.read(part)
                self._program.adopt(tensor)

    def _answered(self, name: str, result: Any, arguments: Any) -> Any:
        """Return the answer for code that reads the numbers in a tensor, which differs if a decision is reversed."""
        tensors = [tensor for tensor in tensors_in(arguments) if self._program.holds(tensor)]
        if not tensors or any(isinstance(tensor, FakeTensor) for tensor in tensors) or name in _ADDRESSES:
            return result
        if name != "is_nonzero" and _is_metadata(name):
            return result
        place = "" if self.site is None else self.site.spot
        if len(tensors) == 1 and tensors[0].dtype is torch.bool and type(result) is int and result in (0, 1):
            return int(self._decisions.answer(place, bool(result)))
        return self._decisions.answer(place, result)

    def _tag(self, tensor: Tensor, sizes: torch.Size) -> Shape:
        value = self._value_of(tensor)
        if value is None:
            return Shape(sizes)
        return Shape(Size(n, ShapeOf(value, d)) for d, n in enumerate(sizes))

    def _length(self, tensor: Tensor, length: int) -> int:
        """Return the answer for code that asks for a tensor's length."""
        value = self._value_of(tensor)
        if value is not None:
            site = user_site("len")
            if self._decisions.has_size_of_data(value):
                return int(self._decisions.answer(site.spot, length))
            self.note(Apply("==", ShapeOf(value, 0), length), True, site.place)
        return length

    def note(self, expr: Apply, outcome: bool, place: str) -> None:
        """Note the outcome of a comparison.

        Args:
            expr: the comparison.
            outcome: its outcome in this run.
            place: file and line.
        """
        self.guards.setdefault(expr, Guard(expr, outcome, place))

    def decide(self, expr: Apply, outcome: bool, place: str) -> bool:
        """Note a comparison, and return the outcome given to the code, which differs if a decision on data is reversed.

        Args:
            expr, outcome, place: as above.
        """
        self.note(expr, outcome, place)
        sizes = (leaf for leaf in leaves(expr) if isinstance(leaf, ShapeOf))
        if any(self._decisions.has_size_of_data(leaf.value) for leaf in sizes):
            return bool(self._decisions.answer(place, outcome))
        return outcome

    def _note_single_part(self, tensor: Any, part: Tensor, numbers: Iterable[Any]) -> None:
        """Note that a tensor is split into a single part: a larger tensor may have more, and loops run longer.

        It is not known here which of the numbers is the length of a part.
        """
        value = self._value_of(tensor) if isinstance(tensor, Tensor) else None
        if value is not None and part.numel() == tensor.numel():
            for dim, size in enumerate(tensor.size()):
                place = "" if self.site is None else self.site.place
                for most in {int(size), *(int(n) for n in numbers if isinstance(n, int) and n > size)}:
                    self.note(Apply(">", ShapeOf(value, dim), most), False, place)

    def _note_unmatched(self, numbers: Iterable[int | float]) -> None:
        """Note numbers that no op received: a slice that covers a whole tensor is not an op."""
        for number in numbers:
            if is_tagged(number):
                expr = Apply("for", expression(number), 0)
                place = "" if self.site is None else self.site.place
                self.guards.setdefault(expr, Guard(expr, True, place, decides=False))

    def leave(self, result: Any) -> Any:
        """Note the sizes in the result of a run, which may count channels, and return the result."""
        place, waiting, sizes = "" if self.site is None else self.site.place, [result], set[str]()
        while waiting:
            item = waiting.pop()
            if is_tagged(item):
                expr = Apply("==", expression(item), untracked(item))
                self.guards.setdefault(expr, Guard(expr, True, place))
                sizes.add(describe(expr.left))
            elif not isinstance(item, Tensor):
                waiting.extend(items_of(item))
        self.returns_more = not sizes <= self._returned
        self._returned |= sizes
        return result

    def take_guards(self) -> list[Guard]:
        """Return the guards of the run, and clear them."""
        self._note_unmatched(self.numbers)
        guards = list(self.guards.values())
        self.guards.clear()
        self.numbers = []
        return guards

    @property
    def reached_new_code(self) -> bool:
        """Whether the last run showed an uncertainty that no earlier run showed."""
        return self.returns_more or self.certainty.is_lost

    @property
    def tagged(self) -> bool:
        """Whether any number of the running function comes from a shape or an attribute."""
        return any(map(is_tagged, self.numbers))

    def match(self, number: int | float) -> Expr:
        """Return the expression of a number that reached the op, and drop it and the numbers before it."""
        for position, candidate in enumerate(self.numbers):
            if candidate == number:
                self._note_unmatched(self.numbers[:position])
                del self.numbers[: position + 1]
                return expression(candidate)
        return number

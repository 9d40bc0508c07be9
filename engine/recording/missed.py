"""A part of a function that no recording reached: what it reads, calls, gives back and puts in place of others."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

from torch import nn

from engine.program.graph import Value
from engine.source.alternatives import certainly
from engine.source.branches import Part
from engine.source.deciding import Decider
from engine.source.entrywise import Effect, Functions, effects, names_read
from engine.source.stepping import Course

__all__ = ["Missed", "code_of", "methods_of"]


def code_of(function: Any) -> CodeType | None:
    """Return the code of a function behind its decorators, or None."""
    return getattr(inspect.unwrap(function), "__code__", None)


@functools.cache
def methods_of(kind: Any) -> tuple[tuple[str, frozenset[str]], ...]:
    """Return the methods of a class that is not torch's, with the attributes that they name."""
    readers: dict[str, frozenset[str]] = {}
    for base in reversed(kind.__mro__):
        for name, function in vars(base).items():
            code = code_of(function) if callable(function) else None
            if base.__module__.startswith("torch.") or name == "forward":
                readers.pop(name, None)
            elif code is not None and code.co_argcount and not hasattr(nn.Module, name):
                readers[name] = frozenset(code.co_names)
    return tuple(readers.items())


class Missed:
    """A part of a function that did not run for one module."""

    def __init__(
        self,
        part: Part,
        course: Course,
        modules: Mapping[str, nn.Module],
        names: Mapping[int, str],
        values: Sequence[Value],
        functions: Functions,
    ) -> None:
        self._values, self._functions = values, functions
        self.part, self._course, self._modules, self._names = part, course, modules, names
        self.code, self.owner = course.function.code, course.owner
        self.where = f"{self.code.co_filename}:{part.line}"
        self.first = self.code.co_varnames[0] if course.is_method else None
        self._seen = course.seen.get(part, {})

    def decided_by(self, places: Collection[str]) -> bool:
        """Whether a size decides, of which other ones were tried."""
        lines = {n for t in self._tests() for n in range(t.lineno, (t.end_lineno or t.lineno) + 1)}
        return any(f"{self.code.co_filename}:{n}" in places for n in lines)

    def _tests(self) -> list[ast.expr]:
        test = self.part.test
        if isinstance(test, ast.expr):
            return [test]
        return [] if test is None else [n.test for n in ast.walk(test) if isinstance(n, (ast.If, ast.IfExp))]

    def fixed(
        self, free: Collection[str], settled: Callable[[str], bool], kept: Callable[[str], bool] | None = None
    ) -> bool:
        """Whether the code that is there decides that it does not run."""
        function, own = self._course.function, self._course.ran
        ran = functools.partial(function.ran, ran=own)
        decider = Decider(function.tree, self._course.space, free, settled, ran, self.first, kept)
        return self.part.test is not None and decider.fixed(self.part.test)

    def arguments(self) -> set[str]:
        """Return the names of the function's arguments."""
        return set(self.code.co_varnames[: self.code.co_argcount + self.code.co_kwonlyargcount])

    def impossible(self) -> bool:
        """Whether it uses what this module does not have: an attribute that is None, or missing."""
        owner = self._modules[self.owner]
        return self.first is not None and any(getattr(owner, n, None) is None for n in _used(self.part, self.first))

    def sized(self) -> set[str]:
        """Return the variables that it gives sizes that stand in the code, which do not follow."""
        result: set[str] = set()
        for call in self.part.syntax:
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") in self._functions.sizing:
                if any(_is_number(arg) for arg in call.args):
                    result |= set(names_read(call))
        return result

    def replacing(self) -> set[str]:
        """Return the variables that it gives back, keeps, or puts in place of others, as they are."""
        results = [n.value for n in self.part.syntax if isinstance(n, (ast.Return, ast.Assign)) and n.value is not None]
        if isinstance(self.part.nodes[0], ast.expr):
            results.append(self.part.nodes[0])
        inside = (ast.Tuple, ast.List, ast.Dict)
        parts = [p for r in results for p in (ast.iter_child_nodes(r) if isinstance(r, inside) else [r])]
        kept = [n.args for n in self.part.syntax if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "append"]
        return {n.id for n in (*parts, *(a for args in kept for a in args)) if isinstance(n, ast.Name)}

    def effects(self) -> Mapping[str, Effect]:
        """Return what it does to what each variable holds."""
        own = set(self.code.co_varnames)
        seen = self._seen.items()
        foreign = [name for name, held in seen if name in own and not {k for k, _ in held} & {"values", "module"}]
        return _effects(self.part, self._functions, frozenset(foreign))

    def tensors(self, stored: Mapping[str, Value]) -> dict[str, list[Value]]:
        """Return what its variables, and the attributes that it reads, may hold of the program when it begins."""
        result: dict[str, list[Value]] = {}
        for name in self.part.names:
            result[name] = self.values(name, stored)
        for node in self.part.syntax:
            held = self._attribute(node) if isinstance(node, ast.Attribute) else None
            own = self._parameter(held) if isinstance(held, nn.Parameter) else None
            if own is not None and own in stored:
                result[f"{own} "] = [stored[own]]
        return {name: values for name, values in result.items() if values}

    def values(self, name: str, stored: Mapping[str, Value]) -> list[Value]:
        """Return what a variable may hold of the program."""
        held = self._seen.get(name, ())
        kept = [v for kind, values in held if kind == "values" for v in values]
        kept = [v for v in kept if v.index < len(self._values) and self._values[v.index] is v]
        return kept + [stored[n] for kind, n in held if kind == "stored" and n in stored]

    def selected(self, channels: Callable[[Value], int | None]) -> set[str]:
        """Return the variables of which it only takes entries by an index that does not lie along their channels.

        Args:
            channels: tells along which dimension a value's channels lie; None where that is not known.
        """
        own: set[int] = set()
        for node in self.part.syntax:
            for tensor, dims in self._indexed(node):
                values = self.values(tensor.id, {}) if isinstance(tensor, ast.Name) else []
                if all(self._is_beside(value.ndim, dims, channels(value)) for value in values):
                    own.add(id(tensor))
        loads = [n for n in self.part.syntax if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
        return {n.id for n in loads} - {n.id for n in loads if id(n) not in own}

    def _is_beside(self, ndim: int, dims: Sequence[int], channel: int | None) -> bool:
        """Whether dimensions are none of the channels'; the first of several holds samples."""
        if channel is None:
            return ndim > 1 and set(dims) == {0}
        return channel not in {dim % ndim for dim in dims if -ndim <= dim < ndim} and max(map(abs, dims)) <= ndim

    def _indexed(self, node: ast.AST) -> Iterator[tuple[ast.expr, list[int]]]:
        """Yield what is indexed, with the dimensions along which the index lies."""
        if isinstance(node, ast.Subscript):
            dims = self._subscripted(node.slice)
            yield from [] if dims is None else [(node.value, dims)]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in self._functions.selecting:
            owner = node.func.value  # type: ignore[attr-defined]
            args = node.args if isinstance(owner, ast.Name) and owner.id == "torch" else [owner, *node.args]
            named = {k.arg: k.value for k in node.keywords}
            spreads = node.func.attr in self._functions.spreading  # type: ignore[attr-defined]
            dim = named.get("dim", args[2 if spreads and len(args) > 2 else 1] if len(args) > 1 else None)
            if isinstance(dim, ast.Constant) and type(dim.value) is int and not spreads:
                yield args[0], [dim.value]
            elif spreads and len(args) > 1 and _ends_with_one(args[1]):
                yield args[0], list(range(max((v.ndim for v in self._held_by(args[0])), default=1) - 1))

    def _held_by(self, node: ast.expr) -> list[Value]:
        return self.values(node.id, {}) if isinstance(node, ast.Name) else []

    def _subscripted(self, index: ast.expr) -> list[int] | None:
        """Return the dimensions along which an index lies that is no ellipsis; None where that is not known."""
        dims: list[int] = []
        for place, part in enumerate(index.elts if isinstance(index, ast.Tuple) else [index]):
            if isinstance(part, ast.Slice) or (isinstance(part, ast.Constant) and type(part.value) is int):
                dims += [] if isinstance(part, ast.Slice) and part.lower is part.upper is part.step is None else [place]
                continue
            ndim = self._dimensions(part)
            if ndim is None or (ndim > 1 and place):
                return None
            dims += range(place, place + max(ndim, 1))
        return dims or None

    def _dimensions(self, index: ast.expr) -> int | None:
        """Return how many dimensions an index has: as recorded, or as the condition says (``keep.ndim == 2``)."""
        if isinstance(index, ast.Constant):
            return None
        for test in (n for t in self._tests() for n in ast.walk(t) if isinstance(n, ast.Compare)):
            if ast.unparse(test.left) == f"{ast.unparse(index)}.ndim" and isinstance(test.ops[0], ast.Eq):
                number = test.comparators[0]
                return number.value if isinstance(number, ast.Constant) and type(number.value) is int else None
        held = [value.ndim for name in names_read(index) for value in self.values(name, {})]
        return max(held, default=None) if all(self.values(name, {}) for name in names_read(index)) else None

    def passed(self) -> set[str]:
        """Return the variables that go only to modules which ran, to hooks, methods, and functions of other files."""
        own: set[int] = set()
        for call in (n for n in self.part.syntax if isinstance(n, ast.Call)):
            arguments = [
                a.value if isinstance(a, ast.Starred) else a for a in (*call.args, *(k.value for k in call.keywords))
            ]
            elsewhere = self._is_from_elsewhere(call.func) or any(map(self._is_module, (call.func, *arguments)))
            own.update(map(id, arguments if elsewhere else ()))
            if isinstance(call.func, ast.Attribute) and call.func.attr in ("register_hook", "retain_grad"):
                own.add(id(call.func.value))
        loads = [n for n in self.part.syntax if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
        return {n.id for n in loads} - {n.id for n in loads if id(n) not in own}

    def _is_from_elsewhere(self, node: ast.expr) -> bool:
        """Whether a function is defined in another file, or is a method of the module."""
        if not isinstance(node, ast.Name):
            return inspect.ismethod(self._attribute(node))
        held = self._course.space.get(node.id)
        code = None if held is None else code_of(held)
        return held is not None and (code is None or code.co_filename != self.code.co_filename)

    def _is_module(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Subscript):
            return self._is_module(node.value)
        if isinstance(node, ast.Name):
            return node.id != self.first and any(kind == "module" for kind, _ in self._seen.get(node.id, ()))
        return isinstance(self._attribute(node), nn.Module)

    def calls(self) -> Iterator[tuple[str, set[str]]]:
        """Yield the modules that it calls, with the variables that they get."""
        for call in (n for n in self.part.syntax if isinstance(n, ast.Call)):
            names = {n for a in (*call.args, *(k.value for k in call.keywords)) for n in names_read(a)}
            held = (
                [n for kind, n in self._seen.get(call.func.id, ()) if kind == "module"]
                if isinstance(call.func, ast.Name)
                else []
            )
            module = self._attribute(call.func)
            if isinstance(module, nn.Module) and id(module) in self._names:
                held.append(self._names[id(module)])
            yield from ((name, names) for name in held)

    def users(self) -> set[str]:
        """Return the modules that are called with what it gives."""
        user = self.part.user
        held = self._attribute(user.func) if isinstance(user, ast.Call) else None
        return {self._names[id(held)]} if isinstance(held, nn.Module) and id(held) in self._names else set()

    def _parameter(self, tensor: nn.Parameter) -> str | None:
        named = (
            (f"{n}.{key}".lstrip("."), own) for n, m in self._modules.items() for key, own in m._parameters.items()
        )
        return next((name for name, own in named if own is tensor), None)

    def called(self) -> set[str]:
        """Return the names of the modules that it mentions, in methods of its own as well."""
        result: set[str] = set()
        for node in self.part.syntax:
            if isinstance(node, ast.Name):
                result |= {held for kind, held in self._seen.get(node.id, ()) if kind == "module"}
            elif isinstance(node, ast.Attribute):
                held = self._attribute(node)
                if isinstance(held, nn.Module) and id(held) in self._names:
                    result.add(self._names[id(held)])
                elif isinstance(node.value, ast.Name) and node.value.id == self.first and inspect.ismethod(held):
                    result |= self._inside(node.attr)
        return result - {self.owner, ""}

    def _inside(self, method: str) -> set[str]:
        """Return the modules that a method of the module mentions."""
        owner = self._modules[self.owner]
        reading, names, waiting = dict(methods_of(type(owner))), set[str](), [method]  # type: ignore[arg-type]
        while waiting:
            own = reading.pop(waiting.pop(), frozenset())
            waiting += own & reading.keys()
            names |= own
        return {self._names[id(m)] for n, m in owner._modules.items() if n in names and id(m) in self._names}

    def _attribute(self, node: ast.expr) -> Any:
        """Return what an attribute of the module, or of a part of it, is."""
        if isinstance(node, ast.Name):
            return self._modules[self.owner] if node.id == self.first else None
        if isinstance(node, ast.Attribute):
            owner = self._attribute(node.value)
            return getattr(owner, node.attr, None) if isinstance(owner, nn.Module) else None
        return None


def _is_number(size: ast.expr) -> bool:
    """Whether a size, or one of several, holds a number greater than one, and follows no attribute."""
    if isinstance(size, (ast.Tuple, ast.List)):
        return any(map(_is_number, size.elts))
    inner = list(ast.walk(size))
    numbers = (n.value for n in inner if isinstance(n, ast.Constant))
    return any(type(n) is int and n > 1 for n in numbers) and not any(isinstance(n, ast.Attribute) for n in inner)


def _ends_with_one(index: ast.expr) -> bool:
    """Whether the last dimension of an index is one, which stands for all entries (``places[..., None]``)."""
    last = index.slice.elts[-1:] if isinstance(index, ast.Subscript) and isinstance(index.slice, ast.Tuple) else []
    return any(isinstance(part, ast.Constant) and part.value is None for part in last)


@functools.cache
def _used(part: Part, first: str) -> tuple[str, ...]:
    """Return the attributes of the module that are certainly called, indexed or looked into."""
    names: list[str] = []
    for node in certainly(part.nodes):
        used = node.func if isinstance(node, ast.Call) else getattr(node, "value", None)
        if isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)) and isinstance(used, ast.Attribute):
            if isinstance(used.value, ast.Name) and used.value.id == first:
                names.append(used.attr)
    return tuple(names)


@functools.cache
def _effects(part: Part, functions: Functions, foreign: frozenset[str]) -> Mapping[str, Effect]:
    return effects(part.nodes, functions, foreign)

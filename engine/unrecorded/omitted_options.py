"""Arguments that the example omits, and that code uses without a condition that a recording could reverse.

In ``sum(t for t in (h, shift) if t is not None)``, ``torch.cat([h, *prompts])`` and ``F.linear(h, weight, bias)`` no
branch depends on the argument, and the recording does not show how it would affect the other values. A function that
combines such an argument with others, iterates over it, calls it, or selects by it, keeps everything that it computes.
The same holds for containers in attributes that code fills later.
"""

from __future__ import annotations

import ast
import builtins
import collections
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

from torch import Tensor

from engine.flow.mutability import Mutability
from engine.observations.assumptions import Assumptions
from engine.observations.dataflow import Dataflow
from engine.observations.recorded_runs import RecordedRuns
from engine.observations.surroundings import use_values_around_code
from engine.program.graph import Node
from engine.source.bindings import Binding, bindings, path_of
from engine.source.function_text import syntax_of
from engine.source.syntax import nodes_of, parents_of, span_of

__all__ = ["use_values_beside_omitted_options"]

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_DISPLAYS = (ast.List, ast.Tuple, ast.Set)
_HOLDERS = (
    ast.BoolOp, ast.Dict, ast.GeneratorExp, ast.ListComp, ast.NamedExpr, ast.SetComp, ast.Slice, ast.Starred,
    ast.keyword,
)  # fmt: skip
_TRANSPARENT = frozenset("chain copy deepcopy dict enumerate iter list reversed set sorted tuple zip".split())
_TELLING = frozenset(
    "all any bool callable float getattr hasattr hash id int isinstance len print range repr setattr str super "
    "type".split()
)
"""Builtins that describe an argument, or pass it on."""

_METADATA = frozenset("device dim dtype ndim shape size".split())

_BINDING = frozenset({"partial", "partialmethod"})


def use_values_beside_omitted_options(
    runs: RecordedRuns,
    omitted: Callable[[CodeType], Collection[str]],
    declared: Callable[[str], bool],
    mutability: Mutability,
    dataflow: Dataflow,
    assumptions: Assumptions,
) -> None:
    """Count as used what is computed by functions that combine omitted arguments with others, or choose by them.

    Args:
        runs: the recordings.
        omitted: returns the arguments of a function that the example omits, or leaves empty.
        declared: returns whether the user declares that a method's argument keeps its value, by its name in the model.
        mutability: of the model's attributes.
        dataflow: of the recorded ops.
        assumptions: is extended.
    """
    ops: dict[tuple[CodeType, Any], list[Node]] = {}
    for node in dataflow.nodes:
        if node.site is not None and node.site.end is not None:
            ops.setdefault((node.site.code, node.site.span), []).append(node)
    for code in runs.coverage.called:
        tree = syntax_of(code)
        owners = {f"{owner}." if owner else "" for other, owner in runs.coverage.functions if other is code}
        names = {*omitted(code)} - {*runs.coverage.filled.get(code, ())}
        names = {name for name in names if not owners or any(not declared(owner + name) for owner in owners)}
        names -= (
            _items_recorded(tree, names, [span for other, span in ops if other is code]) if tree is not None else set()
        )
        names |= _containers_filled_later(code, runs.coverage.called, mutability) if tree is not None else set()
        if not names or not isinstance(tree, _Function):
            continue

        uses = _Uses(tree, names, functools.partial(runs.coverage.ran, code), functools.partial(_ops_of, ops, code))
        if (place := next(uses.beside_others(), None)) is not None:
            what = ast.unparse(place)
            reason = f"could be joined or chosen in {code.co_name} by what the example leaves out or empty: {what}"
            use_values_around_code(code, runs.modules, dataflow, assumptions, reason, runs.coverage.called)
        for node in uses.ops_without():
            reason = f"is computed without an argument that other calls may pass, at {node.site}"
            replaced = [value for value in node.inputs if value.stored]
            assumptions.use([*node.outputs, *replaced], reason)
            assumptions.vary([*node.outputs, *replaced])


def _ops_of(ops: Mapping[Any, Sequence[Node]], code: CodeType, call: ast.expr) -> Sequence[Node]:
    return ops.get((code, span_of(call)), ())


def _items_recorded(tree: ast.AST, names: Collection[str], spans: Collection[Any]) -> set[str]:
    """Return the ``*args`` over whose items a loop ran ops in a recording of more of them."""
    rest = getattr(getattr(tree, "args", None), "vararg", None)
    loops = [n for n in nodes_of(tree, ast.For) if isinstance(n.iter, ast.Name) and rest and n.iter.id == rest.arg]
    ran = any(span_of(loop)[0] <= first and last <= span_of(loop)[1] for loop in loops for first, last in spans)
    return {rest.arg} & {*names} if rest and ran else set()


def _containers_filled_later(code: CodeType, called: Collection[CodeType], mutability: Mutability) -> set[str]:
    """Return the attributes of a method's module, as paths, that hold tensors or nothing, and may be filled later.

    Containers that the call itself fills are recorded: they are outputs of that call, and found by the next.

    Args:
        code: of the method.
        called: code of the functions that ran.
        mutability: of the model's attributes.
    """
    owners = mutability.owners_of(code)
    if not owners or not code.co_argcount:
        return set()
    names = {
        name for owner in owners for name, value in vars(owner).items() if name in code.co_names and _may_grow(value)
    }
    trees = (syntax_of(c) for c in called if not names.isdisjoint(c.co_names)) if names else ()
    filled = {path.partition(".")[2] for tree in trees if tree is not None for path in bindings(tree)}
    changed = (n for n in names - filled if not all(mutability.never_changed(owner, n) for owner in owners))
    return {f"{code.co_varnames[0]}.{name}" for name in changed}


def _may_grow(value: Any) -> bool:
    """Whether a value is None, an empty container, one with tensors, or a dictionary of plain values."""
    if value is None:
        return True
    if type(value) not in (list, dict, set, collections.deque):
        return False
    items = list(value.values() if isinstance(value, dict) else value)
    is_plain = all(isinstance(item, (Tensor, int, float, str, type(None))) for item in items)
    has_tensors = any(isinstance(item, Tensor) for item in items)
    return is_plain and (has_tensors or not items or isinstance(value, dict))


def _is_computed(value: ast.expr) -> bool:
    """Whether an expression is a variable, or a tensor returned by a function or an operator.

    Example:
        >>> texts = "h", "zeros(2)", "(h, h)", "range(2)", "Shift()"
        >>> [_is_computed(ast.parse(text, mode="eval").body) for text in texts]
        [True, True, True, False, False]
    """
    match value:
        case ast.Name() | ast.BinOp():
            return True
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return bool(items) and all(map(_is_computed, items))
        case ast.Call(func=function):
            name = _name_of(function)
            return name not in vars(builtins) and name not in _TRANSPARENT | _BINDING and not name[:1].isupper()
    return False


class _Uses:
    """The uses of arguments that the example omits in a function.

    Args:
        tree: syntax of the function.
        names: the arguments.
        ran: returns whether a syntax node ran.
        ops: returns the recorded ops of a call.

    Example:
        >>> text = "def f(h, c=None, *more, **options):\\n  x, y = c if c is not None else h, options.get('y', 1)\\n"
        >>> tree = ast.parse(text + "  return sum((h, c)), g(c, *more), h[y], y(h), [h, *more]").body[0]
        >>> uses = _Uses(tree, ["c", "more", "options"], lambda node: True, lambda call: ())
        >>> [ast.unparse(place) for place in uses.beside_others()]
        ['h[y]', 'y(h)', 'sum((h, c))']
    """

    def __init__(
        self,
        tree: _Function,
        names: Collection[str],
        ran: Callable[[ast.AST], bool],
        ops: Callable[[ast.expr], Sequence[Node]],
    ) -> None:
        self._tree, self._own, self._ran, self._ops = tree, frozenset(names), ran, ops
        self._parents = parents_of(tree)
        self._names = {name for name in names if not self._is_replaced(name)}
        while more := set(self._further_names()) - self._names:
            self._names |= more

    def _further_names(self) -> Iterator[str]:
        """Yield the variables that may hold such an argument, an item of it, or a container with it."""
        for name, own in bindings(self._tree).items():
            if name.isidentifier() and name not in self._names:
                if any(self._ran(b.node) and self._carries(b.value) for b in own if not self._is_item_of_attribute(b)):
                    yield name

    def _is_item_of_attribute(self, binding: Binding) -> bool:
        """Whether a loop iterates over a container in an attribute."""
        paths = {path_of(node) for node in nodes_of(binding.value, ast.Attribute)}
        is_direct = isinstance(binding.value, (ast.Attribute, ast.Call))
        return is_direct and isinstance(binding.node, (ast.For, ast.comprehension)) and not paths.isdisjoint(self._own)

    def _is_replaced(self, name: str) -> bool:
        """Whether the function assigns a tensor to an argument that is None."""
        own = bindings(self._tree).get(name, ())
        return any(b.replaces and self._ran(b.node) and b.value is not None and _is_computed(b.value) for b in own)

    def _carries(self, value: ast.AST | None) -> bool:
        carries = self._carries
        match value:
            case ast.Name(id=name):
                return name in self._names
            case ast.BoolOp(values=[*_, last]) if _is_computed(last) and not carries(last):
                return False  # a tensor stands in for the argument, which other analyses follow
            case ast.IfExp(body=body, orelse=other) if any(_is_computed(p) and not carries(p) for p in (body, other)):
                return False
            case ast.BoolOp(values=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                return any(map(carries, parts))
            case ast.IfExp(body=body, orelse=other):
                return carries(body) or carries(other)
            case ast.Dict(values=parts):
                return any(map(carries, parts))
            case ast.Attribute() if path_of(value) in self._own:
                return True
            case ast.Attribute(attr=attribute) if attribute in _METADATA:
                return False
            case ast.Starred(value=inner) | ast.Subscript(value=inner) | ast.Attribute(value=inner):
                return carries(inner)
            case ast.BinOp(left=left, right=right, op=ast.Add() | ast.BitOr()):
                joins = isinstance(value.op, ast.BitOr) or any(
                    isinstance(p, (*_DISPLAYS, ast.Dict)) for p in (left, right)
                )
                return joins and (carries(left) or carries(right))
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return any(carries(generator.iter) for generator in value.generators)
            case ast.Lambda(body=body):
                return any(name.id in self._names for name in nodes_of(body, ast.Name))
            case ast.Call(func=ast.Attribute(value=inner)) if carries(inner):
                return True
            case ast.Call(func=function, args=args, keywords=keywords):
                name = _name_of(function)
                is_made_of = name in vars(builtins) or name in _TRANSPARENT | _BINDING or name[:1].isupper()
                return is_made_of and any(map(carries, (*args, *(k.value for k in keywords))))
        return False

    def beside_others(self) -> Iterator[ast.AST]:
        """Yield the expressions that combine such an argument with other values, call it, or select by it."""
        for name in nodes_of(self._tree, ast.Name, ast.Attribute):
            path = path_of(name)
            if path in self._names and isinstance(name.ctx, ast.Load) and self._ran(name):
                place = self._chosen_at(name, path)
                if place is not None and self._ran(place):
                    yield place

    def _chosen_at(self, name: ast.expr, path: str) -> ast.AST | None:
        """Return the expression that chooses by a variable, or combines its value with others."""
        part: ast.AST = name
        is_beside_others, may_hold_others = False, path not in self._own
        while (whole := self._parents.get(part)) is not None:
            is_beside_others |= self._puts_beside_others(whole)
            if self._chooses(whole, part, path, is_beside_others, may_hold_others):
                return self._parents.get(whole) if isinstance(whole, (ast.keyword, ast.comprehension)) else whole
            if not self._hands_on(whole, part):
                return None
            may_hold_others |= isinstance(part, ast.Attribute) and part.attr in ("values", "items")
            part = whole
        return None

    def _puts_beside_others(self, whole: ast.AST) -> bool:
        if isinstance(whole, ast.BinOp):
            return isinstance(whole.op, ast.Add) and any(isinstance(s, _DISPLAYS) for s in (whole.left, whole.right))
        return isinstance(whole, _DISPLAYS) and not isinstance(self._parents.get(whole), ast.Subscript)

    def _chooses(self, whole: ast.AST, part: ast.AST, path: str, is_beside_others: bool, may_hold_others: bool) -> bool:
        match whole:
            case ast.keyword(arg=None):
                return "." in path  # options that code sets later
            case ast.Subscript(slice=index, ctx=ast.Load()) if part is index:
                return not self._ops(whole)
            case ast.comprehension(iter=iterated) | ast.For(iter=iterated):
                return part is iterated and is_beside_others
            case ast.Call(func=function) if part is function:
                return not isinstance(part, ast.Attribute)
            case ast.Call(func=function) if (called := _name_of(function)) not in _TELLING | _TRANSPARENT:
                selects = isinstance(function, ast.Name) and called in vars(builtins) or called == "reduce"
                return selects or bool(self._ops(whole)) and (is_beside_others or may_hold_others)
        return False

    def _hands_on(self, whole: ast.AST, part: ast.AST) -> bool:
        """Whether an expression has the value of one of its parts, or of an item of that part."""
        match whole:
            case ast.Attribute(attr=attribute):
                return attribute not in _METADATA
            case ast.IfExp(test=test, body=body, orelse=other):
                return part is not test and not any(_is_computed(p) and not self._carries(p) for p in (body, other))
            case ast.BinOp(op=operator):
                return isinstance(operator, ast.BitOr) or self._puts_beside_others(whole)
            case ast.Subscript(slice=index):
                return part is not index
            case ast.Call(func=function):
                return part is function or _name_of(function) in _TRANSPARENT
        return isinstance(whole, (*_DISPLAYS, *_HOLDERS))

    def ops_without(self) -> Iterator[Node]:
        """Yield the recorded ops that receive such an argument, and that have no tensor in its place."""
        for call in nodes_of(self._tree, ast.Call):
            parts = [*call.args, *(keyword.value for keyword in call.keywords)]
            carried = list(filter(self._carries, parts))
            replaced = any(map(_has_attribute_as_default, carried))
            yield from (node for node in self._ops(call) if carried and (replaced or _lacks_tensor(node)))


def _name_of(function: ast.expr) -> str:
    return str(getattr(function, "attr", getattr(function, "id", "")))


def _has_attribute_as_default(part: ast.expr) -> bool:
    """Whether an expression is a lookup with an attribute as its default: ``params.get("bias", self.bias)``."""
    match part:
        case ast.Call(func=ast.Attribute(attr="get" | "pop"), args=[_, ast.Attribute()]):
            return True
    return False


def _lacks_tensor(node: Node) -> bool:
    """Whether an op lacks an optional tensor that may have entries for channels, unlike a mask of positions."""
    optional = _optional_tensors(node.target)
    return any(node.args.get(name) is None for name in optional)


@functools.cache
def _optional_tensors(overload: Any) -> frozenset[str]:
    """Return the arguments of an overload that may be a tensor or None, without masks."""
    schema = getattr(overload, "_schema", None)
    arguments = () if schema is None else schema.arguments
    return frozenset(a.name for a in arguments if str(a.type) == "Optional[Tensor]" and not a.name.endswith("mask"))

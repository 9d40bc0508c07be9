"""Items that code picks by a number that it computes from a settable value: an attribute, or an option.

A subscript is no branch, and settable values are only recorded at neighbouring numbers: in ``(h, h.flip(-1))[self.epoch
// 10 % 2]`` no recording may reach the second item.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from engine.flow.coverage import FunctionCoverage
from engine.flow.mutability import Mutability
from engine.flow.picked_containers import PICKING_METHODS, container_of, counted_variables, lengthening_values
from engine.limits import MOST_STEPS_TO_INDEX
from engine.observations.assumptions import Assumptions
from engine.observations.dataflow import Dataflow
from engine.observations.recorded_runs import RecordedRuns
from engine.observations.surroundings import may_pick_arguments, use_values_around_code
from engine.program.graph import Value
from engine.source.bindings import bindings, path_of
from engine.source.function_text import syntax_of
from engine.source.lookups import fields_by_name
from engine.source.syntax import nodes_of, span_of

__all__ = ["use_values_picked_by_numbers"]

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_CALLS_ON_FLAGS = frozenset(function.__name__ for function in (all, any, bool, int))
_SELECTING_BY_FUNCTIONS = frozenset(
    "accumulate dropwhile filter filterfalse groupby max min nlargest nsmallest reduce sort sorted takewhile".split()
)
_SELECTING_BY_NUMBERS = frozenset({"compress", "islice", "itemgetter"})
_EVEN = frozenset(
    f.__name__ for f in (abs, float, int, len, max, min, range, sum, zip, math.ceil, math.floor, math.prod)
)
"""Functions of sizes that grow in the same steps as these."""


def use_values_picked_by_numbers(
    runs: RecordedRuns,
    options: Callable[[CodeType], Collection[str]],
    mutability: Mutability,
    dataflow: Dataflow,
    assumptions: Assumptions,
) -> None:
    """Count as used what is computed by functions that pick items by a number computed from a settable value.

    Args:
        runs: the recordings.
        options: returns the arguments of a function for which other calls may pass other values.
        mutability: of the model's attributes.
        dataflow: of the recorded ops.
        assumptions: is extended.
    """
    of_tensors = {(node.site.code, node.site.span) for node in dataflow.nodes if node.site is not None}
    trees = {code: tree for code in runs.coverage.called if isinstance(tree := syntax_of(code), _Function)}
    lengths: dict[str, set[str]] = {}
    for guard in runs.guards:
        file, _, line = guard.place.rpartition(":")
        if guard.expr.symbol == "==":  # as which a length is noted
            lengths.setdefault(file, set()).add(line)
    later = {name for _, name in runs.set_later}
    indices: dict[str, dict[str, int]] = {}
    for tree in trees.values():
        indices.setdefault(tree.name, {}).update(_indices(tree))  # several methods may have one name
    for code, tree in trees.items():
        sources = _Sources(tree, code, options(code), mutability, lengths.get(code.co_filename, ()), later)
        for pick, number in itertools.chain(
            _picks(tree), _passed_indices(tree, indices), _selections(tree), _rounds(tree), fields_by_name(tree)
        ):
            if (code, span_of(pick)) in of_tensors:  # the op receives the number
                continue
            if not runs.coverage.ran(code, pick):
                continue
            if _is_of_another_object(number) and not sources.is_whole(number):
                continue
            if sources.may_be_set(number) and not sources.are_options_alone(pick):
                reason = f"could be picked in {code.co_name} by {ast.unparse(number)}, which may be another number"
                contents = _contents(runs.coverage.functions.values(), code, pick, tree)
                if contents is not None:
                    assumptions.use(filter(dataflow.contains, contents), reason)
                    continue
                received = may_pick_arguments(pick, code, runs.modules)
                use_values_around_code(
                    code, runs.modules, dataflow, assumptions, reason, runs.coverage.called, received=received
                )
                break


def _contents(
    functions: Iterable[FunctionCoverage], code: CodeType, pick: ast.expr, tree: _Function
) -> list[Value] | None:
    """Return the values in a container from which code picks an item; None if it may hold anything else."""
    place = pick.lineno, container_of(pick, tree) or ""
    own = [c for c in functions if c.function.code is code and c.function.ran(pick, c.ran)]
    contents = [held for coverage in own for held in coverage.contents.get(place, [None])]
    return [value for held in contents for value in held] if contents and None not in contents else None


def _picks(tree: _Function) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield subscripts and method calls that pick items or slices, each with the computed number that selects them.

    An index with commas is that of a tensor, whose op receives the numbers; modules and settings in attributes are
    followed by other analyses. Attributes of other objects (``self.options.level``) count, because code may replace the
    object, which no recording does.

    Example:
        >>> text = "def f(a, k):\\n  c = k % 3\\n  return a[k // 2], a[c], a[0], a[k], a[:-k], a[0, -k], a.get(k - 1)"
        >>> [ast.unparse(number) for _, number in _picks(ast.parse(text).body[0])]
        ['k // 2', 'c', '-k', 'k - 1']
    """
    for node in ast.walk(tree):
        numbers: list[ast.expr | None] = []
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Attribute())):
                continue
            case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper)):
                numbers = [lower, upper]
            case ast.Subscript(value=ast.Attribute()):
                continue
            case ast.Subscript(slice=index) if not isinstance(index, ast.Tuple):
                numbers = [index]
            case ast.Call(func=ast.Attribute(attr=method), args=[index, *_]) if method in PICKING_METHODS:
                numbers = [index]
            case _:
                continue
        for number in (n for n in numbers if n is not None):
            is_slice = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)
            if (
                _is_computed(number, tree)
                or _is_of_another_object(number)
                and not is_slice  # layers up to a depth are called in turn
                or isinstance(node, ast.Subscript)
                and isinstance(node.ctx, ast.Load)
                and _has_computed_keys(node.value, tree)
            ):
                yield node, number


def _has_computed_keys(container: ast.expr, tree: _Function) -> bool:
    """Whether a function fills a dictionary under computed keys, some of which no recording may look up.

    Example:
        >>> text = "def f(a, k):\\n  d, e = {}, {1: a}\\n  d[k + 1] = a\\n  return d[k], e[k]"
        >>> tree = ast.parse(text).body[0]
        >>> [_has_computed_keys(pick.value, tree) for pick in tree.body[-1].value.elts]
        [True, False]
    """
    if not isinstance(container, ast.Name):
        return False
    stored = (n for n in nodes_of(tree, ast.Subscript) if isinstance(n.ctx, ast.Store))
    keys = [n.slice for n in stored if isinstance(n.value, ast.Name) and n.value.id == container.id]
    bound = [b.value for b in bindings(tree).get(container.id, ()) if b.value is not None]
    keys += [value.key for value in bound if isinstance(value, ast.DictComp)]
    pairs = any(isinstance(v, ast.Call) and getattr(v.func, "id", "") == "dict" and v.args for v in bound)
    return pairs or any(isinstance(key, (ast.JoinedStr, ast.Call, ast.BinOp, ast.Name)) for key in keys)


def _selections(tree: _Function) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield comprehensions that filter items, and calls that select some, each with the deciding expression.

    Example:
        >>> text = "def f(a, t, k): return next(x for x, e in a if t < e), max(a, key=lambda x: x < t), islice(a, k)"
        >>> [ast.unparse(test) for _, test in _selections(ast.parse(text).body[0])]
        ['t < e', 'x < t', 'k']
    """
    for node in nodes_of(tree, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp):
        yield from ((node, test) for generator in node.generators for test in generator.ifs)  # type: ignore[attr-defined]
    for call in nodes_of(tree, ast.Call):
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        if name in _SELECTING_BY_FUNCTIONS:
            yield from ((call, function.body) for function in arguments if isinstance(function, ast.Lambda))
        elif name in _SELECTING_BY_NUMBERS:
            yield from ((call, number) for number in (call.args if name == "itemgetter" else call.args[1:]))


def _rounds(tree: _Function) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield the ends of ranges that code computes by a function, or by a power, each with itself.

    Runs at other sizes have other numbers of rounds if the end is a quotient; a logarithm needs sizes that none has.

    Example:
        >>> text = "def f(x, n):\\n  k = int(log2(n))\\n  return [range(k), range(n // 2), range(round(n ** 0.5))]"
        >>> [ast.unparse(end) for end, _ in _rounds(ast.parse(text).body[0])]
        ['k', 'round(n ** 0.5)']
    """
    for call in nodes_of(tree, ast.Call):
        for end in call.args if getattr(call.func, "id", "") == "range" else ():
            values = [end]
            if isinstance(end, ast.Name):
                values += [b.value for b in bindings(tree).get(end.id, ()) if b.value is not None]
            if any(map(_is_uneven, values)):
                yield end, end


def _is_uneven(value: ast.expr) -> bool:
    """Whether a number grows in other steps than the sizes in it."""
    called = [getattr(call.func, "attr", getattr(call.func, "id", "")) for call in nodes_of(value, ast.Call)]
    return any(name not in _EVEN | {"size"} for name in called) or any(
        isinstance(n.op, ast.Pow) for n in nodes_of(value, ast.BinOp)
    )


def _indices(tree: _Function) -> dict[str, int]:
    """Return the arguments that a function uses directly to pick items, each with its position.

    Example:
        >>> _indices(ast.parse("def pick(self, items, i, n): return items[i], items.pop(n)").body[0])
        {'i': 2, 'n': 3}
    """
    places = {argument.arg: place for place, argument in enumerate((*tree.args.posonlyargs, *tree.args.args))}
    names = (n.slice.id for n in nodes_of(tree, ast.Subscript) if isinstance(n.slice, ast.Name))
    calls = (c for c in nodes_of(tree, ast.Call) if getattr(c.func, "attr", "") in PICKING_METHODS)
    popped = (c.args[0].id for c in calls if c.args and isinstance(c.args[0], ast.Name))
    return {name: places[name] for name in (*names, *popped) if name in places}


def _passed_indices(tree: _Function, indices: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield calls of functions that pick items by an argument, each with the computed number passed for it."""
    for call in nodes_of(tree, ast.Call):
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        for argument, place in indices.get(name, {}).items():
            own = place - isinstance(call.func, ast.Attribute)  # a method gets its object as well, a function may not
            positions = [call.args[p] for p in {own, place} if 0 <= p < len(call.args)]
            passed = [*positions, *(keyword.value for keyword in call.keywords if keyword.arg == argument)]
            for number in passed:  # comparisons are flags, which are recorded both ways
                if not isinstance(number, ast.Compare) and _is_computed(number, tree):
                    yield call, number


def _is_computed(number: ast.expr, tree: _Function) -> bool:
    """Whether a number is neither a literal, nor a loop counter, nor a plain attribute or argument."""
    if isinstance(number, ast.Name):
        own = (b.value for b in bindings(tree).get(number.id, ()) if isinstance(b.node, (ast.Assign, ast.AnnAssign)))
        return any(value is not None and _computes(value) for value in (*own, *_further_values(number.id, tree)))
    return _computes(number)


def _is_of_another_object(number: ast.expr) -> bool:
    return isinstance(number, ast.Attribute) and isinstance(number.value, ast.Attribute)


def _further_values(name: str, tree: _Function) -> Iterator[ast.expr]:
    """Yield in-place updates of a variable, values of assignment expressions, and the ends of ranges that it counts.

    Example:
        >>> tree = ast.parse("def f(n):\\n  n //= 3\\n  return [n for n in range(n + 1)], (n := n - 2)").body[0]
        >>> [ast.unparse(value) for value in _further_values("n", tree)]
        ['n // 3', 'n - 2', 'n + 1']
    """
    for node in ast.walk(tree):
        match node:
            case ast.AugAssign(target=ast.Name(id=target), op=op, value=value) if target == name:
                yield ast.BinOp(ast.Name(name, ast.Load()), op, value)
            case ast.NamedExpr(target=ast.Name(id=target), value=value) if target == name:
                yield value
            case (
                ast.For(target=targets, iter=ast.Call(func=ast.Name(id="range"), args=ends))
                | ast.comprehension(target=targets, iter=ast.Call(func=ast.Name(id="range"), args=ends))
            ) if name in [n.id for n in nodes_of(targets, ast.Name)]:
                yield from ends


def _computes(expr: ast.expr) -> bool:
    return (
        bool(nodes_of(expr, ast.BinOp, ast.Compare))
        or any(not isinstance(item.slice, ast.Constant) for item in nodes_of(expr, ast.Subscript))
        or any(getattr(call.func, "id", "") not in _CALLS_ON_FLAGS for call in nodes_of(expr, ast.Call))
        or any(
            isinstance(sign.op, ast.USub) and not isinstance(sign.operand, ast.Constant)
            for sign in nodes_of(expr, ast.UnaryOp)
        )
    )


class _Sources:
    """The values from which the numbers in a function are computed.

    Args:
        tree: syntax of the function.
        code: of the function.
        options: its arguments for which other calls may pass other values.
        mutability: of the model's attributes.
        lengths: lines on which code reads the length of a tensor.
        later: names of attributes of modules that code sets later.
    """

    def __init__(
        self,
        tree: _Function,
        code: CodeType,
        options: Collection[str],
        mutability: Mutability,
        lengths: Collection[str],
        later: Collection[str],
    ) -> None:
        self._tree, self._options, self._mutability = tree, options, mutability
        self._lengths, self._later = lengths, later
        self._owners = mutability.owners_of(code)
        self._self = code.co_varnames[0] if self._owners else None

    def are_options_alone(self, pick: ast.expr) -> bool:
        """Whether a comprehension only iterates over options, or ``**kwargs``: a call has those that it passes."""
        iterated = [generator.iter for generator in getattr(pick, "generators", ())]
        names = {node.id for part in iterated for node in nodes_of(part, ast.Name)} - vars(builtins).keys()
        further = {self._tree.args.kwarg.arg} if self._tree.args.kwarg is not None else set()
        return bool(names) and names <= {*self._options} | further

    def may_be_set(self, expr: ast.expr, steps: int = MOST_STEPS_TO_INDEX) -> bool:
        """Whether an expression reads an option, or an attribute that code sets, directly or through variables."""
        if not all(map(self._never_changed, self._paths(expr))):
            return True
        names = {node.id for node in nodes_of(expr, ast.Name)} - {self._self}
        if any(_is_size(part) or self._is_length(part) for part in nodes_of(expr, ast.Subscript, ast.Call)):
            return True
        if any(self._is_of_item(node) and node.attr in self._later for node in nodes_of(expr, ast.Attribute)):
            return True
        if not names.isdisjoint(self._options):
            return True
        counted = counted_variables(expr)
        bound = [b.value for name in names - counted for b in bindings(self._tree).get(name, ()) if b.value is not None]
        bound += [value for name in names & counted for value in lengthening_values(name, self._tree)]
        bound += [value for name in names for value in _further_values(name, self._tree)]
        return steps > 0 and any(self.may_be_set(value, steps - 1) for value in bound)

    def is_whole(self, attribute: ast.expr) -> bool:
        """Whether an attribute of an object that the module holds is an integer, and not the name of a function."""
        _, _, path = (path_of(attribute) or "").partition(".")
        held = [_held(owner, path.split(".")) for owner in self._owners]
        return any(type(value) is int for value in held)

    def _is_length(self, expr: ast.expr) -> bool:
        """Whether an expression is the length of a tensor: ``len(x)``."""
        is_len = isinstance(expr, ast.Call) and getattr(expr.func, "id", "") == "len"
        return is_len and str(expr.lineno) in self._lengths

    def _is_of_item(self, node: ast.Attribute) -> bool:
        """Whether an attribute belongs to something other than the module, such as an item in a loop."""
        return isinstance(node.value, ast.Name) and node.value.id != self._self

    def _paths(self, expr: ast.expr) -> Iterator[str]:
        """Yield the attributes of the module that an expression reads, and the methods that it calls."""
        called = {call.func for call in nodes_of(expr, ast.Call)}
        for node in nodes_of(expr, ast.Attribute):
            root, _, path = (path_of(node) or "").partition(".")
            if root == self._self is not None:
                yield f"{path}()" if node in called else path

    def _never_changed(self, path: str) -> bool:
        if path.endswith("()") and not all(_is_method(owner, path.removesuffix("()")) for owner in self._owners):
            path = path.removesuffix("()")  # of a module
        return all(self._mutability.never_changed(owner, path) for owner in self._owners)


def _held(owner: Any, path: Sequence[str]) -> Any:
    for name in path:
        owner = getattr(owner, name, None)
    return owner


def _is_size(expr: ast.expr) -> bool:
    """Whether an expression is a size of a tensor: ``x.shape[-1]``, ``x.size(2)``."""
    inner = expr.value if isinstance(expr, ast.Subscript) else getattr(expr, "func", None)
    return isinstance(inner, ast.Attribute) and inner.attr == ("shape" if isinstance(expr, ast.Subscript) else "size")


def _is_method(owner: nn.Module, path: str) -> bool:
    return "." not in path and isinstance(inspect.getattr_static(type(owner), path, None), FunctionType)

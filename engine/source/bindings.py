"""Which expressions the variables of a function may hold: assignments, loops, and calls that fill containers."""

from __future__ import annotations

import ast
import builtins
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType
from typing import NamedTuple

from engine.source.syntax import nodes_of

__all__ = [
    "FILLS",
    "Binding",
    "arguments_of",
    "assignments_that_read",
    "bindings",
    "counted_rounds",
    "determining_values",
    "expressions_behind",
    "is_passed_from_outside",
    "path_of",
    "places_set",
    "set_from_globals",
    "targets_of",
    "unconditional_values",
]

FILLS = frozenset("add append appendleft extend insert setdefault update".split())
"""Methods that add their arguments to a list, a set or a dictionary."""


class Binding(NamedTuple):
    """An expression that a variable may hold, an item of which it may hold, or which may be an item of it.

    Attributes:
        value: the expression.
        node: the statement or expression that binds it.
        line: line of that.
        replaces: whether the variable keeps nothing of its previous value.
    """

    value: ast.expr
    node: ast.AST
    line: int
    replaces: bool


@functools.cache
def bindings(tree: ast.AST, owner: str | None = None) -> Mapping[str, tuple[Binding, ...]]:
    """Return the bindings of each variable, and of each path of attributes (``options.flag``).

    Args:
        tree: syntax of a function.
        owner: an argument that counts as unchanged when its attributes are set, such as ``self``.

    Example:
        >>> tree = ast.parse("h, c = x, y\\nfor k in (h := z): d['k'] = k\\nself.flag: bool = on\\nd.update(e=e)")
        >>> {name: [ast.unparse(b.value) for b in values] for name, values in bindings(tree, "self").items()}
        {'h': ['x', 'z'], 'c': ['y'], 'k': ['z'], 'self.flag': ['on'], 'd': ['k', 'e']}
    """
    result: dict[str, list[Binding]] = defaultdict(list)
    for node in ast.walk(tree):
        for target, value, replaces in targets_of(node):
            for name, whole in _names(target, owner):
                plain = value.value if isinstance(value, ast.NamedExpr) else value
                line = getattr(node, "lineno", target.lineno)
                result[name].append(Binding(plain, node, line, replaces and whole))
    return {name: tuple(values) for name, values in result.items()}


def expressions_behind(expr: ast.expr, tree: ast.AST, owner: str | None = None) -> Iterator[ast.expr]:
    """Yield an expression, those that its variables may hold, those that the variables in these may hold, and so on.

    Args:
        expr: part of the syntax of a function.
        tree: syntax of the function.
        owner: an argument that counts as unchanged when its attributes are set, such as ``self``.

    Example:
        >>> tree = ast.parse("wanted = frozenset(embed) if embed else {-1}\\nlast = max(wanted)")
        >>> test = ast.parse("i == last", mode="eval").body
        >>> [ast.unparse(part) for part in expressions_behind(test, tree)]
        ['i == last', 'max(wanted)', 'frozenset(embed) if embed else {-1}']
    """
    seen: set[str] = set()
    waiting = [expr]
    while waiting:
        inner = waiting.pop()
        yield inner
        new = {node.id for node in ast.walk(inner) if isinstance(node, ast.Name)} - seen
        seen |= new
        waiting += [binding.value for name in sorted(new) for binding in bindings(tree, owner).get(name, ())]


def path_of(node: ast.expr) -> str | None:
    """Return the path of an attribute of a variable, and None for any other expression.

    Example:
        >>> path_of(ast.parse("self.gate.mode", mode="eval").body)
        'self.gate.mode'
    """
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names, node = [node.attr, *names], node.value
    return ".".join([node.id, *names]) if isinstance(node, ast.Name) else None


def targets_of(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr, bool]]:
    """Yield the targets of a statement or expression with their values, and whether these replace all of a target.

    Args:
        node: any syntax.

    Example:
        >>> [assignment] = ast.parse("x, parts = y, []").body
        >>> [(target.id, ast.unparse(value)) for target, value, _ in targets_of(assignment)]
        [('x', 'y'), ('parts', '[]')]
    """
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _pairs(target, value)
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
            yield target, value, True
        case ast.AugAssign(target=target, value=value):
            yield target, value, False
        case ast.For() | ast.AsyncFor() | ast.comprehension():
            yield node.target, node.iter, True
        case ast.withitem(optional_vars=ast.expr() as target, context_expr=value):
            yield target, value, True
        case ast.Match(subject=value, cases=cases):
            inner = (n for case in cases for n in ast.walk(case.pattern))
            names = (getattr(n, "name", None) or getattr(n, "rest", None) for n in inner)
            place = {"lineno": node.lineno, "col_offset": node.col_offset}
            yield from ((ast.Name(name, ast.Store(), **place), value, True) for name in names if name)
        case ast.Call(func=ast.Attribute(value=target, attr=method), args=args) if method in FILLS:
            yield from ((target, value, False) for value in (*args, *(k.value for k in node.keywords)))


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr, bool]]:
    """Yield a target with its value; element by element if both sides are displays of equal length."""
    several = (ast.Tuple, ast.List)
    if isinstance(target, several) and isinstance(value, several) and len(target.elts) == len(value.elts):
        if not any(isinstance(e, ast.Starred) for e in (*target.elts, *value.elts)):
            for inner, item in zip(target.elts, value.elts, strict=True):
                yield from _pairs(inner, item)
            return
    yield target, value, True


def _names(target: ast.expr, owner: str | None) -> Iterator[tuple[str, bool]]:
    """Yield the variables in a target, and whether they are the whole target."""
    match target:
        case ast.Name(id=name):
            yield name, True
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            for element in elements:
                yield from _names(element, owner)
        case ast.Starred(value=inner):
            yield from _names(inner, owner)
        case ast.Attribute(value=inner) | ast.Subscript(value=inner):
            path = path_of(target)
            if path is not None:
                yield path, True
            if getattr(target, "attr", "") != "requires_grad":  # it says what is differentiated, and holds nothing
                yield from ((name, False) for name, _ in _names(inner, owner) if name != owner)


def assignments_that_read(node: ast.AST, tree: ast.AST) -> Sequence[ast.AST]:
    """Return the assignments whose value contains a variable, and which therefore assign after it is read."""
    return _read_before_assigned(tree).get(node, ())


@functools.cache
def _read_before_assigned(tree: ast.AST) -> Mapping[ast.AST, Sequence[ast.AST]]:
    """Return the variables in the values of assignments that run once, each with the assignment."""
    again = {inner for node in ast.walk(tree) if node is not tree and _may_repeat(node) for inner in ast.walk(node)}
    assignments = [n for n in ast.walk(tree) if isinstance(n, (ast.Assign, ast.AnnAssign)) and n not in again]
    values = [(n, n.value) for n in assignments if n.value is not None]
    names = ((name, n) for n, value in values for name in ast.walk(value) if isinstance(name, ast.Name))
    return {name: (n,) for name, n in names if name not in again}


def _may_repeat(node: ast.AST) -> bool:
    """Whether what is inside may be evaluated several times, or later: in loops, functions and generators."""
    loops = (ast.For, ast.AsyncFor, ast.While)
    return isinstance(node, (*loops, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp))


def bound_value(name: str, binding: Binding) -> ast.expr:
    """Return the expression that a binding gives a variable; in a tuple if the variable gets a part of it, or more.

    Args:
        name: the variable.
        binding: one of its bindings.

    Example:
        >>> [binding] = bindings(ast.parse("x += 1"))["x"]
        >>> ast.unparse(bound_value("x", binding))
        'x + 1'
    """
    node, value = binding.node, binding.value
    if isinstance(node, ast.AugAssign):
        return ast.BinOp(ast.Name(name, ast.Load()), node.op, value)
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    plain = isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and any(map(_is_name, targets))
    paired = isinstance(node, ast.Assign) and value is not node.value
    return value if plain or paired else ast.Tuple([value], ast.Load())


def determining_values(name: str, binding: Binding) -> Sequence[ast.expr]:
    """Return the expressions that determine what a binding gives a variable in each round.

    That is its value; of a variable that counts rounds, where it starts, and the step, whatever ends the loop.

    Args:
        name: the variable.
        binding: one of its bindings.

    Example:
        >>> loops = "for i, x in enumerate(xs): y = x", "for k in range(a, b, 2): n = k", "for m in range(b): pass"
        >>> tree = ast.parse("\\n".join(loops))
        >>> texts = {n: determining_values(n, b) for n, own in bindings(tree).items() for b in own}
        >>> {name: [ast.unparse(value) for value in values] for name, values in texts.items()}
        {'i': [], 'x': ['enumerate(xs)'], 'k': ['a', '2'], 'm': [], 'y': ['x'], 'n': ['k']}
    """
    target, iterated = _loop(binding)
    match target, iterated:
        case (ast.Tuple(elts=[ast.Name(id=counter), *_]), ast.Call(func=ast.Name(id="enumerate"), args=[_, *start])):
            return start if counter == name else [binding.value]
        case (ast.Name(), ast.Call(func=ast.Name(id="range"), args=[_])):
            return []
        case (ast.Name(), ast.Call(func=ast.Name(id="range"), args=[start, _, *step])):
            return [start, *step]
    return [binding.value]


def counted_rounds(name: str, binding: Binding) -> ast.expr | None:
    """Return what decides how far a variable counts the rounds of a loop; None if the binding makes it no counter.

    Args:
        name: the variable.
        binding: one of its bindings.

    Example:
        >>> loops = "for i, x in enumerate(xs): y = x", "for k in range(a, b, 2): n = k"
        >>> tree = ast.parse("\\n".join(loops))
        >>> rounds = {n: counted_rounds(n, b) for n, own in bindings(tree).items() for b in own}
        >>> {name: ast.unparse(expr) for name, expr in rounds.items() if expr is not None}
        {'i': 'xs', 'k': 'range(a, b, 2)'}
    """
    target, iterated = _loop(binding)
    match target, iterated:
        case (ast.Tuple(elts=[ast.Name(id=counter), *_]), ast.Call(func=ast.Name(id="enumerate"), args=[items, *_])):
            rounds = items if counter == name else None
        case (ast.Name(), ast.Call(func=ast.Name(id="range"))):
            rounds = iterated
        case _:
            rounds = None
    return rounds


def _loop(binding: Binding) -> tuple[ast.expr | None, ast.expr | None]:
    """Return the target of a loop, and what it iterates over, which a comprehension is passed from outside."""
    iterated = getattr(binding.node, "iter", None)
    return getattr(binding.node, "target", None), getattr(iterated, "outside", iterated)


def is_passed_from_outside(binding: Binding) -> bool:
    """Whether a binding is the target of a comprehension's first loop, whose items an outer function computes."""
    return hasattr(getattr(binding.node, "iter", None), "outside")


def _is_name(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Name)


Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.lru_cache(maxsize=10_000)
def arguments_of(function: Function) -> frozenset[str]:
    """Return the names of the arguments that a function names.

    Example:
        >>> sorted(arguments_of(ast.parse("def f(a, /, b, *args, c=1, **kwargs): pass").body[0]))
        ['a', 'b', 'c']
    """
    arguments = function.args
    return frozenset(a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))


@functools.lru_cache(maxsize=10_000)
def places_set(function: Function, name: str) -> list[ast.Name]:
    """Return the places where a function sets one of its variables."""
    return [n for n in nodes_of(function, ast.Name) if n.id == name and not isinstance(n.ctx, ast.Load)]


@functools.lru_cache(maxsize=10_000)
def unconditional_values(function: Function, name: str) -> list[ast.expr]:
    """Return what a variable is set to if a function sets it once, or under no condition; else nothing.

    Example:
        >>> function = ast.parse("def f(x):\\n    a = 1\\n    if x:\\n        b, a = 2, a").body[0]
        >>> [ast.unparse(value) for value in unconditional_values(function, "b")]
        ['(2, a)']
        >>> unconditional_values(function, "a")
        []
    """
    places = places_set(function, name)
    statements = nodes_of(function) if len(places) == 1 else function.body
    assigned = [s for s in statements if isinstance(s, ast.Assign)]
    values = [s.value for s in assigned if any(target in places for target in _targets(s.targets))]
    return values if len(values) == len(places) else []


def _targets(targets: Sequence[ast.expr]) -> Iterator[ast.expr]:
    """Yield what an assignment sets, the elements of tuples one by one."""
    for target in targets:
        yield from _targets(target.elts) if isinstance(target, ast.Tuple) else [target]


def set_from_globals(tree: ast.FunctionDef | ast.AsyncFunctionDef, code: CodeType) -> set[str]:
    """Return the variables, other than arguments, that a function sets to what global names hold or return.

    Args:
        tree: syntax of the function.
        code: of the function.

    Example:
        >>> text = "def run(x, cache):\\n    first, own = cache[0], Cache()\\n    return own.update(first.update(x))"
        >>> set_from_globals(ast.parse(text).body[0], compile(text, "", "exec").co_consts[0])
        {'own'}
    """
    own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars, *vars(builtins)}
    arguments = {a.arg for a in nodes_of(tree.args, ast.arg)}
    return {
        name
        for name, values in bindings(tree).items()
        if name not in arguments
        and any(n.id not in own for b in values for n in ast.walk(b.value) if isinstance(n, ast.Name))
    }

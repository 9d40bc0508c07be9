"""Whether a condition in a function depends on the caller of the model, or is fixed by the model's code."""

from __future__ import annotations

import ast
import builtins
import enum
import functools
import sys
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.flow.control_flow import controls
from engine.flow.plain_functions import (
    bound_arguments,
    expressions_in,
    only_branches,
    only_compared_with_none,
    only_result,
)
from engine.flow.reaching import definitions_before, is_never_none
from engine.flow.version_checks import version_check
from engine.numbers.sized_places import is_at
from engine.source.anonymous import is_anonymous
from engine.source.bindings import (
    Binding,
    assignments_that_read,
    bindings,
    counted_rounds,
    determining_values,
    is_passed_from_outside,
)
from engine.source.filled_lists import is_only_filled, may_change_elsewhere
from engine.source.function_text import syntax_of
from engine.source.static_attributes import static_attribute
from engine.source.syntax import compares_with_none, nodes_of

__all__ = ["ALWAYS_FALSE", "TYPE_CHECKS", "Conditions", "has_fixed_result"]

ALWAYS_FALSE = frozenset({"is_scripting", "_is_scripting", "_is_tracing"})
"""Functions that return False where a model runs as Python code; the last is torchvision's own, whose ops agree."""
_ASK_FOR_EXPORT = frozenset("is_tracing is_compiling is_exporting is_dynamo_compiling is_torchdynamo_compiling".split())

_FIXED_KINDS = (type, torch.dtype, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_TYPE_CHECKS = frozenset({"isinstance", "issubclass", "callable", "type"})
_ATTRIBUTES = frozenset({"hasattr", "getattr"})
TYPE_CHECKS = _TYPE_CHECKS | _ATTRIBUTES
"""Functions that tell of what type an object is, or what attributes it has."""

_METHODS_OF_PLAIN_VALUES = frozenset("copy endswith isdigit lower startswith strip upper".split())
"""Methods of lists, dictionaries and strings that have no side effects, and that tensors and modules lack."""

_TENSOR_ATTRIBUTES = frozenset("dtype device requires_grad is_cuda grad_fn is_nested is_sparse".split())
_SIZES = {"ndim", "shape"}
_TORCH = frozenset({"torch", "torch.functional", "torch.nn.functional"})
_KEEP_LENGTH = {"enumerate", "list", "reversed", "sorted", "tuple", "zip"}
_ALL_ITEMS = {"children", "items", "keys", "named_children", "values"}
_CONTAINERS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_MISSING, _ALL_LINES = object(), range(sys.maxsize)

_Visited = frozenset[tuple[str, int]]
"""Variables whose values are being examined, each with the line that sets it."""


@dataclass(frozen=True)
class Conditions:
    """Decides whether a condition in a function evaluates to the same value in every call of the model.

    Attributes:
        tree: syntax of the function.
        space: globals of the function.
        open: arguments whose values the caller of the model may choose: all arguments of its forward; in other
            functions, those that receive an argument of forward.
        never_changed: whether no code sets the attribute at a path (``gate.mode`` of the module; ``*.mode`` of an
            unknown object) once the model is built; for a path that ends in ``()``, whether the method always returns
            the same value; for one that ends in ``{}``, whether a container is empty and stays so.
        ran: whether some syntax ran, or may run; other syntax has no influence on a condition.
        owner: name of the argument that is the module itself; None in a plain function.
        never_reassigned: whether no code binds the attribute at a path to another object, although its contents may
            change. This is enough for ``is None``. By default `never_changed`.
        file: of the function.
        sized: places at which sizes decide that differ between inputs.
        computed: whether a variable held only results of ops whenever it was evaluated, and no other type of an
            argument leads elsewhere before; then it has the same type in every call.
        declared: whether the user declares that the attribute at a path keeps its value.
    """

    tree: ast.FunctionDef | ast.AsyncFunctionDef
    space: Mapping[str, Any]
    open: Collection[str]
    never_changed: Callable[[str], bool]
    ran: Callable[[ast.AST], bool]
    owner: str | None = None
    never_reassigned: Callable[[str], bool] | None = None
    file: str = ""
    sized: Collection[str] = ()
    computed: Callable[[ast.Name], bool] = lambda variable: False
    declared: Callable[[str], bool] = lambda path: False
    _in_progress: types.CodeType | None = None  # the function being examined, which may call itself

    def is_fixed(self, test: ast.AST) -> bool:
        """Whether an expression has the same value in every call of the model.

        A statement is fixed if all conditions in it are.
        """
        return self._is_list_of_fixed_length(test) or self._fixed(test, frozenset())

    def _is_list_of_fixed_length(self, test: ast.AST | None, inside: Collection[str] = ()) -> bool:
        """Whether a test is a list that code only fills, under conditions that have the same value in every call."""
        test = test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else test
        if not isinstance(test, ast.Name) or not is_only_filled(self.tree, test.id, self._is_of_torch):
            return False
        if test.id in inside:  # ``if not parts: parts.append(x)`` asks for the list itself
            return True
        inside = {*inside, test.id}
        conditions = (c for binding in self._assigned(test.id) for c in self._conditions_of(binding.node))
        return test.id not in self._arguments() and all(
            c is not None and (self._is_list_of_fixed_length(c, inside) or self._fixed(c, frozenset()))
            for c in conditions
        )

    def _may_change(self, name: str) -> bool:
        return may_change_elsewhere(self.tree, name, self._is_of_torch)

    def _is_of_torch(self, function: ast.expr) -> bool:
        return getattr(self._global_value(function), "__module__", None) in _TORCH

    def _fixed(self, node: ast.AST, visited: _Visited) -> bool:
        if not self.ran(node):
            return True
        if self.sized and isinstance(node, ast.expr) and is_at(node, self.file, self.sized):
            return False
        if isinstance(node, ast.stmt):
            tests = [n.test for n in nodes_of(node, ast.If, ast.IfExp, ast.While)]
            return bool(tests) and all(self._fixed(test, visited) for test in tests)
        if isinstance(node, ast.Name):
            return self._name(node.id, visited, node)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, visited)
        if isinstance(node, ast.Call):
            return self._call(node, visited)
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and compares_with_none(node):
            return self._attribute(node.left, visited, self.never_reassigned)
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and compares_with_none(node):
            return self._is_never_none(node.left, visited) or self._name(node.left.id, visited, node.left)
        if isinstance(node, ast.Compare) and (self._tests_empty_container(node) or _asks_for_meta_device(node)):
            return True
        if isinstance(node, ast.BoolOp) and any(map(functools.partial(self._decides, node.op), node.values)):
            return True
        children = [c for c in ast.iter_child_nodes(node) if isinstance(c, ast.expr)]
        return all(self._fixed(child, visited) for child in children)

    def _decides(self, operator: ast.boolop, operand: ast.expr) -> bool:
        """Whether a version check decides a conjunction or a disjunction, whatever its other operands are."""
        return self._version_check(operand) is isinstance(operator, ast.Or)

    def _version_check(self, node: ast.expr) -> bool | None:
        return version_check(node, self._global_value(node.func)) if isinstance(node, ast.Call) else None

    def _name(self, name: str, visited: _Visited, node: ast.AST | None = None) -> bool:
        lines = self._lines_that_set(name, getattr(node, "lineno", None))
        if (name, lines.start) in visited:
            return True
        own, passed = list(self._assigned(name, lines, node)), name in self._arguments() and not lines.start
        if own or passed:
            is_open = passed and (name in self.open or bool(self.sized) and is_anonymous(self.tree.name))
            visited |= {(name, lines.start)}
            values: list[ast.expr | None] = [value for b in own for value in determining_values(name, b)]
            if len(own) + passed > 1:  # which of them it holds, depends on the conditions under which they are bound
                values += [condition for binding in own for condition in self._conditions_of(binding.node)]
            if any(isinstance(value, _CONTAINERS) for value in values) and self._may_change(name):
                return False
            if any(self._may_count_further(name, binding, visited) for binding in own):
                return False
            return not is_open and all(value is not None and self._fixed(value, visited) for value in values)
        value = self.space.get(name, vars(builtins).get(name, _MISSING))
        if value is _MISSING:  # a variable of an enclosing function
            return name not in self.open
        return isinstance(value, _FIXED_KINDS)

    def _has_fixed_length(self, items: ast.expr, visited: _Visited) -> bool:
        """Whether a loop over some items has the same number of rounds in every call."""
        if self._is_list_of_fixed_length(items) or isinstance(items, ast.List | ast.Tuple):
            return not any(isinstance(item, ast.Starred) for item in getattr(items, "elts", ()))
        if isinstance(items, ast.ListComp | ast.GeneratorExp):
            return all(not g.ifs and self._has_fixed_length(g.iter, visited) for g in items.generators)
        if isinstance(items, ast.Call) and isinstance(items.func, ast.Name) and items.func.id in _KEEP_LENGTH:
            return all(self._has_fixed_length(own, visited) for own in items.args)
        if isinstance(items, ast.Call) and isinstance(items.func, ast.Attribute) and items.func.attr in _ALL_ITEMS:
            return self._has_fixed_length(items.func.value, visited)
        return self._fixed(items, visited)

    def _may_count_further(self, name: str, binding: Binding, visited: _Visited) -> bool:
        """Whether a variable counts the rounds of a loop that may run more often in other calls."""
        items = counted_rounds(name, binding)
        if items is None:
            return False
        from_variables = is_passed_from_outside(binding) and self._reads_variables(items)
        return from_variables or not self._has_fixed_length(items, visited)

    def _reads_variables(self, items: ast.expr) -> bool:
        """Whether an expression outside of a comprehension reads variables for more than their attributes."""
        functions = {id(n.func) for n in nodes_of(items, ast.Call) if isinstance(n.func, ast.Name)}
        owners = {id(n.value) for n in nodes_of(items, ast.Attribute)}
        return any(id(n) not in functions | owners for n in nodes_of(items, ast.Name))

    def _conditions_of(self, node: ast.AST) -> Sequence[ast.expr | None]:
        """Return the conditions under which a statement runs; None stands for an error."""
        return controls(self.tree).get(node, ())

    def _is_local(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and (node.id in self._arguments() or node.id in self._bindings())

    def _arguments(self) -> set[str]:
        return {arg.arg for arg in nodes_of(self.tree.args, ast.arg)}

    def _lines_that_set(self, name: str, line: int | None) -> range:
        """Return the lines that may set the value that a variable has on a line.

        They begin with the last assignment that always runs; lines behind that line count only inside of a loop.
        """
        body = self.tree.body
        inside = next((s for s in body if line is not None and s.lineno <= line <= (s.end_lineno or 0)), None)
        if inside is None:
            return _ALL_LINES
        before = {id(s) for s in body[: body.index(inside)] if isinstance(s, (ast.Assign, ast.AnnAssign))}
        own = self._bindings().get(name, ())
        start = max((b.line for b in own if b.replaces and id(b.node) in before), default=0)
        loops = bool(nodes_of(inside, ast.For, ast.AsyncFor, ast.While))
        return range(start, (inside.end_lineno or inside.lineno if loops else line or 0) + 1)

    def _bindings(self) -> Mapping[str, tuple[Binding, ...]]:
        return bindings(self.tree, self.owner)

    def _assigned(self, name: str, lines: range = _ALL_LINES, node: ast.AST | None = None) -> Iterator[Binding]:
        """Yield the values that lines assign to a variable, or to an attribute of one, before it is read at a node.

        In ``c = x if c is None else f(c)``, ``c`` is read before the statement assigns it, unless a loop repeats that.
        """
        own = self._bindings().get(name, ())
        later = () if node is None else assignments_that_read(node, self.tree)
        return (b for b in own if b.line in lines and b.node not in later and self.ran(b.value))

    def _attribute(self, node: ast.Attribute, visited: _Visited, last: Callable[[str], bool] | None = None) -> bool:
        held = self._global_value(node)
        if held is not _MISSING:
            return isinstance(held, _FIXED_KINDS) or isinstance(self._global_value(node.value), enum.EnumMeta)
        if node.attr in _TENSOR_ATTRIBUTES:
            return False
        path, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute):
            path, inner = [inner.attr, *path], inner.value
        if not self._fixed(inner, visited):
            return False
        start = [] if isinstance(inner, ast.Name) and inner.id == self.owner else ["*"]
        if node.attr in _SIZES and len(path) > 1:
            path, last = path[:-1], last or self.never_reassigned
        *inside, whole = (".".join([*start, *path[:end]]) for end in range(1, len(path) + 1))
        return self.declared(whole) or all(map(self.never_changed, inside)) and (last or self.never_changed)(whole)

    def _global_value(self, node: ast.expr) -> Any:
        """Return the value of a global, or of an attribute of a Python module or a class."""
        if isinstance(node, ast.Name):
            inner = node.id in self._arguments() or any(True for _ in self._assigned(node.id))
            return _MISSING if inner else self.space.get(node.id, _MISSING)
        if isinstance(node, ast.Attribute):
            held = self._global_value(node.value)
            return (
                static_attribute(held, node.attr, _MISSING) if isinstance(held, (types.ModuleType, type)) else _MISSING
            )
        return _MISSING

    def _call(self, node: ast.Call, visited: _Visited) -> bool:
        function = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if function in ALWAYS_FALSE | _ASK_FOR_EXPORT:
            return function in ALWAYS_FALSE
        if self._version_check(node) is not None:
            return True
        if function in _TYPE_CHECKS and node.args:  # `x.type()` is a text, which a cast changes
            own = [a for a in node.args[1:] if isinstance(a, ast.Attribute) or self._is_local(a)]  # other types
            if not all(self._fixed(a, visited) for a in own):
                return False
            if isinstance(node.args[0], ast.Attribute):
                return self._attribute(node.args[0], visited)
            root = _root(node.args[0])
            if function == "isinstance" and isinstance(node.args[0], ast.Name) and self.computed(node.args[0]):
                return True
            return root not in self.open
        if function in _ATTRIBUTES and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            owner = ast.Attribute(node.args[0], str(node.args[1].value), ast.Load())
            return self._attribute(owner, visited) and all(self._fixed(a, visited) for a in node.args[2:])
        if function in vars(builtins) and isinstance(node.func, ast.Name):
            return all(self._fixed(a, visited) for a in node.args)
        if function in _METHODS_OF_PLAIN_VALUES and isinstance(node.func, ast.Attribute):
            return self._fixed(node.func.value, visited) and all(self._fixed(a, visited) for a in node.args)
        return self._called_function(node, visited) or self._method(node)

    def _is_never_none(self, variable: ast.Name, visited: _Visited) -> bool:
        """Whether no assignment that may be the last one before assigns None, as far as it may ever run."""
        own = self.computed(variable) and definitions_before(self.tree, variable.id, variable)
        local = (self._arguments() | self._bindings().keys()) - {str(self.owner)}
        return bool(own) and all(
            d.value is not None and is_never_none(d.value, local)
            if self.ran(d.node)
            else self._cannot_run(d.node, visited)
            for d in own or ()
        )

    def _cannot_run(self, node: ast.AST, visited: _Visited) -> bool:
        """Whether a statement that did not run is in a branch whose condition is fixed, and was evaluated."""
        for outer in ast.walk(self.tree):  # outer statements come first
            for block in (outer.body, outer.orelse) if isinstance(outer, ast.If) else ():
                if block and not self.ran(block[0]) and any(inner is node for s in block for inner in ast.walk(s)):
                    return isinstance(outer, ast.If) and self.ran(outer.test) and self._fixed(outer.test, visited)
        return False

    def _called_function(self, node: ast.Call, visited: _Visited) -> bool:
        """Whether the result of a function that only returns an expression is fixed (``return x is not None``)."""
        held = self._global_value(node.func)
        tree = syntax_of(held.__code__) if isinstance(held, types.FunctionType) and not held.__closure__ else None
        names = None if tree is None else bound_arguments(tree, node)
        result = None if tree is None else only_result(tree)
        if tree is None or names is None or result is None or held.__code__ is self._in_progress:
            return False
        identities = only_compared_with_none(result)
        open_names = {name for name, value in names.items() if not self._passed(value, visited, name in identities)}
        code = held.__code__
        inner = Conditions(
            tree, held.__globals__, open_names, lambda name: False, lambda syntax: True, file=code.co_filename,
            sized=self.sized, _in_progress=code,
        )  # fmt: skip
        return inner.is_fixed(result)

    def _passed(self, value: ast.expr, visited: _Visited, only_identity: bool) -> bool:
        """Whether an argument is fixed; what an attribute holds may change inside if only its identity matters."""
        if only_identity and isinstance(value, ast.Attribute):
            return self._attribute(value, visited, self.never_reassigned)
        return self._fixed(value, visited)

    def _tests_empty_container(self, node: ast.Compare) -> bool:
        """Whether it tests for an item in a container of the module that is empty and stays so."""
        path, inner = "{}", node.comparators[0]
        while isinstance(inner, ast.Attribute):
            path, inner = f".{inner.attr}{path}", inner.value
        own = isinstance(inner, ast.Name) and inner.id == self.owner and isinstance(node.ops[0], (ast.In, ast.NotIn))
        return own and len(node.ops) == 1 and self.never_changed(path.removeprefix("."))

    def _method(self, node: ast.Call) -> bool:
        """Whether a method of the module, or of a part of it, always returns the same (``self.has_mask()``)."""
        path, inner = "()", node.func
        while isinstance(inner, ast.Attribute):
            path, inner = f".{inner.attr}{path}", inner.value
        own = isinstance(inner, ast.Name) and inner.id == self.owner
        return own and not node.args and not node.keywords and self.never_changed(path.removeprefix("."))


def has_fixed_result(function: types.FunctionType, never_changed: Callable[[str], bool]) -> bool:
    """Whether a property, or a method that is called without arguments, always returns the same result.

    It may branch and assign to variables, and do nothing else.

    Args:
        function: of the property or the method.
        never_changed: whether no code sets the attribute at a path, starting from the owner.
    """
    tree = syntax_of(function.__code__)
    if tree is None or function.__closure__ or not isinstance(tree, ast.FunctionDef) or not tree.args.args:
        return False
    if not all(map(only_branches, tree.body)):
        return False
    code = function.__code__
    conditions = Conditions(
        tree, function.__globals__, (), never_changed, lambda syntax: True, code.co_varnames[0], _in_progress=code
    )
    return all(map(conditions.is_fixed, expressions_in(tree.body)))


def _asks_for_meta_device(node: ast.Compare) -> bool:
    """Whether it compares ``x.device.type`` with ``"meta"``: nothing is computed on that device."""
    kind, other = node.left, node.comparators[0]
    if not (isinstance(kind, ast.Attribute) and kind.attr == "type" and isinstance(kind.value, ast.Attribute)):
        return False
    return kind.value.attr == "device" and isinstance(other, ast.Constant) and other.value == "meta"


def _root(node: ast.AST) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None

"""Calls, operators and subscripts that receive a number that code chooses, through variables, arguments and results."""

from __future__ import annotations

import ast
import builtins
from collections import defaultdict
from collections.abc import Iterator, Mapping
from types import CodeType

from torch import Tensor, nn

from engine.flow.argument_flow import Reader, read
from engine.flow.branches import RESULT
from engine.flow.choices import Choices
from engine.source.syntax import nodes_of, span_of

__all__ = ["Span", "chosen_calls"]

_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
Span = tuple[tuple[int, int], tuple[int, int]]
"""Line and column of the start of an expression, and of its end."""

_COUNTS = frozenset({"range", "slice"})
_CONTAINERS = (ast.Dict, ast.List, ast.NamedExpr, ast.Starred, ast.Tuple)


def chosen_calls(model: nn.Module, choices: Choices) -> Mapping[CodeType, Mapping[Span, bool]]:
    """Return the calls, operators and subscripts that receive a number that code chooses, and comparisons in loops.

    Args:
        model: the model; its forward is analysed, with all modules, methods and functions that it calls.
        choices: the choices of the code.

    Returns:
        Their positions, each with whether it may pick from a list, or count, by code of the function.
    """
    result: dict[CodeType, dict[Span, bool]] = defaultdict(dict)
    for reader in read(model, (), choices, _NumberReader)[0]:
        result[reader.code].update(reader.chosen())
    return result


class _NumberReader(Reader):
    """Reads which numbers one function passes on; results computed from features do not count."""

    def follows(self, value: ast.expr) -> bool:
        """Whether a value is a number, a string or a function that code chooses, or is computed from one."""
        match value:
            case ast.Name(id=name):
                return name in self.names
            case ast.IfExp(body=body, orelse=orelse):
                parts: list[ast.expr] = [body, orelse]
                return not self.choices.expressions.isdisjoint(parts) or any(map(self.follows, parts))
            case ast.BinOp(left=left, right=right):
                return all(map(self._is_number, (left, right))) and (self.follows(left) or self.follows(right))
            case ast.UnaryOp(operand=operand):
                return self.follows(operand)
            case ast.Attribute(value=held) | ast.Call(func=ast.Attribute(value=held)) if self.follows(held):
                return True
            case ast.Call(func=function, args=args):
                if isinstance(function, ast.Name) and function.id in vars(builtins):
                    return any(map(self.follows, args))
                return self.returns_argument(value)
        inner = (child for child in ast.iter_child_nodes(value) if isinstance(child, ast.expr))
        return isinstance(value, _CONTAINERS) and any(map(self.follows, inner))

    def _is_bound_to_followed(self, name: str, value: ast.expr) -> bool:
        return self.follows(value) and not self._returns_features(name, value)

    def _returns_features(self, name: str, value: ast.expr) -> bool:
        """Whether a method receives and returns the features in a variable (``k, v = cache.update(k, v)``)."""
        if not isinstance(value, ast.Call) or name not in [getattr(argument, "id", None) for argument in value.args]:
            return False
        others = (binding.value for binding in self.bound[name] if binding.value is not value)
        return any(self.is_module(call.func) for other in others for call in nodes_of(other, ast.Call))

    def returns(self) -> bool:
        """Whether the function returns such a number."""
        results = (n.value for n in ast.walk(self.tree) if isinstance(n, ast.Return) and n.value is not None)
        return RESULT in self.names or any(map(self.follows, results))

    def chosen(self) -> Iterator[tuple[Span, bool]]:
        """Yield the positions of calls, operators and subscripts that receive such an argument, or a value it chooses.

        Each comes with whether it may pick from a list, or count.
        """
        in_loops = {node for loop in nodes_of(self.tree, *_LOOPS) for node in nodes_of(loop, ast.Compare)}
        for node in ast.walk(self.tree):
            match node:
                case ast.Compare(left=left, comparators=others) if node in in_loops:  # both sides run, in other rounds
                    parts = [left, *others]
                case ast.Call(func=function, args=args, keywords=keywords):
                    parts = [*args, *(keyword.value for keyword in keywords)]
                    parts += [function] if isinstance(function, (ast.Name, ast.IfExp)) else []
                case ast.While(test=test):
                    parts = [n for n in ast.walk(test) if isinstance(n, ast.expr)]
                case ast.Subscript(value=value, slice=index) if not self.is_module(value):
                    parts = [n for n in ast.walk(index) if isinstance(n, ast.expr)]
                case ast.BinOp(left=left, right=right):
                    parts = [left, right]
                case ast.AugAssign(value=value):
                    parts = [value]
                case _:
                    continue
            if any(map(self.follows, parts)):
                called: ast.expr | None = getattr(node, "func", None)
                picks = not isinstance(node, (ast.Call, ast.BinOp)) or _may_do_nothing(called)
                is_chosen = called is not None and self.follows(called)
                yield span_of(node.test if isinstance(node, ast.While) else node), picks or is_chosen

    def _is_number(self, value: ast.expr, depth: int = 3) -> bool:
        """Whether an expression is a number, computed from sizes, attributes, and such arguments."""
        match value:
            case ast.Constant() | ast.Attribute():
                return True
            case ast.Name(id=name):
                bound = [binding.value for binding in self.bound.get(name, ())]
                return name in self.names or bool(bound and depth) and all(self._is_number(b, depth - 1) for b in bound)
            case ast.Subscript(value=ast.Attribute(attr="shape")) | ast.Call(func=ast.Attribute(attr="size")):
                return True
            case ast.Call(func=ast.Name(id=name), args=args):
                return name in vars(builtins) and all(self._is_number(a, depth) for a in args)
            case ast.BinOp(left=left, right=right):
                return self._is_number(left, depth) and self._is_number(right, depth)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return all(self._is_number(element, depth) for element in elements)
            case ast.UnaryOp(operand=operand):
                return self._is_number(operand, depth)
            case ast.IfExp(body=body, orelse=orelse):
                return self._is_number(body, depth) and self._is_number(orelse, depth)
        return False


def _may_do_nothing(called: ast.expr | None) -> bool:
    """Whether a call counts, or runs no op with some numbers: a tensor stays itself in ``x.to(dtype)``."""
    if isinstance(called, ast.Attribute):
        return any(called.attr in vars(base) for base in Tensor.__mro__)  # not ``__call__``, which the class has
    return isinstance(called, ast.Name) and called.id in _COUNTS

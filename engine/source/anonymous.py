"""Lambda functions and comprehensions, converted to the syntax of functions with statements."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

from engine.source.function_text import syntax_of_file, text_of
from engine.source.instructions import positions

__all__ = ["anonymous_function", "is_anonymous"]

_KINDS: dict[str, type[ast.expr]] = {
    "<lambda>": ast.Lambda,
    "<listcomp>": ast.ListComp,
    "<setcomp>": ast.SetComp,
    "<dictcomp>": ast.DictComp,
    "<genexpr>": ast.GeneratorExp,
}


def is_anonymous(name: str) -> bool:
    """Whether code is that of a lambda function or a comprehension, by its name.

    Example:
        >>> is_anonymous("<lambda>"), is_anonymous("forward")
        (True, False)
    """
    return name in _KINDS


def anonymous_function(code: CodeType) -> ast.FunctionDef | None:
    """Return the syntax of a lambda function or a comprehension as that of a function; None without source.

    A comprehension becomes a loop over its argument, which Python calls ``.0``, that returns the result for an item.
    The syntax of the argument has the expression that it stands for as ``outside``.

    Args:
        code: of the lambda function or the comprehension.

    Example:
        >>> code = compile("[f(x) for x in items if x > 3]", "<string>", "eval").co_consts[0]
        >>> anonymous_function(code) is None  # no file holds it
        True
    """
    spans = list(_spans(code))
    if not spans:
        return None
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    around = [node for node in _expressions(text_of(code), code.co_name) if _contains(node, first, last)]
    return _function(max(around, key=_start), code.co_name) if around else None


def _spans(code: CodeType) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the start and the end of instructions in the text; those that set up a frame have no position."""
    for line, end, column, last in positions(code):
        if line is not None and end is not None and column is not None and last is not None and column != last:
            yield (line, column), (end, last)


@functools.lru_cache(maxsize=64)
def _expressions(text: str, name: str) -> Sequence[ast.expr]:
    """Return the lambda functions, or the comprehensions of one kind, in the text of a file."""
    try:
        tree = syntax_of_file(text)
    except (SyntaxError, ValueError):
        return ()
    return [node for node in ast.walk(tree) if isinstance(node, _KINDS[name])]


def _start(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _contains(node: ast.expr, first: tuple[int, int], last: tuple[int, int]) -> bool:
    return _start(node) <= first and last <= (node.end_lineno or 0, node.end_col_offset or 0)


def _function(node: Any, name: str) -> ast.FunctionDef:
    if isinstance(node, ast.Lambda):
        body: ast.stmt = _placed(ast.Return(node.body), node.body)
        arguments = node.args
    else:
        result = node.elt if not isinstance(node, ast.DictComp) else _pair(node)
        body = _placed(ast.Return(result), result)
        for place, generator in reversed(list(enumerate(node.generators))):
            for test in reversed(generator.ifs):
                body = _placed(ast.If(test, [body], []), test)
            items: Any = generator.iter
            if not place:
                items = _placed(ast.Name(".0", ast.Load()), generator.iter)
                items.outside = generator.iter
            body = _placed(ast.For(generator.target, items, [body], []), node)
        arguments = ast.arguments([], [ast.arg(".0")], None, [], [], None, [])
    return _placed(ast.FunctionDef(name, arguments, [body], []), node)  # type: ignore[no-any-return]


def _pair(node: ast.DictComp) -> ast.Tuple:
    pair = _placed(ast.Tuple([node.key, node.value], ast.Load()), node.key)
    pair.end_lineno, pair.end_col_offset = node.value.end_lineno, node.value.end_col_offset
    return pair  # type: ignore[no-any-return]


def _placed(node: Any, at: ast.AST) -> Any:
    return ast.copy_location(node, at)

"""Functions of a model's code that build it, so that their writes do not happen while the model runs.

These are functions with certain names, and private methods that only constructors call.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
from collections.abc import Iterable, Iterator
from types import CodeType

from engine.source.decorated import functions_behind
from engine.source.function_text import syntax_of, syntax_of_file
from engine.source.static_attributes import table_of

__all__ = [
    "called_by_constructors_only",
    "classes_inside",
    "functions_of",
    "is_setup",
    "run_by_forward",
    "syntax_of_python_module",
]

_PREFIXES = (
    *("__init__", "__post_init__", "__setstate__", "__new__", "__deepcopy__", "_init", "init", "_reset", "reset_param"),
    *("_load", "load", "from_", "_from_", "convert", "_convert", "build", "_build", "make", "create", "_make"),
    *("_create", "half", "float", "double", "register", "_register", "fuse", "_apply", "apply", "set_input"),
    *("test_", "copy_", "parse", "_parse", "prune_intermediate", "reset_classifier", "set_window"),
    *("reparam", "switch_to_deploy"),
)
"""Prefixes of the names of functions that build or convert a model."""

_CONSTRUCTORS = ("__init__", "__new__", "__post_init__")


def is_setup(name: str) -> bool:
    """Whether a function builds or converts a model, by its name.

    Args:
        name: of the function.

    Example:
        >>> is_setup("__init__"), is_setup("forward")
        (True, False)
    """
    return name.startswith(_PREFIXES)


def functions_of(cls: type) -> Iterator[tuple[str, CodeType]]:
    """Yield the functions of a class by name: methods, properties, and functions behind decorators.

    Args:
        cls: the class, without its bases.

    Example:
        >>> class Net:
        ...     @property
        ...     def width(self):
        ...         return 8
        >>> [name for name, code in functions_of(Net)]
        ['width']
    """
    for name, item in vars(cls).items():
        yield from ((name, function.__code__) for function in functions_behind(item, cls.__module__))


def classes_inside(cls: type) -> Iterator[type]:
    """Yield the classes of the same Python module that a class holds, and those that they hold, each once.

    Classes may hold one another, or themselves: partners, registries, the two sides of an ``autograd.Function``.

    Args:
        cls: the class that holds others; it is not yielded.

    Example:
        >>> class Net:
        ...     class Config: ...
        >>> Net.Config.of = Net
        >>> [inner.__name__ for inner in classes_inside(Net)]
        ['Config']
    """
    waiting, seen = [cls], {cls}
    while waiting:
        holder = waiting.pop()
        for item in list(vars(holder).values()):
            if isinstance(item, type) and item.__module__ == holder.__module__ and item not in seen:
                seen.add(item)
                waiting.append(item)
                yield item


@functools.cache
def called_by_constructors_only(python_modules: frozenset[str]) -> frozenset[str]:
    """Return the names of private methods that only constructors call, directly or through one another.

    Args:
        python_modules: names of the Python modules whose code counts.

    Example:
        >>> called_by_constructors_only(frozenset({"torch.nn.modules.rnn"}))
        frozenset()
    """
    functions = [pair for name in python_modules for pair in _functions_in(name)]
    private = {name for name, _ in functions if name.startswith("_") and not name.startswith("__")}
    trees = [syntax_of_python_module(name) for name in python_modules]
    if None in trees:  # without the source there may be an alias, or a table of hooks
        return frozenset()
    private = private.difference(*map(_mentioned_outside_of_functions, trees))
    builders = set(_CONSTRUCTORS)
    while more := private - builders - _mentioned(code for name, code in functions if name not in builders):
        codes = [code for name, code in functions if name in builders]
        called = {name for name in more if any(name in code.co_names for code in codes)}
        called = {name for name in called if all(_calls(code, name) for code in codes)}
        if not called:
            break
        builders |= called
    return frozenset(builders.difference(_CONSTRUCTORS))


@functools.cache
def run_by_forward(classes: frozenset[type]) -> frozenset[str]:
    """Return the names of the functions that a forward or a step may run, judging by names alone.

    Args:
        classes: of a model's modules, and their bases.

    Example:
        >>> import torch
        >>> sorted(name for name in run_by_forward(frozenset({torch.nn.LSTM})) if name.startswith("check"))
        ['check_forward_args', 'check_hidden_size', 'check_input']
    """
    functions: dict[str, list[CodeType]] = {}
    pairs = [pair for name in {cls.__module__ for cls in classes} for pair in _functions_in(name)]
    for name, code in (*pairs, *(pair for cls in classes for pair in functions_of(cls))):
        functions.setdefault(name, []).append(code)
    reached = {"forward"} | {name for name in functions if name.endswith(("_step", "__call__"))}
    waiting = list(reached)
    while waiting:
        more = _mentioned(functions.get(waiting.pop(), ())) & functions.keys() - reached
        reached |= more
        waiting += more
    return frozenset(reached)


def _functions_in(python_module: str) -> Iterator[tuple[str, CodeType]]:
    for name, item in list(table_of(sys.modules.get(python_module)).items()):
        if isinstance(item, type):
            yield from functions_of(item) if item.__module__ == python_module else ()
        else:
            own = (f for f in functions_behind(item, python_module) if f.__module__ == python_module)
            yield from ((name, function.__code__) for function in own)


def _mentioned(codes: Iterable[CodeType]) -> set[str]:
    """Return the names that functions read, and the strings in them, which may be names."""
    result: set[str] = set()
    for code in codes:
        result.update(code.co_names)
        result.update(constant for constant in code.co_consts if isinstance(constant, str))
        result |= _mentioned(constant for constant in code.co_consts if isinstance(constant, CodeType))
    return result


def syntax_of_python_module(python_module: str) -> ast.Module | None:
    """Return the syntax of a Python module; None without its source."""
    lines = linecache.getlines(str(table_of(sys.modules.get(python_module)).get("__file__")))
    try:
        return syntax_of_file("".join(lines)) if lines else None
    except (SyntaxError, ValueError):
        return None


def _mentioned_outside_of_functions(tree: ast.Module | None) -> set[str]:
    """Return the names and strings in the code of a Python module and its classes: an alias, a table of hooks."""
    result: set[str] = set()
    waiting: list[ast.AST] = [] if tree is None else [tree]
    while waiting:
        node = waiting.pop()
        body = node.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else []
        waiting += [child for child in ast.iter_child_nodes(node) if child not in body]
        if isinstance(node, (ast.Name, ast.Attribute)):
            result.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            result.add(node.value)
    return result


def _calls(code: CodeType, name: str) -> bool:
    """Whether a function only calls a method; with any other use, the method might be a hook."""
    if name not in _mentioned([code]):
        return True
    tree = syntax_of(code)
    if tree is None or any(isinstance(n, ast.Constant) and n.value == name for n in ast.walk(tree)):
        return False
    nested = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    later = {inner for n in ast.walk(tree) if isinstance(n, nested) and n is not tree for inner in ast.walk(n)}
    called = {n.func for n in ast.walk(tree) if isinstance(n, ast.Call) and n not in later}
    return all(n in called for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == name)

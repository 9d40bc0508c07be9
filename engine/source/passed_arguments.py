"""The arguments that the caller of a running function passes."""

from __future__ import annotations

import ast
import inspect
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules import module as torch_module

from engine.source.bindings import Function
from engine.source.expressions_at import expression_at, file_syntax, is_literal

__all__ = ["PassedArgument", "function_of", "has_fixed_default", "home", "passed_argument"]

_CALLS_OF_MODULES = torch_module.__file__
_ENGINE = __name__.partition(".")[0] + "."


class PassedArgument(NamedTuple):
    """An argument of a running function.

    Attributes:
        frame: of the caller.
        expression: the passed expression; None if the default is used.
    """

    frame: FrameType
    expression: ast.expr | None


def home(name: str, frame: FrameType) -> FrameType:
    """Return the running function to which a variable belongs; for a comprehension, it may be the enclosing one."""
    around: FrameType | None = frame
    while around is not None and name in around.f_code.co_freevars:
        inner, around = around.f_code, around.f_back
        while around is not None and inner not in around.f_code.co_consts:
            around = around.f_back
    return frame if around is None else around


def function_of(frame: FrameType) -> Function | None:
    """Return the syntax of a running function; None without source."""
    return file_syntax(frame.f_code).functions.get(frame.f_code.co_firstlineno)


def has_fixed_default(name: str, frame: FrameType) -> bool:
    """Whether the default of an argument is the same in every call of the running function.

    Python evaluates it when the function is defined: once, unless another function defines it (``def cut(h, k=n)``).
    """
    function = function_of(frame)
    if function is None:
        return False
    arguments = [*function.args.posonlyargs, *function.args.args]
    named = [*zip(reversed(arguments), reversed(function.args.defaults), strict=False)]
    named += [pair for pair in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True) if pair[1]]  # type: ignore[misc]
    default = next((default for argument, default in named if argument.arg == name), None)
    is_inner = "<locals>" in getattr(frame.f_code, "co_qualname", "<locals>")
    return default is not None and (is_literal(default) or not is_inner)


def passed_argument(name: str, frame: FrameType) -> PassedArgument | None:
    """Return the argument that a running function's caller passes.

    Args:
        name: of the argument.
        frame: of the function.

    Returns:
        None if the call does not name the function, or a module with this forward, because a wrapper may pass something
        else. None, too, if the call unpacks a sequence or a mapping, or if a hook of the module may change its
        arguments.
    """
    function, caller = function_of(frame), frame.f_back
    of_module = caller is not None and caller.f_code.co_filename == _CALLS_OF_MODULES
    while of_module and caller is not None and caller.f_code.co_filename == _CALLS_OF_MODULES:
        caller = caller.f_back
    call = None if caller is None else expression_at(caller.f_code, caller.f_lasti)
    if function is None or caller is None or not isinstance(call, ast.Call):
        return None
    skipped = _skipped_arguments(_held(call.func, caller), frame.f_code, of_module)
    if skipped is None:
        return None
    if any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
        return None
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args)][skipped:]
    passed: dict[str | None, ast.expr] = dict(zip(names, call.args, strict=False))
    passed.update((keyword.arg, keyword.value) for keyword in call.keywords)
    return PassedArgument(caller, passed.get(name))


def _skipped_arguments(called: Any, code: CodeType, of_module: bool) -> int | None:
    """Return the number of arguments that are bound already (``self``); None if something else is called."""
    if of_module:
        if not isinstance(called, nn.Module) or _has_hooks_before(called):
            return None
        called = vars(called).get("forward", MethodType(inspect.getattr_static(type(called), "forward"), called))
    function = called.__func__ if isinstance(called, MethodType) else called
    if not isinstance(function, FunctionType) or function.__code__ is not code:
        return None
    return int(isinstance(called, MethodType))


def _has_hooks_before(module: nn.Module) -> bool:
    """Whether a hook, other than those of a recording, may change the arguments of a module."""
    hooks = [*module._forward_pre_hooks.values(), *torch_module._global_forward_pre_hooks.values()]
    return not all(str(getattr(hook, "__module__", "")).startswith(_ENGINE) for hook in hooks)


def _held(expr: ast.expr, frame: FrameType) -> Any:
    """Return the value of a name or an attribute in a running function, without running any code."""
    if isinstance(expr, ast.Name):
        own = home(expr.id, frame)
        spaces = (own.f_locals, own.f_globals, own.f_builtins)
        return next((space[expr.id] for space in spaces if expr.id in space), None)
    if not isinstance(expr, ast.Attribute):
        return None
    owner = _held(expr.value, frame)
    own_attributes = getattr(owner, "__dict__", {})
    for table in (own_attributes, own_attributes.get("_modules") or {}):
        if expr.attr in table:
            return _unwrapped(table[expr.attr], owner)
    attribute = inspect.getattr_static(type(owner), expr.attr, None)
    return MethodType(attribute, owner) if isinstance(attribute, FunctionType) else _unwrapped(attribute, type(owner))


def _unwrapped(attribute: Any, cls: Any) -> Any:
    """Return the function behind a static method, and a class method with its class."""
    if isinstance(attribute, staticmethod):
        return attribute.__func__
    return MethodType(attribute.__func__, cls) if isinstance(attribute, classmethod) else attribute

"""The modules around a model that an entry reaches: they are not changed, and their tensors vary."""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.modules import module as module_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from engine.limits import DEEPEST_OUTER
from engine.program.entries import Entry
from engine.program.stored import distinct_modules
from engine.recording.recorder import Recorder
from engine.running.evaluation import evaluating

__all__ = ["preserving_outer_modules", "module_stack", "outer_modules"]


@contextmanager
def preserving_outer_modules(entry: Entry, model: nn.Module) -> Iterator[list[nn.Module]]:
    """Run the body with the modules around the model in the mode of an entry, without leaving a trace on them.

    Torch's own norms and dropout stay in eval mode, as those of the model do.

    Args:
        entry: the entry that runs.
        model: the model, which is not changed.

    Yields:
        The modules around the model.
    """
    outer = outer_modules((entry.call, entry.args, dict(entry.kwargs)), model)
    with ExitStack() as scope:
        for module in outer:
            inside = [m for m in distinct_modules(module).values() if not _is_layer(m)]
            scope.enter_context(evaluating(module, inside if entry.training else (), (entry.args, entry.kwargs)))
        yield outer


def outer_modules(value: Any, model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules outside the model that a callable and its arguments reach.

    The search covers owners of methods, closures, defaults, partial functions, modules among a function's globals,
    attributes of plain objects, and containers.

    Args:
        value: the callable with its arguments.
        model: the model, whose own modules are omitted.

    Example:
        >>> inner, outer = nn.ReLU(), nn.Linear(1, 1)
        >>> outer_modules(lambda x: outer(inner(x)), inner) == [outer]
        True
    """
    own = {id(module) for module in distinct_modules(model).values()}
    result: dict[int, nn.Module] = {}
    for module in _modules(value, set(), DEEPEST_OUTER):
        if id(module) not in own:
            result.setdefault(id(module), module)
    inner = {id(part) for module in result.values() for part in module.modules() if part is not module}
    return [module for module in result.values() if id(module) not in inner]


def _is_layer(module: nn.Module) -> bool:
    """Whether a module is one of torch's own layers, of which only the ops depend on the mode."""
    return type(module).__module__.startswith("torch.nn.modules") and not any(True for _ in module.children())


def _modules(value: Any, seen: set[int], depth: int) -> Iterator[nn.Module]:
    if id(value) in seen or not depth:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield value
    for part in _parts(value):
        yield from _modules(part, seen, depth - 1)


def _parts(value: Any) -> list[Any]:
    """Return the contents of a value; of a module, those of the lists and dictionaries that it does not register."""
    if isinstance(value, nn.Module):
        return [part for part in vars(value).values() if isinstance(part, (dict, list, tuple, set, nn.Module))]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        wide = [value.__globals__.get(name) for name in value.__code__.co_names]
        return [*cells, *(value.__defaults__ or ()), *(part for part in wide if isinstance(part, nn.Module))]
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set)):
        return list(value)
    plain = hasattr(value, "__dict__") and not isinstance(value, type)
    return list(vars(value).values()) if plain else []


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - a cell that is assigned later raises
    except ValueError:
        return False
    return True


@contextmanager
def module_stack(
    names: Mapping[int, str], stack: list[str], recorder: Recorder, opaque: Collection[str]
) -> Iterator[None]:
    """Keep the name of the running module on top of ``stack``, and notify the recorder of opaque modules."""

    thread = threading.get_ident()  # others may run the same modules meanwhile

    def enter(module: nn.Module, args: Any) -> None:
        if id(module) in names and threading.get_ident() == thread:
            stack.append(names[id(module)])
            if names[id(module)] in opaque:
                recorder.enter(module)

    def leave(module: nn.Module, args: Any, *rest: Any) -> None:  # without keywords where the forward raised
        if id(module) in names and threading.get_ident() == thread:
            try:
                if names[id(module)] in opaque:
                    recorder.leave(module, args, rest[0] if len(rest) > 1 else {}, rest[-1])
            finally:
                stack.pop()

    hooks = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, with_kwargs=True, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
            # torch forgets this entry, and warns of it whenever a model is compiled afterwards
            module_hooks._global_forward_hooks_with_kwargs.pop(hook.id, None)

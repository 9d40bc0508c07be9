"""Reads by the model's code of how it runs (train mode, gradients, autocast), and whether the answers matter.

A run that never asks is the same either way. If it asks, the other answer is recorded, too: reads of ``training`` are
watched for every module whose class is not torch's own, however the attribute is read; and the functions that return
whether gradients or autocast are on return the other answer in a separate run.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engine.program.stored import distinct_modules
from engine.source.model_code import module_namespaces
from engine.source.sites import ENGINE, is_exchanged, is_library

__all__ = ["SWITCHES", "Calls", "Switches", "may_differ", "watched"]


@functools.cache
def _is_torch_code(cls: type) -> bool:
    """Whether all of a class's code is that of torch's own layers, which only pass ``self.training`` to their op."""
    own = [base for base in cls.__mro__ if base is not object and not is_exchanged(base)]
    return all(base.__module__.startswith("torch.nn.modules") for base in own)


@functools.cache
def _names_training(cls: type) -> bool:
    """Whether code of the class contains the name as a string, with which it may look up the attribute unnoticed."""
    functions = [f for base in cls.__mro__ if not _is_torch_code(base) for f in vars(base).values()]
    codes = [getattr(getattr(f, "__wrapped__", f), "__code__", None) for f in functions]
    return any("training" in code.co_consts for code in codes if code is not None)


def may_differ(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose path may differ in train mode: all with code other than that of torch's own layers."""
    return [m for m in distinct_modules(model).values() if not _is_torch_code(type(m))]  # type: ignore[arg-type]


class _Watch:
    """Replaces ``training`` in a class, and notes the modules from which it is read."""

    def __init__(self) -> None:
        self.seen: list[set[int]] = []

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None:
            return self
        for seen in self.seen:
            seen.add(id(module))
        return vars(module)["training"]

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)["training"] = value


@contextmanager
def watched(modules: Iterable[nn.Module]) -> Iterator[set[int]]:
    """Yield the identities of the modules whose ``training`` is read while the body runs.

    Modules of classes that define ``training`` themselves, or whose code contains the name as a string, count as read.
    Nested calls share one watch.

    Example:
        >>> layer, other = nn.Sequential(), nn.Sequential()
        >>> with watched([layer, other]) as seen:
        ...     print(layer.training, seen == {id(layer)})
        True True
        >>> "training" in vars(nn.Sequential)
        False
    """
    inspected = list(modules)
    seen: set[int] = set()
    classes = {type(m) for m in inspected}
    attributes = {cls: [vars(base)["training"] for base in cls.__mro__ if "training" in vars(base)] for cls in classes}
    own = {cls for cls, values in attributes.items() if any(not isinstance(value, _Watch) for value in values)}
    seen |= {id(m) for m in inspected if type(m) in own or _names_training(type(m))}  # type: ignore[arg-type]
    watches = []
    for cls in classes - own:
        if not isinstance(vars(cls).get("training"), _Watch):
            cls.training = _Watch()  # type: ignore[assignment]
        watches.append((cls, vars(cls)["training"]))
        watches[-1][1].seen.append(seen)
    try:
        yield seen
    finally:
        for cls, watch in watches:
            watch.seen[:] = [other for other in watch.seen if other is not seen]
            if not watch.seen:
                del cls.training


class Calls:
    """The first call in the body of each module without children; a direct call of ``forward`` is not noticed.

    Tensors are referenced weakly, because a tensor that is kept counts as outliving the call.
    """

    def __init__(self) -> None:
        self._calls: dict[int, Any] = {}

    def arguments(self, module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the positional and keyword arguments of a module's call, or None if they are not available."""
        call = self._calls.get(id(module))
        return None if call is None else _mapped(call, lambda leaf: leaf() if isinstance(leaf, _Ref) else leaf)

    @contextmanager
    def of(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Note the calls of modules while the body runs."""
        leaves = [m for m in modules if not any(part is not None for part in m._modules.values())]
        hooks = [m.register_forward_pre_hook(self._note, with_kwargs=True) for m in leaves]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if id(module) not in self._calls:
            self._calls[id(module)] = _mapped(
                (args, kwargs), lambda leaf: _Ref(leaf) if isinstance(leaf, Tensor) else leaf
            )


_Ref = weakref.ref


def _mapped(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """Map the leaves of nested tuples, lists and dictionaries; None if they contain anything else."""
    if isinstance(tree, dict):
        values = {key: _mapped(value, leaf) for key, value in tree.items()}
        return None if any(v is None and tree[k] is not None for k, v in values.items()) else values
    if type(tree) in (tuple, list):
        items = [_mapped(value, leaf) for value in tree]
        return None if any(v is None and t is not None for v, t in zip(items, tree, strict=True)) else type(tree)(items)
    return leaf(tree) if isinstance(tree, (Tensor, _Ref, int, float, str, torch.dtype, type(None))) else None


SWITCHES: Mapping[str, bool] = {
    "is_grad_enabled": True,
    "is_inference_mode_enabled": False,
    "is_autocast_enabled": True,
    "requires_grad": True,
}
"""Functions of torch that return how code runs, by name, each with the other answer, which a further run records.

The last one is an attribute of tensors, which is False for all tensors if gradients are off.
"""

_REQUIRES_GRAD: Any = inspect.getattr_static(Tensor, "requires_grad")


class Switches:
    """Watches the model's code ask torch how it runs, and gives the other answer on request.

    Torch's own code gets the true answer. The functions, and the attribute of tensors, are replaced in torch, and under
    every name in the Python modules of the model's classes, while the body runs.

    Args:
        model: the model whose code may ask.

    Attributes:
        asked: names of the functions that were called, or of the attribute if it was read.

    Example:
        >>> switches = Switches(nn.ReLU())
        >>> with switches.answering(otherwise="is_grad_enabled"), torch.no_grad():
        ...     eval("torch.is_grad_enabled()", {"torch": torch})
        True
        >>> switches.asked
        {'is_grad_enabled'}
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.asked: set[str] = set()

    @contextmanager
    def answering(self, otherwise: str | None = None) -> Iterator[None]:
        """Watch while the body runs.

        Args:
            otherwise: the function that gives the other answer, or None.
        """
        own = {name: getattr(torch, name) for name in SWITCHES if hasattr(torch, name)}
        names = {id(function): name for name, function in own.items()}
        spaces = [vars(torch), *module_namespaces(self._model)]
        places = [
            (space, key, names[id(value)])
            for space in spaces
            for key, value in list(space.items())
            if id(value) in names
        ]
        answers = {name: self._answer(name, function, name == otherwise) for name, function in own.items()}
        for space, key, name in places:
            space[key] = answers[name]
        outer = vars(Tensor).get("requires_grad")
        Tensor.requires_grad = self._attribute(otherwise == "requires_grad")  # type: ignore[assignment]
        try:
            yield
        finally:
            del Tensor.requires_grad
            if outer is not None:
                Tensor.requires_grad = outer
            for space, key, name in places:
                space[key] = own[name]

    def _attribute(self, otherwise: bool) -> property:
        thread = threading.get_ident()  # others go on beside the recording

        def requires_grad(tensor: Tensor) -> bool:
            own: bool = _REQUIRES_GRAD.__get__(tensor)
            file = sys._getframe(1).f_code.co_filename
            if is_library(file) or file.startswith(ENGINE) or threading.get_ident() != thread:
                return own
            self.asked.add("requires_grad")
            return own or otherwise

        return property(requires_grad, _REQUIRES_GRAD.__set__)

    def _answer(self, name: str, function: Callable[..., bool], otherwise: bool) -> Callable[..., bool]:
        @functools.wraps(function)
        def answer(*args: Any) -> bool:
            if is_library(sys._getframe(1).f_code.co_filename):
                return function(*args)
            self.asked.add(name)
            return SWITCHES[name] if otherwise else function(*args)

        return answer

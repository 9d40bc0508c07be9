"""Running a model in eval mode without leaving a trace on it."""

from __future__ import annotations

import collections.abc
import copy
import functools
import operator
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from engine.errors import TraceError
from engine.program.storages import storage_of
from engine.program.stored import HISTORY, PART, distinct_modules
from engine.running.caches import clearing_caches
from engine.running.process import EXCLUSIVE, unchanged_process
from engine.running.snapshot import Snapshot
from engine.source.model_code import module_namespaces, user_classes

__all__ = ["Contents", "State", "evaluating", "preserving_buffers", "sharing_contents"]

_LATEST: ContextVar[list[tuple[Any, list[Any], Snapshot]] | None] = ContextVar("_LATEST", default=None)
"""The latest snapshot of the Python modules of a model's code, with its roots; None while nobody shares it."""


@contextmanager
def evaluating(
    model: nn.Module, train: Iterable[nn.Module] = (), arguments: Any = (), contents: Contents | None = None
) -> Iterator[State]:
    """Run the body in eval mode (``train`` names the modules that stay in train mode), leaving no trace on the model.

    Restored afterwards: modes; module attributes, with the contents of containers and objects among them, in the
    ``arguments``, and in the classes, closures and Python modules of the model's code; the identity of buffers; the
    memory that parameters and buffers stand for (``self.weight.data = …``); random states and flags of the process. One
    thread runs it at a time. ``contents`` are those of the model and the arguments; several runs may share them,
    because none leaves a trace.

    Yields:
        The state of the model before the body.

    Raises:
        TraceError: where an attribute is an iterator that cannot be copied, once the body advances it.
    """
    with EXCLUSIVE:
        modules = list(distinct_modules(model).values())
        state = State(model, modules, arguments, contents)
        with (
            torch.random.fork_rng(devices=_cuda_devices(modules)),
            _uncompiled(),
            clearing_caches(model),
            unchanged_process(),
        ):
            try:
                torch.backends.mha.set_fastpath_enabled(False)  # it would hide the attention in one fused op
                training = set(map(id, train))
                for m in modules:
                    m.training = id(m) in training
                state.lend_iterators()
                yield state
            finally:
                state.restore()


@contextmanager
def preserving_buffers(model: nn.Module) -> Iterator[None]:
    """Run the body on real data, and restore the contents of the buffers afterwards."""
    buffers = [(b, b.clone()) for b in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


@contextmanager
def sharing_contents() -> Iterator[None]:
    """Let runs in the body share the snapshot of the Python modules of a model's code.

    Each run checks that nothing has changed, which takes a fraction of the time of a new snapshot.

    Example:
        >>> with sharing_contents():
        ...     first, second = (Contents(nn.ReLU(), ()) for _ in range(2))
        >>> first.differ() or second.differ()
        False
    """
    if _LATEST.get() is not None:
        yield
        return
    token = _LATEST.set([])
    try:
        yield
    finally:
        _LATEST.reset(token)


class Contents:
    """The contents of containers and objects of a model, of its hooks and arguments, and of its code's Python modules.

    Args:
        model: the model.
        arguments: arguments of its call.
    """

    def __init__(self, model: nn.Module, arguments: Any) -> None:
        modules = [m for m in distinct_modules(model).values() if not _is_scripted(m)]
        stored = {id(t): t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None}
        roots = [value for m in modules for value in _own_values(vars(m))]
        skip = (*stored.values(), *modules)
        self._own = Snapshot([*roots, *_flat(arguments)], model, skip)
        classes = user_classes(model)
        names = [*map(vars, classes), *module_namespaces(model)]
        shared = [value for table in names for value in list(table.values()) if _may_hold(value)]
        # what a Python module holds of other packages (loggers, registries) is not a state of a model
        packages = {cls.__module__.partition(".")[0] for cls in classes}
        self._shared = _snapshot_of_code(shared, model, skip, packages)
        hooks = [hook for m in modules for name in _HOOKS for hook in vars(m).get(name, {}).values()]
        self._hooks = Snapshot([hook for hook in hooks if not _is_ours(hook)], model, skip, packages | {"__main__"})

    def differ(self) -> bool:
        """Whether anything changed."""
        return self._own.differs() or self._shared.differs() or self._hooks.differs()

    def restore(self) -> None:
        """Put back what changed."""
        self._own.restore()
        self._shared.restore()
        self._hooks.restore()


def _is_ours(hook: Any) -> bool:
    """Whether a hook is one of the engine's, which notes what it sees on purpose."""
    function = hook.func if isinstance(hook, functools.partial) else hook
    return str(getattr(function, "__module__", "")).startswith(f"{__name__.partition('.')[0]}.")


def _snapshot_of_code(roots: list[Any], model: nn.Module, skip: tuple[Any, ...], packages: set[str]) -> Snapshot:
    """Return a snapshot of the Python modules of a model's code: the latest one, if it is still up to date."""
    latest = _LATEST.get()
    start = id(model), packages, *map(id, roots), len(roots), *map(id, skip)
    if latest and latest[0][0] == start and not latest[0][-1].differs():
        return latest[0][-1]
    snapshot = Snapshot(roots, model, skip, packages)
    if latest is not None:
        latest[:] = [(start, roots, snapshot)]
    return snapshot


class State:
    """The state of a model before it runs."""

    def __init__(
        self, model: nn.Module, modules: list[nn.Module], arguments: Any, contents: Contents | None = None
    ) -> None:
        self._modules = [(m, type(m), dict(vars(m))) for m in modules if not _is_scripted(m)]
        self._scripted = [(m, m.training) for m in modules if _is_scripted(m)]
        tensors = [t for m, *_ in self._modules for t in (*m._parameters.values(), *m._buffers.values())]
        stored = list({id(t): t for t in tensors if t is not None}.values())
        self._memory = [(t, t.data) for t in stored if _is_plain(t)]
        self._gradients = [(t, t.requires_grad, t.grad) for t in stored if isinstance(t, nn.Parameter)]
        self._classes = [(cls, dict(vars(cls))) for cls in user_classes(model)]
        self._names = [(space, dict(space)) for space in module_namespaces(model)]
        tables = [attributes[name] for _, _, attributes in self._modules for name in _TABLES if name in attributes]
        self._tables = [(table, table.copy() if table else _EMPTY) for table in tables]
        self._iterators = False
        self._contents = Contents(model, arguments) if contents is None else contents

    def lend_iterators(self) -> None:
        """Let the body advance copies of the iterators among the attributes."""
        tables = [(vars(m), attributes, type(m).__name__) for m, _, attributes in self._modules]
        for table, before, owner in (*tables, *((space, names, names["__name__"]) for space, names in self._names)):
            for name, value in before.items():
                if _is_iterator(type(value)):  # type: ignore[arg-type]
                    table[name] = _copied(value, f"{owner}.{name}")
                    self._iterators = True

    def differs(self) -> bool:
        """Whether anything around the modules has changed; an iterator that may have advanced counts."""
        spaces = [(space, name, value) for space, names in self._names for name, value in names.items()]
        if any(_is_state(value) and space.get(name) is not value for space, name, value in spaces):
            return True
        classes = [(cls, name, value) for cls, attributes in self._classes for name, value in attributes.items()]
        changed = any(vars(cls).get(name) is not value for cls, name, value in classes)
        return changed or self._iterators or self._contents.differ()

    def restore(self) -> None:
        """Put back what changed."""
        for m, kind, attributes in self._modules:
            if type(m) is not kind:
                object.__setattr__(m, "__class__", kind)
            _restore_table(vars(m), attributes)
        for table, entries in self._tables:
            if table or entries:
                _restore_table(table, entries)
        for m, training in self._scripted:
            m.training = training
        for cls, attributes in self._classes:
            _restore_class(cls, attributes)
        for space, names in self._names:
            _restore_names(space, names)
        self._contents.restore()
        for tensor, data in self._memory:
            if not _same_memory(tensor, data):
                tensor.data = data
        for tensor, requires_grad, grad in self._gradients:
            if tensor.requires_grad is not requires_grad:
                tensor.requires_grad_(requires_grad)
            if tensor.grad is not grad:
                tensor.grad = grad


@functools.cache
def _is_iterator(kind: type) -> bool:
    """Whether a class is one of Python's own iterators, or that of a data loader."""
    return kind.__module__ in (*_MODULES, _LOADERS) and issubclass(kind, collections.abc.Iterator)


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _cuda_devices(modules: Iterable[nn.Module]) -> list[int]:
    """Return the indices of the CUDA devices of parameters and buffers, whose generators a run may advance."""
    tensors = (t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None)
    return sorted({t.device.index for t in tensors if t.device.type == "cuda"})


_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), HISTORY, PART})


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

_TABLES = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
_EMPTY: dict[str, Any] = {}


def _own_values(attributes: dict[str, Any]) -> Iterator[Any]:
    """Yield the attributes that a class adds, and that may hold something."""
    for name, value in attributes.items():
        if name not in _OF_EVERY_MODULE and type(value) not in _PLAIN and not _is_flat(value):
            yield value


def _is_flat(value: Any) -> bool:
    return type(value) is tuple and all(type(item) in _PLAIN for item in value)


_PLAIN = (type(None), bool, int, float, str)
_MODULES = ("builtins", "itertools")  # of the classes of iterators
_LOADERS = "torch.utils.data.dataloader"


def _may_hold(value: Any) -> bool:
    """Whether a call may leave anything in what a name of a class or a Python module stands for."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        return bool(value.__closure__ or value.__defaults__ or value.__kwdefaults__ or vars(value))
    return isinstance(value, (dict, list, set, collections.deque, Tensor))


def _flat(arguments: Any) -> list[Any]:
    """Return the objects among the arguments; tensors are inputs, which the recorder looks after."""
    items = arguments.values() if isinstance(arguments, dict) else arguments
    return [inner for item in items for inner in (_flat(item) if type(item) in (tuple, list, dict) else [item])]


def _restore_table(table: dict[str, Any], before: dict[str, Any]) -> None:
    same = len(table) == len(before) and all(map(operator.is_, table.values(), before.values()))
    if not same or not all(map(operator.is_, table, before)):
        table.clear()
        table.update(before)


def _restore_class(cls: type, before: dict[str, Any]) -> None:
    now = vars(cls)
    for name in [n for n in now if n not in before and n != "training"]:
        type.__delattr__(cls, name)
    for name, value in before.items():
        if name not in now or now[name] is not value:
            type.__setattr__(cls, name, value)


def _restore_names(space: dict[str, Any], before: dict[str, Any]) -> None:
    """Restore the names of a Python module; what it has imported since stays."""
    if len(space) != len(before) or any(space.get(n) is not v for n, v in before.items()):
        for name in [n for n, v in space.items() if n not in before and _is_state(v) and not n.startswith("__")]:
            del space[name]
        space.update({n: v for n, v in before.items() if space.get(n) is not v and _is_state(v)})


def _is_state(value: Any) -> bool:
    return not isinstance(value, (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type))


class _SpentIterator:
    """Stands in for a user's iterator that cannot be advanced and wound back."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __iter__(self) -> _SpentIterator:
        return self

    def __next__(self) -> Any:
        raise TraceError(
            f"The model's code advances the iterator {self._name!r}, which cannot be copied or wound back; keep a "
            "number or `itertools.count()` there, and let the Trainer draw batches (`CombinedLoader`)."
        )


def _copied(iterator: Any, name: str) -> Any:
    if type(iterator).__module__ == _LOADERS:  # a copy would be one of the data
        return _SpentIterator(name)
    try:
        return copy.deepcopy(iterator)
    except (TypeError, RuntimeError):  # a generator, or one over tensors of a computation
        return _SpentIterator(name)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    place = one.data_ptr()
    if place != other.data_ptr() or one.dtype is not other.dtype or one.stride() != other.stride():
        return False
    return one.shape == other.shape and (place != 0 or storage_of(one) == storage_of(other))


def _is_plain(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return type(tensor) in (nn.Parameter, Tensor) and tensor.layout is torch.strided  # type: ignore[union-attr]


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run compiled modules as Python code; otherwise torch would permanently mark their code as not compilable."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and asking would import the compiler
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield

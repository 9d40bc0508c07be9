"""Further ways to run a model besides its forward: training steps, methods, losses over parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any

from torch import nn

from engine.errors import InputError
from engine.program.defaults import callers_defaults

__all__ = ["PATHS", "TRAIN_PATHS", "Entry", "entries_of"]

TRAIN_PATHS = ("train", "train, other")
"""Paths of forward in train mode."""

PATHS = ("eval", "other", *TRAIN_PATHS)
"""Paths of forward itself; all other paths are names of entries."""


@dataclass(frozen=True, eq=False)
class Entry:
    """A further way to run a model: a callable that uses the model, with its arguments.

    Args:
        call: runs the model or reads its parameters: a method of the model or of a module that contains it, or a
            function that closes over it. Everything it returns is an output.
        args, kwargs: arguments of the call.
        training: whether to run in train mode; the certificate then compares gradients, too.
        name: name for messages; that of the callable by default.
        others: further arguments (positional, keyword) by a label for the difference ("batch 1"). If the call behaves
            differently with them, this becomes an entry of its own; arguments that it rejects are omitted.
        fixed: names of attributes of the running object that keep their values. Other attributes that code sets later
            are recorded at further values, too.
        after: called once there are gradients, like hooks of a training step: it may change gradients and parameters,
            which the certificate then compares again. It returns further numbers and tensors to compare, which it has
            left elsewhere, in a dictionary by description.
        explored: whether its other ways to run are entries already, as for the entries of a graph.

    Example:
        >>> import torch
        >>> import engine
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> penalty = engine.Entry(lambda: net[0].weight.abs().mean(), training=True)
        >>> graph = engine.trace(net, torch.zeros(5, 3), entries={"penalty": penalty})
        >>> [(node.op, node.path) for node in graph.nodes][-2:]
        [('abs', 'penalty'), ('mean', 'penalty')]
    """

    call: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    training: bool = False
    name: str = ""
    others: Mapping[str, tuple[tuple[Any, ...], Mapping[str, Any]]] = field(default_factory=dict)
    fixed: Collection[str] = ()
    after: Callable[[], Any] | None = None
    explored: bool = field(default=False, repr=False)

    def run(self, args: Any, kwargs: Any) -> Any:
        """Call the entry; a method is looked up again, because compaction may have exchanged its module's class.

        Args:
            args, kwargs: arguments in place of the entry's own.
        """
        call, owner = self.call, getattr(self.call, "__self__", None)
        if isinstance(call, MethodType) and isinstance(owner, nn.Module):
            call = getattr(owner, call.__name__, call)
        with callers_defaults():
            return call(*args, **kwargs)

    def ways(self) -> Iterator[Entry]:
        """Yield the entry with its further arguments, each on its own."""
        for label, (args, kwargs) in self.others.items():
            yield replace(self, args=args, kwargs=kwargs, name=f"{self.name}, {label}", others={})

    def at(self, setting: Sequence[tuple[nn.Module, str, Any]]) -> Entry:
        """Return the entry with other values of some attributes.

        Args:
            setting: modules, names of their attributes, and the values.
        """
        label = ", ".join(f"{name}={value!r}" for _, name, value in setting)
        return replace(self, call=_Setting(self, setting), name=f"{self.name}, {label}", others={})


class _Setting:
    """A call of an entry with other values of some attributes; the caller restores them."""

    def __init__(self, entry: Entry, setting: Sequence[tuple[nn.Module, str, Any]]) -> None:
        self._entry, self._setting = entry, setting

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Set the attributes, and call the entry."""
        for module, name, value in self._setting:
            vars(module)[name] = value
        return self._entry.run(args, kwargs)


def _entry(name: str | None, spec: Any) -> Entry:
    if isinstance(spec, Entry):
        entry = spec
    elif isinstance(spec, tuple) and spec and callable(spec[0]):
        entry = Entry(*spec)
    elif callable(spec):
        entry = Entry(spec)
    else:
        raise InputError(
            f"An entry is a callable, a tuple `(callable, args, kwargs)` or an `engine.Entry`; got {spec!r}."
        )
    if not callable(entry.call) or not isinstance(entry.args, (tuple, list)) or not isinstance(entry.kwargs, Mapping):
        raise InputError(f"The entry {spec!r} needs a callable, a tuple of arguments and a mapping of keywords.")
    own = getattr(entry.call, "__name__", type(entry.call).__name__)
    return replace(entry, args=tuple(entry.args), name=name or entry.name or own)


def entries_of(entries: Mapping[str, Any] | Sequence[Any] | None) -> tuple[Entry, ...]:
    """Return entries with unique names.

    Args:
        entries: by name, or in a sequence; each an `Entry`, a callable, or a tuple ``(callable, args, kwargs)``.

    Raises:
        InputError: for anything else, for duplicate names, and for names of forward's own runs.

    Example:
        >>> [entry.name for entry in entries_of({"loss": (max, (1, 2))})]
        ['loss']
    """
    if entries is None:
        return ()
    if not isinstance(entries, (Mapping, Sequence)) or isinstance(entries, str):
        raise InputError(f"`entries` is a mapping by name or a sequence; got a {type(entries).__name__}.")
    pairs = entries.items() if isinstance(entries, Mapping) else [(None, entry) for entry in entries]
    result = tuple(_entry(name, entry) for name, entry in pairs)
    names = [entry.name for entry in result]
    for name in names:
        if names.count(name) > 1 or name in PATHS:
            why = "is the name of two entries" if names.count(name) > 1 else "is the name of a run of forward"
            raise InputError(f"{name!r} {why}; name each entry, as in `entries={{'training_step': ...}}`.")
    return result

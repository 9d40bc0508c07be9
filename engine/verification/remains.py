"""Detection of state that a call leaves behind: then the certificate compares two consecutive calls."""

from __future__ import annotations

import weakref
from collections.abc import Container, Mapping
from typing import Any

from torch import nn

from engine.program.graph import Graph
from engine.program.stored import distinct_modules, stored_tensors
from engine.running.evaluation import State
from engine.verification.results import attributes

__all__ = ["Remains", "writes"]

_INSIDE = ("is read by the code", "could be read")
"""Prefixes of the reasons why a value counts as an output that cannot be narrowed."""

_TABLES = ("_parameters", "_buffers", "_modules")


def writes(graph: Graph) -> bool:
    """Whether the recorded call writes to stored tensors, or a tensor of it is kept.

    Example:
        >>> import engine, torch
        >>> writes(engine.trace(nn.ReLU(), torch.zeros(1, 2)))
        False
    """
    return bool(graph.written) or any(not how.startswith(_INSIDE) for how in graph.exits.values())


class Remains:
    """The state of a model before a call.

    Args:
        model: the model, with the tensors that are currently in its tables.
        state: the state that `evaluating` restores: containers, objects, classes and Python modules around the model.

    Attributes:
        before: the attributes of all modules.

    Example:
        >>> from engine.running.evaluation import evaluating
        >>> net = nn.ReLU()
        >>> with evaluating(net) as state:
        ...     remains = Remains(net, state)
        ...     net.calls = 1
        ...     remains.differ()
        True
    """

    def __init__(self, model: nn.Module, state: State) -> None:
        self._model, self._state = model, state
        self.before = attributes(model)
        self._tables = [dict(table) for table in _tables(model)]

    def differ(self) -> bool:
        """Whether anything has changed."""
        now, tables = attributes(self._model), list(_tables(self._model))
        if now.keys() != self.before.keys() or len(tables) != len(self._tables):
            return True
        own = set(map(id, stored_tensors(self._model).values()))
        pairs = [(now[name], self.before[name]) for name in now] + list(zip(tables, self._tables, strict=True))
        return any(_differ(*pair, own) for pair in pairs) or self._state.differs()


def _tables(model: nn.Module) -> list[dict[str, Any]]:
    return [vars(module)[name] for module in distinct_modules(model).values() for name in _TABLES]


def _differ(now: Mapping[str, Any], before: Mapping[str, Any], own: Container[int]) -> bool:
    changed = [value for name, value in now.items() if name not in before or value is not before[name]]
    return now.keys() != before.keys() or not all(_lists(value, own) for value in changed)


def _lists(value: Any, own: Container[int]) -> bool:
    """Whether a value is only a list of the model's own tensors, such as recurrent layers build at each call."""
    if not isinstance(value, list):
        return False
    return all(id(item() if isinstance(item, weakref.ref) else item) in own for item in value)

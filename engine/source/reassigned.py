"""Numbers in attributes and globals that code of a model assigns once the model is built, in whatever file.

The code that reads such a number may stand in another file than the code that sets it: a method of a model sets the
bound of a layer from another file, and a subclass anneals a number that the forward of its base class reads.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import nn

from engine.source.attribute_writes import assigned_anywhere, assigned_attributes, written_attributes

__all__ = ["Reassigned"]


class Reassigned:
    """Attributes and globals that the code of a model assigns, apart from code that builds, converts or loads it.

    Args:
        model: the code of its modules' classes counts, and all code in the same Python modules.

    Example:
        >>> reassigned = Reassigned(nn.Sequential(nn.Hardtanh(-2.0, 2.0)))
        >>> reassigned.attribute(nn.Hardtanh(), "min_val")  # no code of this model sets it
        False
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tables: Mapping[bool, Mapping[type, frozenset[str]]] | None = None
        self._of_others: dict[type | str, frozenset[str]] = {}

    def attribute(self, owner: Any, name: str) -> bool:
        """Whether code assigns to an attribute, or changes the contents of a list in it.

        Args:
            owner: a module, another object, a class, or a Python module.
            name: of the attribute.
        """
        if isinstance(owner, ModuleType):
            return self.variable(owner.__name__, name)
        kind = owner if isinstance(owner, type) else type(owner)
        by_class = self._by_class(isinstance(getattr(owner, "__dict__", {}).get(name), list))
        names = by_class[kind] if kind in by_class else self._anywhere(kind)
        return name in names

    def variable(self, python_module: str, name: str) -> bool:
        """Whether code of the model, or of the Python module that defines it, assigns to a global variable.

        Args:
            python_module: its name.
            name: of the variable.
        """
        return not python_module.startswith("torch.") and name in self._anywhere(python_module)

    def _by_class(self, contents: bool) -> Mapping[type, frozenset[str]]:
        if self._tables is None:
            self._tables = {False: assigned_attributes(self._model), True: written_attributes(self._model)}
        return self._tables[contents]

    def _anywhere(self, where: type | str) -> frozenset[str]:
        """Return what code of the model assigns to, or code of another class or Python module."""
        if where not in self._of_others:
            other = sys.modules.get(where) if isinstance(where, str) else where
            self._of_others[where] = assigned_anywhere(self._model, *([] if other is None else [other]))
        return self._of_others[where]

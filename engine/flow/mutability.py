"""Whether an attribute keeps its value once the model is built, as far as the model's code shows."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from engine.flow.conditions import has_fixed_result
from engine.source.attribute_writes import (
    assigned_anywhere,
    assigned_attributes,
    assigned_where_none_by_class,
    written_anywhere,
    written_attributes,
)
from engine.source.model_code import codes_of
from engine.source.static_attributes import attribute_code, method_code

__all__ = ["Mutability"]

_UNKNOWN = object()
_CONTAINERS = (list, tuple, dict, OrderedDict, set, frozenset, nn.ModuleDict, nn.ParameterDict)
_PLAIN = (bool, int, float, str, type(None), nn.Module)


class Mutability:
    """The attributes of a model's modules, and of objects that these hold, that code may change.

    Args:
        model: the model; its code is that of its modules' classes and of the Python modules that define them.
        modules: all its modules.

    Example:
        >>> class Counter(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.width, self.calls = 8, 0
        ...     def forward(self, x):
        ...         self.calls += 1
        ...         return x
        >>> model = Counter()
        >>> mutability = Mutability(model, [model])
        >>> mutability.never_changed(model, "width"), mutability.never_changed(model, "calls")
        (True, False)
    """

    def __init__(self, model: nn.Module, modules: Iterable[nn.Module]) -> None:
        self._model = model
        self._written, self._assigned = written_attributes(model), assigned_attributes(model)
        self._assigned_where_none = assigned_where_none_by_class(model)
        self.one_of_each_class = list({type(module): module for module in modules}.values())
        self._anywhere: dict[tuple[bool, frozenset[type]], frozenset[str]] = {}
        self._in_progress: set[FunctionType] = set()  # properties and methods, which may read each other

    def never_changed(self, module: nn.Module, path: str) -> bool:
        """Whether no code assigns to an attribute or changes the contents of the object that it holds.

        Args:
            module: where the path starts.
            path: names of attributes (``gate.mode``), where ``*`` is an unknown object; of a path that ends in
                ``()``, whether that method always returns the same; of one that ends in ``{}``, whether that container
                is empty as well.
        """
        return self._is_unchanged(module, path, contents=True)

    def owners_of(self, code: CodeType) -> list[nn.Module]:
        """Return a module of each class that has a function as a method."""
        return [m for m in self.one_of_each_class if code in codes_of(type(m))]  # type: ignore[arg-type]

    def never_reassigned(self, module: nn.Module, path: str) -> bool:
        """Whether no code assigns to an attribute, although the contents of the object that it holds may change.

        Args:
            module, path: as for `never_changed`.
        """
        return self._is_unchanged(module, path, contents=False)

    def _is_unchanged(self, module: nn.Module, path: str, contents: bool) -> bool:
        *way, name = path.split(".")
        owners: list[Any] = [module]
        for key in way:
            owners.append(getattr(owners[-1], key, _UNKNOWN))
        if name.endswith("{}"):
            container = getattr(owners[-1], name.removesuffix("{}"), None)
            return _is_empty(container) and self.never_changed(module, path.removesuffix("{}"))
        if name.endswith("()"):
            name = name.removesuffix("()")
            method = method_code(owners[-1], name)
            if method is None or self._is_set(owners, name, contents=False):
                return False
            return self._have_fixed_results(module, ".".join([*way, ""]), [method])
        holders = self.one_of_each_class if owners[-1] is _UNKNOWN else [owners[-1]]
        if any(_is_looked_up(holder, name) for holder in holders):
            return False
        computed = [c for c in (attribute_code(type(holder), name) for holder in holders) if c is not None]
        if computed:
            return self._have_fixed_results(module, ".".join([*way, ""]), computed)
        value = _UNKNOWN if owners[-1] is _UNKNOWN else getattr(owners[-1], name, None)
        if contents and isinstance(value, (nn.Parameter, nn.ParameterList, nn.ParameterDict)):
            return False  # training changes the numbers in it
        return not self._is_set(owners, name, contents and not isinstance(value, _PLAIN))

    def _is_set(self, owners: Sequence[Any], name: str, contents: bool) -> bool:
        """Whether code assigns to an attribute of the last owner, or changes its contents if these count.

        If the attribute is None, assignments of None, or under the condition that it is not None, do not count.
        """
        if len(owners) == 1 and not contents and getattr(owners[0], name, _UNKNOWN) is None:
            return name in self._assigned_where_none.get(type(owners[0]), frozenset())
        if len(owners) == 1:
            return name in (self._written if contents else self._assigned).get(type(owners[0]), frozenset())
        return name in self._set_anywhere(contents, *map(type, owners))

    def _set_anywhere(self, contents: bool, *owners: type) -> frozenset[str]:
        """Return the attributes of any object that code assigns to, or whose contents it changes."""
        key = contents, frozenset(owners)
        if key not in self._anywhere:
            names_of = written_anywhere if contents else assigned_anywhere
            self._anywhere[key] = names_of(self._model, *owners)
        return self._anywhere[key]

    def _have_fixed_results(self, module: nn.Module, prefix: str, functions: Sequence[FunctionType]) -> bool:
        """Whether properties and methods of a module, or of an object that it holds, always return the same."""
        if not self._in_progress.isdisjoint(functions):
            return False
        self._in_progress.update(functions)
        try:
            return all(has_fixed_result(f, lambda path: self.never_changed(module, prefix + path)) for f in functions)
        finally:
            self._in_progress.difference_update(functions)


def _is_looked_up(holder: Any, name: str) -> bool:
    """Whether an attribute comes from a user's ``__getattr__`` instead of a table of attributes."""
    function = inspect.getattr_static(type(holder), "__getattr__", None)
    if function in (None, nn.Module.__getattr__) or inspect.getattr_static(holder, name, _UNKNOWN) is not _UNKNOWN:
        return False
    attributes = getattr(holder, "__dict__", {})
    tables = [attributes.get(key, {}) for key in ("_modules", "_parameters", "_buffers")]
    return not any(name in table for table in tables) and hasattr(holder, name)


def _is_empty(container: object) -> bool:
    """Whether an object is an empty container of a class whose ``in`` only looks at its items."""
    return type(container) in _CONTAINERS and not len(container)  # type: ignore[arg-type]

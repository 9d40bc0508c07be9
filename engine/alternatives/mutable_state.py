"""Buffers and other tensors of a model that may differ in its next call: these are inputs, not constants.

The numbers in a tensor are constant if no code writes to it, and nothing suggests that code outside the model sets it.
A single number may be a coefficient, a flag or a counter; a uniform tensor may be a placeholder; and zeros and ones may
be gates. Tables of indices, statistics of batch norms and masks of `torch.nn.utils.prune` are taken for constant, and
parameters only change by masks and the optimizer.

A table of other numbers, such as one of positions, is treated like a parameter: its ops are recorded, and masks apply.
"""

from __future__ import annotations

import fnmatch
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from engine.alternatives.attribute_choices import is_choice, is_list_of_numbers
from engine.alternatives.attributes import Attribute
from engine.errors import InputError
from engine.limits import MOST_STATE_OBJECTS
from engine.numbers.coefficients import coefficients
from engine.program.arrays import is_finite
from engine.program.storages import storage_of
from engine.program.stored import HISTORY, PART, modules_of, parameters_of, stored_tensors
from engine.source.attribute_writes import EVERYTHING, assigned_attributes, written_attributes, written_by_modules
from engine.source.instructions import arguments_of
from engine.source.model_code import code_of, codes_of, module_namespaces

__all__ = ["MutableState"]

_STATISTICS = ("running_mean", "running_var")
_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), HISTORY, PART})


class MutableState:
    """The tensors of a model whose numbers may change between calls.

    Args:
        model: the model, which is not changed.
        arguments: arguments of its call; tensors inside objects among them are inputs as well.
        constants: names, or patterns of names, of buffers and attributes to take for constant in any case.
        opaque: modules that a user's function narrows, which is responsible for their buffers.

    Attributes:
        names: names of the registered ones, with all their aliases.
        maskable: names of buffers that masks apply to as they do to parameters, with all their aliases.
        read_tables: whether an op of a run has read one of these.
        attributes: numbers, flags and strings in attributes that code sets later.
        coefficients: floats of zero or one in attributes that no code sets, by owner and name.

    Raises:
        InputError: if a pattern matches nothing.

    Example:
        >>> model = nn.Module()
        >>> model.register_buffer("table", torch.arange(4))
        >>> model.register_buffer("gate", torch.zeros(1))
        >>> sorted(MutableState(model).names), sorted(MutableState(model, constants=["gate"]).names)
        (['gate'], [])
    """

    def __init__(
        self,
        model: nn.Module,
        arguments: Any = (),
        constants: Collection[str] | None = None,
        opaque: Collection[str] = (),
    ) -> None:
        self._written = written_attributes(model)
        self._assigned = assigned_attributes(model)
        self._by_modules = written_by_modules(model)
        self._constants = tuple(constants or ())
        self._matched: set[str] = set()
        self._settled: set[str] = set()
        self._tensors: dict[int, Tensor] = {}
        self.names: set[str] = set()
        self.maskable: set[str] = set()
        self.read_tables = False
        self.attributes: list[Attribute] = []
        self._choices: set[tuple[str, str]] = set()
        self.unrecorded: set[tuple[str, str]] = set()
        self.coefficients: dict[tuple[str, str], nn.Module] = {}
        inside = tuple(f"{name}." for name in opaque)
        self._fixed = {*parameters_of(model), *(name for name in stored_tensors(model) if name.startswith(inside))}
        for prefix, module in modules_of(model):
            self._look_at_buffers(f"{prefix}." if prefix else "", module)
            self._look_at_attributes(f"{prefix}." if prefix else "", module)
            self._look_at_arguments(f"{prefix}." if prefix else "", module)
        self.maskable -= _shared(model, self.maskable)
        everywhere = frozenset[str]().union(*self._written.values())
        for space in module_namespaces(model):
            for name, value in list(space.items()):
                if name in everywhere:
                    self._add(_held([value]))
        self._add(_held(arguments))
        stored = {id(t) for t in stored_tensors(model).values()}
        self._tensors = {k: t for k, t in self._tensors.items() if k not in stored}
        unknown = [pattern for pattern in self._constants if pattern not in self._matched]
        if unknown:
            raise InputError(f"`constants` names {unknown[0]!r}; the model has no such buffer, attribute or argument.")

    def forgo_tables(self) -> bool:
        """Stop treating buffers as tables that masks apply to; return whether a run has read one."""
        read, self.maskable, self.read_tables = self.read_tables, set(), False
        return read

    @property
    def set_later(self) -> set[tuple[str, str]]:
        """Attributes that code sets later and that hold a value to vary, or a choice, by module."""
        return {(attribute.owner, attribute.name) for attribute in self.attributes} | self._choices

    @property
    def recorded_later(self) -> set[tuple[str, str]]:
        """Integers in attributes that code sets later, and that were recorded with other values, by module and name."""
        whole = {(attribute.owner, attribute.name) for attribute in self.attributes if type(attribute.value) is int}
        return whole - self.unrecorded

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._tensors

    def add_computed(self, tensors: Iterable[Tensor]) -> None:
        """Note that tensors are computed from others that may change."""
        self._add(tensors)

    def add_written(self, written: Iterable[str], aliases: Mapping[str, str]) -> set[str]:
        """Return the names taken for constant that a run wrote to; from now on they are not taken for constant.

        Nor do masks apply to a table from then on.
        """
        new = {name for name in written if name not in self.names and name not in self._fixed}
        new |= {name for name, canonical in aliases.items() if canonical in new and name not in self._fixed}
        self.names |= new
        over = {name for name in self.maskable if not {name, aliases.get(name)}.isdisjoint(written)}
        self.maskable -= over
        return new | over

    def _add(self, tensors: Iterable[Tensor]) -> None:
        self._tensors.update((id(t), t) for t in tensors)

    def declared(self, name: str) -> bool:
        """Whether a buffer or an attribute keeps its value: the user declares it, or the model accepts no other."""
        if name in self._settled:
            return True
        if not self._constants:
            return False
        matching = [pattern for pattern in self._constants if fnmatch.fnmatchcase(name, pattern)]
        self._matched.update(matching)
        return bool(matching)

    def take_as_constant(self, name: str) -> None:
        """Note that the model accepts no other value of an attribute."""
        self._settled.add(name)

    def _look_at_arguments(self, prefix: str, module: nn.Module) -> None:
        if not self._constants:
            return
        kind: Any = type(module)
        for code in {code_of(kind.forward), *codes_of(kind)}:  # forward passes its arguments on to other methods
            if code is not None and code.co_name != "__init__":
                for name in arguments_of(code):
                    self.declared(prefix + name)

    def _look_at_buffers(self, prefix: str, module: nn.Module) -> None:
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            declared = self.declared(prefix + name)
            if prefix + name in self._fixed:
                continue
            if _is_understood(module, name, self._written[type(module)], self._by_modules):
                self._fixed.add(prefix + name)
                continue
            is_saved = name not in module._non_persistent_buffers_set  # or a masked checkpoint would lack the zeros
            is_data = is_saved and not self._may_change(module, name) and _is_table(buffer)
            if is_data and (declared or not _is_gate(buffer)):
                self.maskable.add(prefix + name)
            if declared:
                self._fixed.add(prefix + name)
            elif self._may_change(module, name) or _suggests_change(buffer, name in module._non_persistent_buffers_set):
                self.names.add(prefix + name)

    def _look_at_attributes(self, prefix: str, module: nn.Module) -> None:
        for name, _ in coefficients(module):
            if not (name in self._assigned[type(module)] or self.declared(prefix + name)):
                self.coefficients[prefix.removesuffix("."), name] = module
        for name, value in vars(module).items():
            if name in _OF_EVERY_MODULE:
                continue
            is_set = name in (self._assigned if _is_immutable(value) else self._written)[type(module)]
            if (isinstance(value, _SETTABLE) or is_list_of_numbers(value)) and not self.declared(prefix + name):
                if is_set and not isinstance(module, torch.jit.ScriptModule):
                    self.attributes.append(Attribute(prefix.removesuffix("."), module, name))
            elif is_choice(value) and is_set and not self.declared(prefix + name):
                self._choices.add((prefix.removesuffix("."), name))
            if isinstance(value, _PLAIN):
                continue
            tensors = [] if _is_flat(value) else list(_held([value]))
            if tensors and not self.declared(prefix + name):
                may_change = self._may_change(module, name)
                self._add(t for t in tensors if may_change or _suggests_change(t, False))

    def _may_change(self, module: nn.Module, name: str) -> bool:
        written = self._written[type(module)]
        return name in written or (EVERYTHING in written and name in module._buffers)


_SETTABLE = (type(None), bool, int, float, str, Enum)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, types.FunctionType)


def _is_immutable(value: Any) -> bool:
    """Whether only an assignment changes what an attribute holds: a number, a text, or a tuple of some."""
    return isinstance(value, _SETTABLE) or (type(value) is tuple and _is_flat(value))


def _is_understood(module: nn.Module, name: str, written: Collection[str], by_modules: Collection[str]) -> bool:
    """Whether a buffer is a statistic of a batch norm, or a mask of `torch.nn.utils.prune`.

    Code outside a model, such as a callback, may re-estimate statistics just as training does, but what the model's own
    modules write to them affects its next call.
    """
    if name.endswith("_mask") and f"{name.removesuffix('_mask')}_orig" in module._parameters:
        return True
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return name not in by_modules
    statistics = all(module._buffers.get(key) is not None for key in _STATISTICS)
    return statistics and not {*_STATISTICS, name, EVERYTHING}.intersection(written)


def _suggests_change(tensor: Tensor, derived: bool) -> bool:
    """Whether the numbers suggest that code outside the model sets them; those that are ``derived`` are not saved."""
    if tensor.numel() <= 1:
        return True
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized:
        return not derived
    index = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
    with torch.no_grad():
        switches = (tensor == 0) | (tensor == 1)
        uniform = not derived and bool((tensor == tensor.reshape(-1)[0]).all())
        return bool(switches.all()) if index else uniform or bool(switches.any())


def _is_table(tensor: Tensor) -> bool:
    """Whether a tensor holds finite floating-point numbers along several dimensions."""
    plain = type(tensor) is Tensor and tensor.is_floating_point() and not tensor.is_meta
    plain = plain and tensor.layout is torch.strided
    return plain and tensor.numel() > max(tensor.shape, default=1) and is_finite(tensor.detach())


def _shared(model: nn.Module, tables: Collection[str]) -> set[str]:
    """Return the names of tables that share memory with a tensor that is no table."""
    if not tables:
        return set()
    stored = stored_tensors(model)
    plain = {name: t for name, t in stored.items() if type(t) in (Tensor, nn.Parameter)}
    others = {storage_of(t) for name, t in plain.items() if name not in tables}
    whole: dict[int, int] = {}
    for name in tables:
        if whole.setdefault(storage_of(stored[name]), id(stored[name])) != id(stored[name]):
            others.add(storage_of(stored[name]))
    return {name for name in tables if storage_of(stored[name]) in others}


def _is_gate(tensor: Tensor) -> bool:
    """Whether a table holds the same number everywhere, or only zeros and ones."""
    with torch.no_grad():
        switches = (tensor == 0) | (tensor == 1)
        return bool(switches.all()) or bool((tensor == tensor.reshape(-1)[0]).all())


def _held(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in values, inside containers, and inside objects other than modules."""
    seen: set[int] = set()
    waiting = deque(values.values() if isinstance(values, dict) else values)
    while waiting and len(seen) < MOST_STATE_OBJECTS:
        value = waiting.popleft()
        if isinstance(value, (*_PLAIN, nn.Module)) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        else:
            waiting.extend(_items(value))


def _is_flat(value: Any) -> bool:
    return type(value) in (tuple, list) and all(isinstance(item, _PLAIN) for item in value)


def _items(value: Any) -> list[Any]:
    """Return the items of a container, or the attributes of an object."""
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value)
    own = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    return list(dict.values(own)) if isinstance(own, dict) else []

"""Modules that no recording ran: whatever they would read is kept, and the notes name them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import nn

from engine.observations.assumptions import Assumptions
from engine.observations.dataflow import Dataflow
from engine.program.graph import Value
from engine.source.model_code import methods_of

__all__ = ["IdleModules", "unrecorded_methods"]

_SETTERS = ("get_", "set_", "reset", "init", "load", "save", "freeze", "unfreeze", "enable", "disable", "from_", "to_")
_NO_ENTRY = ("_", *_SETTERS)
"""Prefixes of the names of methods that code outside a model does not call for their output."""


class IdleModules:
    """The modules whose parameters no recording read.

    Args:
        parameters: names of all parameters.
        stored: values of the parameters and buffers that were read, by every name.

    Attributes:
        owners: names of the modules that own parameters and did not run.
    """

    def __init__(self, parameters: Collection[str], stored: Mapping[str, Value]) -> None:
        owners = {name.rpartition(".")[0] for name in parameters if name not in stored}
        self.owners = sorted(owners)
        self._names = {n[:end] for n in owners for end in (*(i for i, c in enumerate(n) if c == "."), len(n))}

    def includes_any(self, modules: Collection[str]) -> bool:
        """Whether any of the modules, or a part of one, did not run."""
        return not self._names.isdisjoint(modules)

    def use_values_of_siblings(
        self, modules: Mapping[str, nn.Module], dataflow: Dataflow, assumptions: Assumptions
    ) -> None:
        """Count as used what items of a list or a dictionary read and compute if another item did not run.

        The item that did not run would read the same values, or compute a replacement for their results.

        Args:
            modules: all modules by name.
            dataflow: of the recorded ops.
            assumptions: is extended.
        """
        for name, container in modules.items():
            if not isinstance(container, (nn.ModuleList, nn.ModuleDict)):
                continue
            items = {f"{name}.{key}" if name else key for key in container._modules}
            idle = sorted(item for item in items & self._names if not dataflow.nodes_in(item))
            for node in (node for item in items for node in dataflow.nodes_in(item)) if idle else ():
                reason = f"could be read or replaced by {idle[0]!r}, which did not run on the example"
                assumptions.use((v for v in (*node.inputs, *node.outputs) if not v.stored), reason)


def unrecorded_methods(modules: Iterable[nn.Module]) -> list[str]:
    """Return the public methods, other than forward, that read a layer or a parameter, as ``Class.method``.

    Args:
        modules: of a model.
    """
    return sorted(dict.fromkeys(name for module in modules for name in _reading_methods(module)))


def _reading_methods(module: nn.Module) -> Iterator[str]:
    names = {name for name, part in (*module._modules.items(), *module._parameters.items()) if part is not None}
    attributes_by_method = dict(methods_of(type(module))) if names else {}  # type: ignore[arg-type]
    while more := {m for m, attributes in attributes_by_method.items() if m not in names and attributes & names}:
        yield from (f"{type(module).__name__}.{method}" for method in more if not method.startswith(_NO_ENTRY))
        names |= more

"""Opaque modules, whose ops are not recorded: what the recorder notes while one of them runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from engine.errors import TraceError
from engine.program.storages import storage_of

__all__ = ["OpaqueCall", "is_kind"]


def is_kind(module: nn.Module, kind: str) -> bool:
    """Whether a module's class, or one of its bases, has a name.

    Example:
        >>> is_kind(nn.BatchNorm2d(3), "_BatchNorm"), is_kind(nn.ReLU(), "_BatchNorm")
        (True, False)
    """
    return any(base.__name__ == kind for base in type(module).__mro__ if base is not object)


@dataclass
class OpaqueCall:
    """Reads and writes while a module runs whose ops are not recorded.

    Attributes:
        module: the module.
        depth: number of nested calls of the module by itself.
        reads: parameters, and tensors of the surrounding program, that its ops read, by identity.
        written: storages that its ops wrote to.
        intermediates: tensors that its ops created, by identity; the rest of the program may only use its outputs.
    """

    module: nn.Module
    depth: int = 0
    reads: dict[int, Tensor] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    intermediates: dict[int, Tensor] = field(default_factory=dict)

    def left(self, module: nn.Module) -> bool:
        """Whether leaving ``module`` ends the outermost call."""
        if module is self.module:
            self.depth -= 1
        return self.depth < 0

    def own(self) -> list[Tensor]:
        """Return the module's parameters and buffers."""
        return [*self.module.parameters(), *self.module.buffers()]

    def changed(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return the tensors that its ops wrote to, one for each storage."""
        return list({storage_of(t): t for t in tensors if storage_of(t) in self.written}.values())

    def results(
        self, written: Sequence[Tensor], returned: Sequence[Tensor], is_stored: Callable[[Tensor], bool]
    ) -> tuple[int, int]:
        """Return from where to where the outputs of the module's node are what the module returns, and nothing else is.

        ``(0, 0)`` where it also changes tensors that are not its own.

        Raises:
            TraceError: where it returns a view of what it wrote to.
        """
        count = len(written)
        views = [t for t in returned if storage_of(t) in self.written and not any(t is w for w in written)]
        if any(storage_of(v) == storage_of(w) for v in views for w in written):
            raise TraceError(
                f"{type(self.module).__name__} returns a view of what it writes to; it cannot be replaced."
            )
        foreign = [position for position, tensor in enumerate(written) if not is_stored(tensor)]
        again = [t for t in returned if any(t is w for w in written)]
        if not foreign and not again:
            return count, count + len(returned)
        single = len(returned) == 1 and foreign == [count - 1] and returned[0] is written[-1]
        return (count - 1, count) if single else (0, 0)

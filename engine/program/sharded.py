"""Detect models whose parameters are sharded over several processes."""

from __future__ import annotations

import functools

from torch import nn

from engine.program.stored import distinct_modules, stored_tensors

__all__ = ["why_sharded"]

_TENSORS = "torch.distributed"  # DTensor and its predecessors
_MODULES = "torch.distributed.fsdp"  # between calls, an FSDP module holds shards of its parameters, or none


def why_sharded(model: nn.Module) -> str | None:
    """Return why a sharded model cannot be compacted and what to do instead; None for any other model.

    A channel of a sharded parameter (tensor parallelism, FSDP) is not a slice of a local tensor.

    Example:
        >>> why_sharded(nn.Linear(1, 1))
    """
    parts: list[tuple[str, type, str]] = [
        (name, type(tensor), _TENSORS) for name, tensor in stored_tensors(model).items()
    ]
    parts += [(name, type(module), _MODULES) for name, module in distinct_modules(model).items()]
    for name, kind, package in parts:
        if _is_of(kind, package):
            return (
                f"{(name or type(model).__name__)!r} is a {kind.__name__}: its parameters are spread over several "
                "processes. Compact the model before they are, or its whole state dict afterwards (of Lightning's "
                "checkpoints: `lightning_compress.compact_checkpoint`)."
            )
    return None


@functools.cache
def _is_of(kind: type, package: str) -> bool:
    """Whether a class or one of its bases belongs to a package."""
    return any(f"{base.__module__}.".startswith(f"{package}.") for base in kind.__mro__)

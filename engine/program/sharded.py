"""Recognise models whose parameters are spread over several processes."""

from __future__ import annotations

from torch import nn

from engine.program.stored import distinct_modules, stored_tensors

__all__ = ["why_sharded"]

_TENSORS = "torch.distributed"  # DTensor, and what came before it
_MODULES = "torch.distributed.fsdp"  # a module between two calls of FSDP holds parts of its parameters, or none


def why_sharded(model: nn.Module) -> str | None:
    """Return why a model cannot lose channels as it is, as a sentence that says what to do; None where it can.

    A channel of a parameter that is spread over processes (tensor parallelism, FSDP) is no slice of a tensor here.

    Example:
        >>> why_sharded(nn.Linear(1, 1))
    """
    parts: list[tuple[str, type, str]] = [
        (name, type(tensor), _TENSORS) for name, tensor in stored_tensors(model).items()
    ]
    parts += [(name, type(module), _MODULES) for name, module in distinct_modules(model).items()]
    for name, kind, package in parts:
        if any(f"{base.__module__}.".startswith(f"{package}.") for base in kind.__mro__):
            return (
                f"{(name or type(model).__name__)!r} is a {kind.__name__}: its parameters are spread over several "
                "processes. Compact the model before they are, or its whole state dict afterwards (of Lightning's "
                "checkpoints: `lightning_compress.compact_checkpoint`)."
            )
    return None

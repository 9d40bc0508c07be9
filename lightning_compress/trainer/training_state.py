"""Values that a step and its hooks leave behind besides weights: optimizer options, numbers and tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule

__all__ = ["attributes_of", "options_of"]

_DEEPEST = 3
_LIBRARIES = ("torch.", "torchmetrics.")


def options_of(optimizers: Iterable[Any]) -> dict[str, Any]:
    """Return the floats and tensors among the options of the optimizers' parameter groups.

    Args:
        optimizers: the optimizers.

    Example:
        >>> import torch
        >>> options = options_of([torch.optim.Adam([torch.ones(1)], lr=0.5)])
        >>> options["lr of group 0 of optimizer 0 (Adam)"], options["betas.1 of group 0 of optimizer 0 (Adam)"]
        (0.5, 0.999)
    """
    return {
        f"{path} of group {number} of optimizer {place} ({optimizer.__class__.__name__})": leaf
        for place, optimizer in enumerate(optimizers)
        for number, group in enumerate(getattr(optimizer, "param_groups", ()))
        for name, value in group.items()
        if name != "params"
        for path, leaf in _leaves(name, value, _DEEPEST)
    }


def attributes_of(pl_module: LightningModule, callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return the tensors and floats in public attributes of a LightningModule, its submodules, and callbacks.

    Integers are omitted: they count steps, or are sizes, which a compaction changes anyway.

    Args:
        pl_module: the LightningModule.
        callbacks: the user's callbacks.

    Example:
        >>> from pytorch_lightning import LightningModule
        >>> module = LightningModule()
        >>> module.scale, module.seen = 0.5, {"loss": [1.0, 2]}
        >>> attributes_of(module, [])
        {'scale': 0.5, 'seen.loss.0': 1.0}
    """
    owners = [(f"callback {n} ({type(callback).__name__}).", callback) for n, callback in enumerate(callbacks)]
    owners += [
        (f"{name}." if name else "", module)
        for name, module in pl_module.named_modules()
        if not f"{type(module).__module__}.".startswith(_LIBRARIES)
    ]
    return {
        f"{prefix}{path}": leaf
        for prefix, owner in owners
        for name, value in vars(owner).items()
        if not name.startswith("_")
        for path, leaf in _leaves(name, value, _DEEPEST)
    }


def _leaves(path: str, value: Any, levels: int) -> Iterator[tuple[str, Any]]:
    if type(value) is float:
        yield path, value
    elif isinstance(value, Tensor):
        yield path, value.detach().clone()
    elif levels and isinstance(value, (list, tuple, deque, Mapping)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _leaves(f"{path}.{key}", item, levels - 1)

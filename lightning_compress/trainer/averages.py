"""Averaged copies of a model: those of callbacks (EMA, SWA) and those inside the LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn
from torch.optim.swa_utils import AveragedModel

from engine.compaction import entries_of, reshape
from engine.errors import PlanError
from engine.program import stored_tensors
from lightning_compress.trainer.packages import classes

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule


_HOLDS_A_PLAIN_COPY = classes("tree.callbacks", "StochasticWeightAveraging")


class Average(NamedTuple):
    """An averaged copy of the model or of one of its submodules.

    Attributes:
        path: path of the submodule inside the model; ``""`` is the model itself.
        module: the averaged copy.
    """

    path: str
    module: nn.Module


def averages(callbacks: Iterable[Any], pl_module: LightningModule, path: str) -> list[Average]:
    """Return the averaged copies of the model at ``path``.

    Averages are recognised by their class, `torch.optim.swa_utils.AveragedModel`, in callbacks and inside the
    LightningModule; Lightning's `StochasticWeightAveraging` holds a plain copy. Other copies, such as a teacher or the
    best weights so far, are ignored.

    Args:
        callbacks: the Trainer's callbacks.
        pl_module: the LightningModule.
        path: path of the model inside the LightningModule.

    Raises:
        PlanError: if several submodules of the model match an averaged copy.
    """
    model = pl_module.get_submodule(path)
    copies = [Average("", copy.get_submodule(path)) for copy in _copies(callbacks, pl_module)]
    for name, module in pl_module.named_modules():
        if isinstance(module, AveragedModel):
            copies += _part(model, name, module)
    return copies


def follow_loading(pl_module: LightningModule) -> None:
    """Reshape the copies of averaging callbacks whenever the LightningModule loads a state of other shapes.

    On resumption, the copies already exist, since ``setup``, and their own weights are loaded right after those of the
    LightningModule.
    """
    if _align not in pl_module._load_state_dict_post_hooks.values():
        pl_module.register_load_state_dict_post_hook(_align)


def _align(pl_module: nn.Module, incompatible_keys: Any) -> None:
    trainer = getattr(pl_module, "_trainer", None)
    done = entries_of(pl_module)
    if trainer is not None and done:
        shapes = {name: tuple(tensor.shape) for name, tensor in stored_tensors(pl_module).items()}
        for copy in _copies(trainer.callbacks, pl_module, _names):
            reshape(copy, shapes, done)


def _copies(
    callbacks: Iterable[Any], pl_module: nn.Module, key: Callable[[nn.Module], Any] | None = None
) -> Iterator[nn.Module]:
    key = key or _shapes
    for callback in callbacks:
        for value in vars(callback).values():
            is_plain = isinstance(callback, _HOLDS_A_PLAIN_COPY)
            module = value.module if isinstance(value, AveragedModel) else value if is_plain else None
            if isinstance(module, nn.Module) and module is not pl_module and key(module) == key(pl_module):
                yield module


def _part(model: nn.Module, name: str, average: AveragedModel) -> list[Average]:
    wanted, inside = _shapes(average.module), {id(module) for module in average.modules()}
    paths = [
        path
        for path, module in model.named_modules()
        if id(module) not in inside and _is_like(module, average.module) and _shapes(module) == wanted
    ]
    if len(paths) > 1:
        raise PlanError(
            f"{name!r} may be an average of {' or '.join(map(repr, paths))}, which have the same class and shapes. "
            "Average the whole LightningModule with a callback instead."
        )
    return [Average(path, average.module) for path in paths]


def _is_like(one: nn.Module, other: nn.Module) -> bool:
    # Pinning sizes exchanges a class for a subclass of the same name.
    return type(one).__qualname__ == type(other).__qualname__


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def _shapes(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]

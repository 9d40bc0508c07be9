"""The arguments with which a training step calls the model, captured at the first call under a stub Trainer.

Batches are often mappings whose keys are not arguments of the model; only `training_step` knows which entries the
model receives.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from engine.errors import EngineError
from engine.running import evaluating
from lightning_compress.trainer.packages import isolate_rng, overrides
from lightning_compress.trainer.steps import TRAINING, Step, step_entries

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

__all__ = ["first_model_arguments", "model_arguments"]


class _ModelCalled(BaseException):
    """Raised at the first call of the model to end the step."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.arguments = args, dict(kwargs)


def first_model_arguments(trainer: Trainer, pl_module: LightningModule, model: nn.Module) -> list[Any]:
    """Return the arguments with which the training step calls the model on the first batch, for `engine.trace`.

    Args:
        trainer: the Trainer.
        pl_module: the LightningModule, which is left unchanged.
        model: the LightningModule, or one of its submodules.

    Returns:
        One example, or none if the step does not call the model.
    """
    entries = step_entries(trainer, pl_module, (TRAINING,)).values()
    examples = (model_arguments(pl_module, model, entry.args) for entry in entries)
    return [example for example in examples if example is not None]


def model_arguments(pl_module: LightningModule, model: nn.Module, arguments: Sequence[Any]) -> Any:
    """Return the arguments with which the training step calls the model; None if it does not call it.

    Args:
        pl_module: the LightningModule, which is left unchanged.
        model: the LightningModule, or one of its submodules.
        arguments: arguments of the step: a batch and its index.
    """
    if not overrides(pl_module, TRAINING):
        return None
    train = [module for module in pl_module.modules() if module.training]
    handle = model.register_forward_pre_hook(_stop, with_kwargs=True, prepend=True)
    try:
        with isolate_rng(), evaluating(pl_module, train, tuple(arguments)), _restored(pl_module), torch.enable_grad():
            Step(pl_module, TRAINING)(*arguments)
    except _ModelCalled as seen:
        return _example(model, *apply_to_collection(seen.arguments, Tensor, torch.Tensor.detach))
    except (EngineError, *_STEP_ERRORS):  # the step may need state that does not exist yet
        return None
    finally:
        handle.remove()
    return None


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Restore parameters and buffers that a step writes to, such as statistics, moving averages and queues."""
    before = {tensor: tensor.detach().clone() for tensor in (*module.parameters(), *module.buffers())}
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, numbers in before.items():
                tensor.copy_(numbers)


_STEP_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def _stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _ModelCalled(args, kwargs)


def _example(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convert the arguments of a call to an example input: all positional, or all by keyword."""
    if kwargs and args:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        kinds = {parameter.kind for name, parameter in bound.signature.parameters.items() if name in bound.arguments}
        return dict(bound.arguments) if inspect.Parameter.VAR_POSITIONAL not in kinds else None
    if kwargs:
        return kwargs
    return args[0] if len(args) == 1 and isinstance(args[0], Tensor) else args

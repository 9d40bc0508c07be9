"""What a training step passes to the model: seen at its first call, with a Trainer that does nothing.

Batches are often mappings whose keys are not arguments of the model; what is taken out of them, and how, is written in
`training_step` alone.
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
from engine.recording import evaluating
from lightning_compress.trainer.packages import isolate_rng, overrides
from lightning_compress.trainer.steps import TRAINING, Step, step_entries

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

__all__ = ["first_passed", "passed"]


class _Seen(BaseException):
    """Ends a step at the first call of the model."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.arguments = args, dict(kwargs)


def first_passed(trainer: Trainer, pl_module: LightningModule, model: nn.Module) -> list[Any]:
    """Return what the training step passes to the model on the first batch, in the form that `engine.trace` takes.

    Args:
        trainer: fits the LightningModule.
        pl_module: the LightningModule; it is left as it was.
        model: the LightningModule, or a module in it.

    Returns:
        One example, or none where the step does not get as far as a call.
    """
    entries = step_entries(trainer, pl_module, (TRAINING,)).values()
    examples = (passed(pl_module, model, entry.args) for entry in entries)
    return [example for example in examples if example is not None]


def passed(pl_module: LightningModule, model: nn.Module, arguments: Sequence[Any]) -> Any:
    """Return what the training step passes to the model, given its arguments; None where it does not call it.

    Args:
        pl_module: the LightningModule; it is left as it was.
        model: the LightningModule, or a module in it.
        arguments: of the step: a batch and its number.
    """
    if not overrides(pl_module, TRAINING):
        return None
    train = [module for module in pl_module.modules() if module.training]
    handle = model.register_forward_pre_hook(_stop, with_kwargs=True, prepend=True)
    try:
        with isolate_rng(), evaluating(pl_module, train, tuple(arguments)), _restored(pl_module), torch.enable_grad():
            Step(pl_module, TRAINING)(*arguments)
    except _Seen as seen:
        return _example(model, *apply_to_collection(seen.arguments, Tensor, torch.Tensor.detach))
    except (EngineError, *_OF_STEPS):  # the step asks for what is not there yet
        return None
    finally:
        handle.remove()
    return None


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Put back the numbers that a step writes into parameters and buffers: statistics, moving averages, queues."""
    before = {tensor: tensor.detach().clone() for tensor in (*module.parameters(), *module.buffers())}
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, numbers in before.items():
                tensor.copy_(numbers)


_OF_STEPS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def _stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _Seen(args, kwargs)


def _example(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return arguments of a call as an example input: positional ones, or all by name."""
    if kwargs and args:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
        kinds = {parameter.kind for name, parameter in bound.signature.parameters.items() if name in bound.arguments}
        return dict(bound.arguments) if inspect.Parameter.VAR_POSITIONAL not in kinds else None
    if kwargs:
        return kwargs
    return args[0] if len(args) == 1 and isinstance(args[0], Tensor) else args

"""Calibration batches, drawn from the train dataloader without affecting training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from engine.program import tensors_in
from lightning_compress.trainer.loaders import copied_loader, reseeded
from lightning_compress.trainer.model_arguments import model_arguments
from lightning_compress.trainer.packages import MisconfigurationException
from lightning_compress.trainer.target import batch_candidates, describe

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


def train_batches(
    trainer: Trainer, pl_module: LightningModule, model: nn.Module, example: Any, samples: int, seed: int = 0
) -> list[Any]:
    """Draw batches from the train dataloader, in the form of the example.

    The dataloader's order and all random states are preserved. The draw is the same after resuming.

    Args:
        trainer: the Trainer.
        pl_module: the LightningModule, whose batch transfer hooks are called.
        model: the model inside the LightningModule.
        example: example input of the model.
        samples: number of samples; all if there are fewer.
        seed: seed of the order and of random numbers that the dataset draws.

    Raises:
        MisconfigurationException: if there is no single train dataloader, its order cannot be copied, or the model
            does not accept its batches.
    """
    loader = trainer.train_dataloader
    if loader is None or isinstance(loader, (Mapping, list, tuple)):
        raise MisconfigurationException(
            "There is no single train dataloader to take batches from. Train with one, or use "
            "`lightning_compress.prune` or `engine.compensate`, which take batches."
        )
    batches: list[Any] = []
    count = 0
    with reseeded(loader, seed):
        for batch in copied_loader(loader, seed):
            batch = trainer.precision_plugin.convert_input(batch)
            batch = pl_module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
            batches.append(_model_input(batch, pl_module, model, example))
            count += len(next(tensors_in(batches[-1])))
            if count >= samples:
                break
    return batches


def _model_input(batch: Any, pl_module: LightningModule, model: nn.Module, example: Any) -> Any:
    """Return the part of a batch that matches the example, or else what `training_step` passes to the model."""
    try:
        return matching_part(batch, model, example)
    except MisconfigurationException:
        arguments = model_arguments(pl_module, model, (batch, 0))
        if arguments is None:
            raise
        return arguments


def matching_part(batch: Any, model: nn.Module, example: Any) -> Any:
    """Return the part of a batch that matches the example input of the model.

    Raises:
        MisconfigurationException: if no part does.

    Example:
        >>> matching_part([torch.ones(4, 2), torch.zeros(4)], nn.Linear(2, 1), torch.zeros(1, 2)).shape
        torch.Size([4, 2])
    """
    wanted = list(tensors_in(example))
    for candidate in batch_candidates(batch, model):
        tensors = list(tensors_in(candidate))
        if len(tensors) == len(wanted) and all(map(_alike, tensors, wanted)):
            return candidate
    raise MisconfigurationException(
        f"No part of {describe(batch)}, a batch of the train dataloader, matches the example input of "
        f"`{type(model).__name__}`, {describe(example)}. Let `forward` accept such batches, or compensate after the "
        "fit with `engine.compensate`."
    )


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.ndim == other.ndim and one.ndim > 0 and one.is_floating_point() == other.is_floating_point()

"""Calibration batches, drawn from the train dataloader without affecting training.

Samplers are copied before use, and all random states of the dataloader and its dataset are restored.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from engine.program import tensors_in
from lightning_compress.trainer.packages import MisconfigurationException, isolate_rng
from lightning_compress.trainer.passed import passed
from lightning_compress.trainer.target import batch_candidates, describe

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_LONGEST = 1000  # length up to which a container is searched for generators
_NOT_SEARCHED = (Tensor, np.ndarray, str, bytes, int, float, complex, type(None), type, nn.Parameter)


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
    with _reseeded(loader, seed):
        for batch in _copied(loader, seed):
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
        arguments = passed(pl_module, model, (batch, 0))
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


@contextmanager
def _reseeded(loader: Any, seed: int) -> Iterator[None]:
    """Seed all random states that a dataloader may draw from, and restore them afterwards."""
    generators = list(_generators(loader))
    states = [(generator, _state(generator)) for generator in generators]
    with isolate_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        for generator in generators:
            _seed(generator, seed)
        try:
            yield
        finally:
            for generator, state in states:
                _restore(generator, state)


def _generators(root: Any) -> Iterator[Any]:
    """Yield the random number generators reachable from an object."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, _NOT_SEARCHED) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, _GENERATORS):
            yield thing
        elif isinstance(thing, Mapping):
            waiting += list(thing.values()) if len(thing) <= _LONGEST else []
        elif isinstance(thing, (list, tuple, set, frozenset)):
            waiting += list(thing) if len(thing) <= _LONGEST else []
        else:
            waiting += [*getattr(thing, "__dict__", {}).values(), getattr(thing, "__self__", None)]


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state  # type: ignore[call-arg]
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.seed(seed)


def _copied(loader: Any, seed: int) -> Iterable[Any]:
    """Return a dataloader with the same dataset and copies of everything that has a position, such as samplers."""
    if not isinstance(loader, DataLoader):
        return iter(_copy(loader, {}))
    parts = {name: getattr(loader, name) for name in ("sampler", "batch_sampler", "generator")}
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        parts["dataset"] = dataset
        copies = _copy(parts, {})
    else:
        copies = _copy(parts, {id(dataset): dataset})
    for generator in _generators({name: part for name, part in copies.items() if name != "dataset"}):
        _seed(generator, seed)
    other = copy.copy(loader)
    vars(other).update(copies, _iterator=None, persistent_workers=False)
    return other


def _copy(thing: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(thing, memo)
    except (TypeError, RuntimeError) as error:
        raise MisconfigurationException(
            f"The order of the train dataloader cannot be copied ({error}), so drawing from it would affect training. "
            "Use a `DataLoader` whose sampler or iterable dataset supports `copy.deepcopy`."
        ) from error

"""Drawing from dataloaders without affecting training: order, workers and random states are preserved.

Samplers and iterable datasets are copied before use, and the random generators that a loader reaches are restored.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_compress.trainer.packages import MisconfigurationException, isolate_rng

_SEEDS = 2**32
"""Number of the seeds that NumPy takes."""

__all__ = ["copied_loader", "first_of", "first_of_each", "reseeded", "same_order"]

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_LONGEST = 1000  # length up to which a container is searched for generators
_NOT_SEARCHED = (Tensor, np.ndarray, str, bytes, int, float, complex, type(None), type, nn.Parameter)


def first_of(loader: Any) -> Any:
    """Return the first batch of a loader; None if it is empty.

    Args:
        loader: the loader; its persistent workers, samplers and iterable datasets are not used if they can be copied.

    Raises:
        MisconfigurationException: if the loader would yield one batch less afterwards.

    Example:
        >>> first_of([torch.zeros(2), torch.ones(2)])
        tensor([0., 0.])
    """
    if isinstance(loader, DataLoader):
        return next(iter(_like(loader)), None)
    return next(_copy_of_iterator(loader) if iter(loader) is loader else iter(loader), None)


def first_of_each(loaders: Any) -> Any:
    """Return the first batch of each loader in a collection.

    Args:
        loaders: a loader, or mappings and lists of loaders.

    Example:
        >>> loaders = {"images": DataLoader([1, 2]), "texts": DataLoader([3])}
        >>> first_of_each(loaders)
        {'images': tensor([1]), 'texts': tensor([3])}
    """
    if isinstance(loaders, Mapping):
        return {key: first_of_each(part) for key, part in loaders.items()}
    if isinstance(loaders, (list, tuple)):
        return [first_of_each(part) for part in loaders]
    return first_of(loaders)


@contextmanager
def same_order(loader: Any) -> Iterator[None]:
    """Restore the states of all random generators that a loader reaches after the body.

    Args:
        loader: a loader, or a collection of them.
    """
    states = [(generator, _state(generator)) for generator in _generators(loader)]
    try:
        yield
    finally:
        for generator, state in states:
            _restore(generator, state)


@contextmanager
def reseeded(loader: Any, seed: int) -> Iterator[None]:
    """Seed all random states that a dataloader may draw from, and restore them afterwards.

    Args:
        loader: the dataloader.
        seed: any integer.
    """
    seed %= _SEEDS
    with same_order(loader), isolate_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        for generator in _generators(loader):
            _seed(generator, seed)
        yield


def _generators(root: Any) -> Iterator[Any]:
    """Yield the random number generators reachable from an object."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        obj = waiting.pop()
        if isinstance(obj, _NOT_SEARCHED) or id(obj) in seen:
            continue
        seen.add(id(obj))
        if isinstance(obj, _GENERATORS):
            yield obj
        elif isinstance(obj, Mapping):
            waiting += list(obj.values()) if len(obj) <= _LONGEST else []
        elif isinstance(obj, (list, tuple, set, frozenset)):
            waiting += list(obj) if len(obj) <= _LONGEST else []
        else:
            waiting += [*getattr(obj, "__dict__", {}).values(), getattr(obj, "__self__", None)]


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
    seed %= _SEEDS
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state  # type: ignore[call-arg]
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.seed(seed)


def copied_loader(loader: Any, seed: int) -> Iterable[Any]:
    """Return a dataloader with the same dataset and copies of everything that has a position, such as samplers.

    Args:
        loader: a dataloader, or anything else that can be iterated over.
        seed: of the copies' generators.

    Raises:
        MisconfigurationException: if a part cannot be copied.
    """
    if not isinstance(loader, DataLoader):
        return iter(_copy(loader, {}))
    copies = _copied_parts(loader)
    for generator in _generators({name: part for name, part in copies.items() if name != "dataset"}):
        _seed(generator, seed)
    return _with(loader, copies)


def _copied_parts(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return copies of the parts of a dataloader that have a position."""
    parts = {name: getattr(loader, name) for name in ("sampler", "batch_sampler", "generator")}
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        return dict(_copy(parts | {"dataset": dataset}, {}))
    return dict(_copy(parts, {id(dataset): dataset}))


def _with(loader: DataLoader[Any], parts: Mapping[str, Any]) -> DataLoader[Any]:
    """Return a dataloader with other parts and its own workers."""
    other = copy.copy(loader)
    vars(other).update(parts, _iterator=None, persistent_workers=False)
    return other


def _like(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a dataloader that continues from another one's position without moving it, if its parts can be copied."""
    try:
        return _with(loader, _copied_parts(loader))
    except MisconfigurationException:
        if isinstance(loader.dataset, IterableDataset) and iter(loader.dataset) is iter(loader.dataset):
            raise MisconfigurationException(_one_pass(loader.dataset)) from None
        return _with(loader, {})


def _copy_of_iterator(iterator: Any) -> Any:
    try:
        return copy.deepcopy(iterator)
    except (TypeError, RuntimeError):
        raise MisconfigurationException(_one_pass(iterator)) from None


def _one_pass(data: Any) -> str:
    return (
        f"A dataloader can iterate over a {type(data).__name__} only once, so the batch drawn to trace the model would "
        "be missing from training. Use data whose `__iter__` starts over, or pass `example_input=` and `steps=False`."
    )


def _copy(obj: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(obj, memo)
    except (TypeError, RuntimeError) as error:
        raise MisconfigurationException(
            f"The order of the train dataloader cannot be copied ({error}), so drawing from it would affect training. "
            "Use a `DataLoader` whose sampler or iterable dataset supports `copy.deepcopy`."
        ) from error

"""The module of a LightningModule to compress, and its example input."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torchmetrics import Metric, MetricCollection

import engine
from engine.errors import EngineError
from lightning_compress.trainer.loaders import first_of, same_order
from lightning_compress.trainer.model_arguments import first_model_arguments
from lightning_compress.trainer.packages import LIGHTNING_MODULES, MisconfigurationException, isolate_rng

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


__all__ = [
    "batch_candidates",
    "batch_of",
    "describe",
    "find_example",
    "find_model",
    "first_batch",
    "from_shape",
    "place_example",
    "to_device",
]


def find_model(pl_module: LightningModule, path: str | None = None) -> tuple[str, nn.Module]:
    """Find the model to compress and its path inside the LightningModule.

    Args:
        pl_module: the LightningModule.
        path: path of the submodule (``""`` is the LightningModule itself), or ``None``: the LightningModule if it
            overrides ``forward``, else its only child with parameters that is neither a metric nor a loss.

    Returns:
        ``(path, model)``.

    Raises:
        MisconfigurationException: if there is no such submodule, or more than one candidate.
    """
    if path is not None:
        return path, _submodule(pl_module, path)
    if type(pl_module).forward not in [vars(cls).get("forward") for cls in LIGHTNING_MODULES]:
        return "", pl_module
    candidates = {name: child for name, child in pl_module.named_children() if _is_network(child)}
    if len(candidates) != 1:
        problem = f"has {len(candidates)} candidates ({', '.join(candidates)})" if candidates else "has none"
        raise MisconfigurationException(
            f"Which module should be compressed? `{type(pl_module).__name__}` does not override `forward` and "
            f"{problem} among its attributes. Name one, as in `model='net'`."
        )
    return next(iter(candidates.items()))


def _submodule(pl_module: nn.Module, path: str) -> nn.Module:
    try:
        return pl_module.get_submodule(path)
    except AttributeError as error:
        names = ", ".join(name for name, _ in pl_module.named_children())
        raise MisconfigurationException(
            f"`model={path!r}` is not a module of `{type(pl_module).__name__}`, whose children are: {names}."
        ) from error


def _is_network(module: nn.Module) -> bool:
    return not isinstance(module, (Metric, MetricCollection, _Loss)) and any(True for _ in module.parameters())


def find_example(
    trainer: Trainer,
    pl_module: LightningModule,
    model: nn.Module,
    example_input: Any = None,
    loader: Any = None,
    placed: bool = True,
) -> Any:
    """Find an example input that ``model`` accepts.

    Args:
        trainer: the Trainer.
        pl_module: the LightningModule.
        model: the model to trace, ``pl_module`` or one of its submodules.
        example_input: the user's argument: a tensor is one argument, a tuple or list positional arguments, a mapping
            keyword arguments, a tuple of integers a shape; ``None`` uses ``example_input_array``, else the first
            training batch or the part of it that `training_step` passes to the model.
        loader: dataloader whose first batch is used instead of the first training batch.
        placed: whether to move the example to the model's device and convert it to the Trainer's precision.

    Returns:
        A tensor, tuple or mapping, as ``engine.trace`` accepts it.

    Raises:
        MisconfigurationException: if there is no example input, or the model rejects it.
    """
    if example_input is not None:
        source, candidates = "the argument `example_input`", [from_shape(example_input)]
    elif pl_module.example_input_array is not None:
        source, candidates = "`example_input_array`", [pl_module.example_input_array]
    else:
        source = "the first training batch" if loader is None else "the first validation batch"
        batch = first_batch(trainer) if loader is None else batch_of(loader)
        candidates = [c for part in (_head(batch), batch) for c in batch_candidates(part, model)]
    first = source == "the first training batch"
    further = (lambda: first_model_arguments(trainer, pl_module, model)) if first else list
    example = _accepted(model, candidates, source, lambda c: place_example(c, trainer, model), further)
    return place_example(example, trainer, model) if placed else example


def from_shape(example_input: Any) -> Any:
    """Convert a shape to a tensor of random numbers; return any other example input unchanged.

    Example:
        >>> from_shape((1, 2)).shape
        torch.Size([1, 2])
    """
    if isinstance(example_input, (tuple, list)) and example_input and all(type(n) is int for n in example_input):
        return torch.randn(tuple(example_input), generator=torch.Generator().manual_seed(0))
    return example_input


def place_example(example: Any, trainer: Trainer, model: nn.Module) -> Any:
    """Return an example input on the device of the model, in the precision of the Trainer."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return trainer.precision_plugin.convert_input(to_device(example, device))


def to_device(data: Any, device: torch.device | str) -> Any:
    """Move all tensors of a collection to ``device``.

    Example:
        >>> to_device((torch.ones(1), "label"), "cpu")
        (tensor([1.]), 'label')
    """
    return apply_to_collection(data, Tensor, lambda tensor: tensor.detach().to(device))


def _accepted(
    model: nn.Module,
    candidates: Sequence[Any],
    source: str,
    placed: Callable[[Any], Any],
    further: Callable[[], list[Any]],
) -> Any:
    """Return the first candidate that the model accepts; ``further`` is called if it accepts none."""
    reason: EngineError | None = None
    for candidate in itertools.chain(candidates, _from(further)):
        try:
            engine.trace(model, placed(candidate))
        except EngineError as error:
            reason = reason or error
        else:
            return candidate
    tried = describe(candidates[0]) if candidates else "nothing"
    raise MisconfigurationException(
        f"`{type(model).__name__}` rejects the example input from {source} ({tried}): {reason} "
        "Pass the arguments of its `forward`, as in `example_input=torch.ones(1, 3, 32, 32)` (a tuple for several)."
    ) from reason


def _from(make: Callable[[], list[Any]]) -> Iterator[Any]:
    for example in make():
        yield from (_head(example), example)


def first_batch(trainer: Trainer) -> Any:
    """Return the first batch of the train dataloader, preserving random states.

    Raises:
        MisconfigurationException: if there is no single train dataloader or it is empty.
    """
    loader = trainer.train_dataloader
    if loader is None or isinstance(loader, (Mapping, list, tuple)):
        raise MisconfigurationException(
            "There is no example input: the LightningModule has no `example_input_array`, and there is no single train "
            "dataloader to draw a batch from. Pass one, as in `example_input=torch.ones(1, 3, 32, 32)`."
        )
    return batch_of(loader)


def batch_of(loader: Any) -> Any:
    """Return the first batch of a dataloader, preserving random states.

    Raises:
        MisconfigurationException: if it is empty.

    Example:
        >>> batch_of([torch.zeros(2)])
        tensor([0., 0.])
    """
    with isolate_rng(), same_order(loader):
        batch = first_of(loader)
    if batch is not None:
        return batch
    raise MisconfigurationException("There is no example input: the dataloader is empty.")


def _head(batch: Any) -> Any:
    # Two samples suffice, and verification runs on them several times.
    sizes: list[int] = []
    apply_to_collection(batch, Tensor, lambda tensor: sizes.extend(tensor.shape[:1]))
    return apply_to_collection(batch, Tensor, lambda t: t[:2] if t.ndim and t.shape[0] == sizes[0] else t)


def batch_candidates(batch: Any, model: nn.Module) -> Iterator[Any]:
    """Yield the parts of a batch that ``model`` may accept, most likely first, in the form for ``engine.trace``.

    Example:
        >>> [describe(c) for c in batch_candidates([torch.ones(2, 3), torch.zeros(2)], nn.Identity())]
        ['Tensor[2, 3]', '(Tensor[2, 3], Tensor[2])', '([Tensor[2, 3], Tensor[2]])']
    """
    if isinstance(batch, Mapping):
        names = inspect.signature(model.forward).parameters
        yield {name: value for name, value in batch.items() if name in names}
        yield batch
        yield (batch,)
    elif isinstance(batch, (tuple, list)):
        if batch:
            yield from batch_candidates(batch[0], model)
        yield from (tuple(batch[:n]) for n in range(2, len(batch) + 1))
        yield (batch,)
    else:
        yield batch


def describe(value: Any) -> str:
    """Describe types and shapes of an example input, for messages.

    Example:
        >>> describe({"x": torch.ones(2, 3), "flag": True})
        '{x: Tensor[2, 3], flag: bool}'
    """
    if isinstance(value, Tensor):
        return f"Tensor{list(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {describe(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        inner = ", ".join(describe(item) for item in value)
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    return type(value).__name__

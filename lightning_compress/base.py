"""What all callbacks share: which model they work on, with which example input, under which strategy."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

import engine
from engine.errors import EngineError
from lightning_compress.averages import follow_loading
from lightning_compress.loading import follow_checkpoints
from lightning_compress.packages import LIGHTNING_MODULES, Callback, MisconfigurationException, isolate_rng
from lightning_compress.steps import TRAINING, cannot_follow, forget_steps, same_order, step_entries

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

    from lightning_compress.selection import Masks

# Strategies that shard or flatten parameters: a channel is then no slice of any one tensor.
SHARDING = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")
SUPPORTED = ("SingleDeviceStrategy", "DDPStrategy")


def check_strategy(trainer: Trainer) -> None:
    """Refuse strategies under which channels cannot be masked or removed.

    Raises:
        MisconfigurationException: for FSDP, DeepSpeed and model parallelism, and for strategies that derive from
            neither the single-device nor the DDP strategy.
    """
    names = [cls.__name__ for cls in type(trainer.strategy).__mro__]
    if any(name in SHARDING for name in names) or not any(name in SUPPORTED for name in names):
        raise MisconfigurationException(
            f"Compression works on one device and with DDP, not under `{names[0]}`, which does not keep each parameter "
            "whole on every device. Train without these callbacks there and compact the checkpoint offline "
            "(`lightning_compress.compact_checkpoint`), or choose `strategy='ddp'`."
        )


def find_model(pl_module: LightningModule, path: str | None = None) -> tuple[str, nn.Module]:
    """The model to work on and its path inside the LightningModule.

    Args:
        pl_module: the LightningModule.
        path: path of the submodule (``""`` is the LightningModule itself), or ``None``: the LightningModule where it
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
            f"Which model is to be compressed? `{type(pl_module).__name__}` does not override `forward` and {problem} "
            "among its attributes. Name one, as in `model='net'`."
        )
    return next(iter(candidates.items()))


def _submodule(pl_module: nn.Module, path: str) -> nn.Module:
    try:
        return pl_module.get_submodule(path)
    except AttributeError as error:
        names = ", ".join(name for name, _ in pl_module.named_children())
        raise MisconfigurationException(
            f"`model={path!r}` is no module of `{type(pl_module).__name__}`, whose children are: {names}."
        ) from error


def _is_network(module: nn.Module) -> bool:
    return not isinstance(module, (Metric, MetricCollection, _Loss)) and any(True for _ in module.parameters())


def find_example(trainer: Trainer, pl_module: LightningModule, model: nn.Module, example_input: Any = None) -> Any:
    """An example input that ``model`` accepts, on its device and in the trainer's precision.

    Args:
        trainer: the Trainer that fits ``pl_module``.
        pl_module: the LightningModule.
        model: the model to be traced, ``pl_module`` or a part of it.
        example_input: what the user passed: a tensor is one argument, a tuple or list positional arguments, a mapping keywords,
            a tuple of integers a shape; ``None`` means ``example_input_array``, else the first training batch.

    Returns:
        A tensor, tuple or mapping in the form that ``engine.trace`` takes.

    Raises:
        MisconfigurationException: if there is no example input, or the model rejects it.
    """
    if example_input is not None:
        source, candidates = "the argument `example_input`", [from_shape(example_input)]
    elif pl_module.example_input_array is not None:
        source, candidates = "`example_input_array`", [pl_module.example_input_array]
    else:
        source, batch = "the first training batch", first_batch(trainer)
        candidates = [c for part in (_head(batch), batch) for c in batch_candidates(part, model)]
    return _accepted(model, [_placed(c, trainer, model) for c in candidates], source)


def from_shape(example_input: Any) -> Any:
    """Random numbers where a shape is given, else what is given.

    Example:
        >>> from_shape((1, 2)).shape
        torch.Size([1, 2])
    """
    if isinstance(example_input, (tuple, list)) and example_input and all(type(n) is int for n in example_input):
        return torch.randn(tuple(example_input), generator=torch.Generator().manual_seed(0))
    return example_input


def _placed(example: Any, trainer: Trainer, model: nn.Module) -> Any:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return trainer.precision_plugin.convert_input(to_device(example, device))


def to_device(data: Any, device: torch.device | str) -> Any:
    """All tensors of a collection on ``device``.

    Example:
        >>> to_device((torch.ones(1), "label"), "cpu")
        (tensor([1.]), 'label')
    """
    return apply_to_collection(data, Tensor, lambda tensor: tensor.detach().to(device))


def _accepted(model: nn.Module, candidates: Sequence[Any], source: str) -> Any:
    reason: EngineError | None = None
    for candidate in candidates:
        try:
            engine.trace(model, candidate)
        except EngineError as error:
            reason = reason or error
        else:
            return candidate
    tried = describe(candidates[0]) if candidates else "nothing"
    raise MisconfigurationException(
        f"`{type(model).__name__}` rejects the example input from {source} ({tried}): {reason} "
        "Pass what its `forward` takes, as in `example_input=torch.ones(1, 3, 32, 32)` (a tuple for several arguments)."
    ) from reason


def first_batch(trainer: Trainer) -> Any:
    """The first batch of the train dataloader; random states stay as they are.

    Raises:
        MisconfigurationException: if there is no single train dataloader or it is empty.
    """
    loader = trainer.train_dataloader
    if loader is None or isinstance(loader, (Mapping, list, tuple)):
        raise MisconfigurationException(
            "There is no example input: the LightningModule has no `example_input_array`, and there is no single train "
            "dataloader to take a batch from. Pass one, as in `example_input=torch.ones(1, 3, 32, 32)`."
        )
    with isolate_rng(), same_order(loader):
        for batch in loader:
            return batch
    raise MisconfigurationException("There is no example input: the train dataloader is empty.")


def _head(batch: Any) -> Any:
    # Two samples say as much as the whole batch, and the verification runs on them several times.
    sizes: list[int] = []
    apply_to_collection(batch, Tensor, lambda tensor: sizes.extend(tensor.shape[:1]))
    return apply_to_collection(batch, Tensor, lambda t: t[:2] if t.ndim and t.shape[0] == sizes[0] else t)


def batch_candidates(batch: Any, model: nn.Module) -> Iterator[Any]:
    """The parts of a batch that ``model`` may take, likeliest first, in the form that ``engine.trace`` takes.

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
    """The kinds and shapes in an example input, for messages.

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


class CompressionCallback(Callback):
    """A callback that works on one model inside the LightningModule.

    Args:
        model: path of the model inside the LightningModule; ``None``: see :func:`find_model`.
        example_input: what the model takes; ``None``: see :func:`find_example`.
    """

    def __init__(self, model: str | None = None, example_input: Any = None) -> None:
        super().__init__()
        self.model = model
        self.example_input = example_input
        self._example: Any = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        follow_checkpoints(pl_module)
        if stage == "fit":
            check_strategy(trainer)
            follow_loading(pl_module)
            forget_steps(pl_module)
            self._example = None

    def compacted(
        self, trainer: Trainer, pl_module: LightningModule, cuts: Mapping[nn.Parameter, engine.Slice]
    ) -> None:
        """Follow the model, which was just made smaller and trains on; on all ranks.

        Args:
            trainer: the Trainer.
            pl_module: the LightningModule.
            cuts: what stays of each parameter that got smaller; whatever has a parameter's shape is cut like it.
        """

    def before_masking(
        self, trainer: Trainer, pl_module: LightningModule, path: str, masks: Masks, graph: engine.Graph
    ) -> None:
        """Look at a model of which channels are about to be masked; on all ranks.

        Args:
            trainer: the Trainer.
            pl_module: the LightningModule.
            path: path of the model inside it.
            masks: repaired masks, relative to the model, with those of this pruning and of earlier ones.
            graph: the model as it is.
        """

    def during_masking(
        self, trainer: Trainer, pl_module: LightningModule, path: str, masks: Masks, graph: engine.Graph
    ) -> None:
        """Change a model of which channels are about to be masked, once all callbacks have looked; on all ranks.

        Args:
            trainer: the Trainer.
            pl_module: the LightningModule.
            path: path of the model inside it.
            masks: as in `before_masking`.
            graph: the model as it was.
        """

    def after_masking(self, trainer: Trainer, pl_module: LightningModule, path: str) -> None:
        """Change a model of which channels were just masked; on all ranks.

        Args:
            trainer: the Trainer.
            pl_module: the LightningModule.
            path: path of the model inside it.
        """

    def steps(self) -> Sequence[str]:
        """Names of the LightningModule's steps that what this callback does must not change."""
        return ()

    def trace(self, trainer: Trainer, pl_module: LightningModule, training: bool = True) -> engine.Graph:
        """Record the model, and the steps that a callback of the Trainer must not change.

        Args:
            trainer: the Trainer.
            pl_module: the LightningModule.
            training: whether the training step is among them, as training goes on.

        Raises:
            MisconfigurationException: where a step cannot be recorded.
        """
        model, example = self.target(pl_module)[1], self.example(trainer, pl_module)
        callbacks = [c for c in trainer.callbacks if isinstance(c, CompressionCallback)]  # type: ignore[attr-defined]
        kinds = list(dict.fromkeys(kind for callback in callbacks for kind in callback.steps()))
        entries = step_entries(trainer, pl_module, [kind for kind in kinds if training or kind != TRAINING])
        try:
            return engine.trace(model, example, entries=entries)
        except EngineError as error:
            if entries:
                raise cannot_follow(error) from error
            raise

    def target(self, pl_module: LightningModule) -> tuple[str, nn.Module]:
        """Path and module of the model, looked up anew: modules may be exchanged between the hooks."""
        return find_model(pl_module, self.model)

    def example(self, trainer: Trainer, pl_module: LightningModule) -> Any:
        """The example input, on the model's device. A batch is drawn once per fit."""
        model = self.target(pl_module)[1]
        if self._example is None:
            self._example = find_example(trainer, pl_module, model, self.example_input)
        return _placed(self._example, trainer, model)

"""Knowledge distillation from the dense network during pruning."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

import engine
from engine.bounds import check_kinds, check_number
from engine.errors import EngineError
from engine.files import is_compacted_file, read_any
from engine.program import copied, stored_tensors
from lightning_compress.callbacks.base import CompressionCallback
from lightning_compress.callbacks.pruning import ChannelPruning
from lightning_compress.callbacks.teacher import DistillationLoss, Teacher, find_layers, output_channels
from lightning_compress.checkpoints.compacted import instantiate, load_compacted
from lightning_compress.selection.amounts import as_patterns
from lightning_compress.trainer.imports import check_takes, imported
from lightning_compress.trainer.packages import MisconfigurationException, overrides
from lightning_compress.trainer.strategy import parallel
from lightning_compress.trainer.target import to_device

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

    from lightning_compress.selection.amounts import Masks

_LOSSES = ("kl", "mse")


class Distillation(CompressionCallback):
    r"""Add the distance between the outputs of the model and of a teacher to the loss of each training step.

    .. math:: L = L_{step} + w \, T^2 \, KL(\mathrm{softmax}(z_{teacher} / T) \,\|\, \mathrm{softmax}(z / T))

    It works with any LightningModule with automatic optimization whose ``training_step`` calls the model. The teacher
    runs on the model's inputs in eval mode and without gradients, which costs one more forward pass. The added loss is
    logged as ``distillation_loss``.

    Args:
        teacher: by default a frozen copy of the model right before the first pruning (at the start of the fit if no
            `ChannelPruning` prunes it); a module, which is copied; or the path of a checkpoint of this LightningModule,
            compacted or not.
        weight: weight of the added loss; with 0 the teacher does not run.
        temperature: T of ``"kl"``.
        layers: name patterns of layers whose outputs are compared with the teacher's, too; each adds its squared error,
            relative to the teacher's squared outputs. If a compaction removes channels during training, only
            convolutions and linear layers can be compared.
        loss: ``"kl"``; ``"mse"``, the mean squared error of all outputs, without T; a function of both outputs, or its
            import path.
        dim: dimension of the classes for ``"kl"``; not needed for outputs (samples, classes).
        model: path of the model inside the LightningModule.

    Attributes:
        teacher: the argument.

    Raises:
        MisconfigurationException: for an invalid argument, manual optimization, a teacher that does not match the
            model, or a training step that does not call the model.

    Example:
        >>> callbacks = [ChannelPruning(amount=0.5), Distillation(weight=0.5, temperature=4.0)]
        >>> callbacks = [Distillation("dense.ckpt", layers=["layer3.*.conv2"])]

    Source: Hinton et al., Distilling the Knowledge in a Neural Network, 2015 (arXiv 1503.02531).
    """

    def __init__(
        self,
        teacher: nn.Module | str | os.PathLike[str] | None = None,
        weight: float = 1.0,
        temperature: float = 4.0,
        layers: str | Sequence[str] | None = None,
        loss: str | Callable[[Any, Any], Tensor] = "kl",
        dim: int | None = None,
        model: str | None = None,
    ) -> None:
        check_kinds(Distillation.__init__, locals(), MisconfigurationException)
        super().__init__(model)
        check_number("weight", weight, 0, error=MisconfigurationException)
        check_number("temperature", temperature, above=0, error=MisconfigurationException)
        if teacher is not None and not isinstance(teacher, (nn.Module, str, os.PathLike)):
            raise MisconfigurationException(f"`teacher` must be a module or a checkpoint path, got {teacher!r}.")
        function = loss if callable(loss) or loss in _LOSSES else imported(loss, "loss", _LOSSES)
        if callable(function):
            check_takes(function, "loss", ["the model's outputs", "the teacher's outputs"])
        if dim is not None:
            check_number("dim", dim, whole=True, error=MisconfigurationException)
        self.teacher, self.weight, self.temperature = teacher, weight, temperature
        self.layers, self.loss, self.dim = as_patterns(layers), loss, dim
        self._loss = DistillationLoss(function, temperature, dim)
        self._saved: dict[str, Any] = {}
        self._forget()

    def _forget(self) -> None:
        self._module: nn.Module | None = None
        self._ready = False
        self._kept: dict[str, Tensor] = {}
        self._undo: Callable[[], None] | None = None

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(model=self.model)

    @override
    def state_dict(self) -> dict[str, Any]:
        copied = self._ready and self.teacher is None and self._module is not None
        weights = stored_tensors(self._module) if copied and self._module is not None else {}
        return {"teacher": to_device(weights, "cpu"), "kept": to_device(self._kept, "cpu")}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        if not pl_module.automatic_optimization:
            raise MisconfigurationException(
                "`Distillation` adds to the loss that `training_step` returns, but Lightning ignores it with manual "
                "optimization. Set `automatic_optimization = True`, or add the teacher's loss in your step."
            )
        self._forget()
        self._saved = {}
        if self.weight and self.teacher is None and not overrides(pl_module, "configure_model"):
            # Before a checkpoint is restored, because its model may be smaller than the teacher.
            self._module = _frozen_copy(self.target(pl_module)[1])

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.weight:
            return
        path, model = self.target(pl_module)
        names = find_layers(model, self.layers)
        if self.teacher is not None:
            self._module = self._loaded(pl_module)
        if self._module is None:
            self._module = _frozen_copy(model)
        trainer.precision_plugin.convert_module(self._module.to(pl_module.device))
        find_layers(self._module, names)
        if self._saved.get("teacher"):
            self._restore(self._saved["teacher"])
        elif self.teacher is None and not any(c.target(pl_module)[0] == path for c in _prunings(trainer)):
            self._copy(trainer, model)
        self._ready = self._ready or self.teacher is not None
        self._kept = dict(self._saved.get("kept", {}))
        self._install(trainer, pl_module)

    def _loaded(self, pl_module: LightningModule) -> nn.Module:
        if isinstance(self.teacher, nn.Module):
            return _frozen_copy(self.teacher)
        assert self.teacher is not None
        path = os.fspath(self.teacher)
        cls = next(c for c in type(pl_module).__mro__ if "_engine_made_by" not in vars(c))
        try:
            if is_compacted_file(path):
                whole: Any = load_compacted(path, cls, map_location="cpu")
            else:
                checkpoint: Any = read_any(path)
                whole = instantiate(cls, checkpoint, {}, path)
                whole.load_state_dict(checkpoint["state_dict"])
        except (EngineError, RuntimeError, KeyError, TypeError) as error:
            raise MisconfigurationException(
                f"The teacher cannot be loaded from {path!r} as a `{cls.__name__}`: {str(error).rstrip('.')}. Pass "
                "the module itself."
            ) from error
        return _frozen_copy(whole.get_submodule(self.target(pl_module)[0]))

    def _restore(self, weights: Mapping[str, Tensor]) -> None:
        if self._module is None or not _alike(stored_tensors(self._module), weights):
            raise MisconfigurationException(
                "The shapes of the teacher in the checkpoint do not match the module. Resume with the module as built "
                "at the start of the fit, before any compaction."
            )
        self._write(weights)

    def _copy(self, trainer: Trainer, model: nn.Module) -> None:
        """Copy the model's weights of rank 0 to the teacher on all ranks."""
        weights = stored_tensors(model)
        if self._module is None or not _alike(stored_tensors(self._module), weights):
            self._module = _frozen_copy(model)
        if not parallel(trainer).alone:
            weights = trainer.strategy.broadcast(to_device(weights, "cpu"))
        self._write(weights)

    @torch.no_grad()
    def _write(self, weights: Mapping[str, Tensor]) -> None:
        assert self._module is not None
        for name, tensor in stored_tensors(self._module).items():
            tensor.copy_(weights[name])
        self._ready = True

    @override
    def before_masking(
        self, trainer: Trainer, pl_module: LightningModule, path: str, masks: Masks, graph: engine.Graph
    ) -> None:
        own, model = self.target(pl_module)
        if self.weight and not self._ready and own == path:
            self._copy(trainer, model)

    @override
    def after_compaction(
        self, trainer: Trainer, pl_module: LightningModule, cuts: Mapping[Tensor, engine.Slice]
    ) -> None:
        model = self.target(pl_module)[1]
        for name in find_layers(model, self.layers):
            layer = model.get_submodule(name)
            weight = getattr(layer, "weight", None)
            cut = cuts.get(weight) if isinstance(weight, nn.Parameter) else None
            if cut is not None:
                kept = output_channels(layer, cut)
                kept = self._kept[name].cpu()[kept] if name in self._kept else kept
                self._kept = {**self._kept, name: kept}

    # ------------------------------------------------------------------ the training step

    def _install(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the LightningModule's training step in one that adds to its loss."""
        step = pl_module.training_step

        @functools.wraps(step)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            # While the step is traced, the module is attached to a stub Trainer.
            if not self._ready or pl_module._trainer is not trainer:
                return step(*args, **kwargs)
            with self._teaching(pl_module) as teacher:
                out = step(*args, **kwargs)
            return self._add_loss(pl_module, out, teacher)

        own = {name: vars(pl_module)[name] for name in ("training_step",) if name in vars(pl_module)}

        def undo() -> None:
            vars(pl_module).pop("training_step", None)
            vars(pl_module).update(own)

        self._undo = undo
        vars(pl_module)["training_step"] = training_step

    @contextmanager
    def _teaching(self, pl_module: LightningModule) -> Iterator[Teacher]:
        """Run the teacher on each input of the model inside the context."""
        assert self._module is not None
        model = self.target(pl_module)[1]
        teacher = Teacher(self._module)
        with ExitStack() as scope:
            for hook in teacher.register_hooks(model, find_layers(model, self.layers)):
                scope.callback(hook.remove)
            yield teacher

    def _add_loss(self, pl_module: LightningModule, out: Any, teacher: Teacher) -> Any:
        if out is None:
            return None  # the step is skipped
        if not teacher.outputs:
            raise MisconfigurationException(
                f"`training_step` did not call `{type(self.target(pl_module)[1]).__name__}`, so there is nothing to "
                "compare with the teacher. Call the model itself in the step, or pass the module that it calls as "
                "`model=`."
            )
        losses = [self._loss(outputs, self._kept) for outputs in teacher.outputs]
        extra = self.weight * torch.stack(losses).mean()
        pl_module.log("distillation_loss", extra.detach())
        if isinstance(out, Tensor):
            return out + extra
        return {**out, "loss": out["loss"] + extra}

    def _remove(self) -> None:
        if self._undo is not None:
            self._undo()
        self._undo = None

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove()

    def __getstate__(self) -> dict[str, Any]:
        # Strategies that spawn processes pickle the callbacks.
        return {**self.__dict__, "_undo": None}


def _prunings(trainer: Trainer) -> list[ChannelPruning]:
    return [c for c in trainer.callbacks if isinstance(c, ChannelPruning)]  # type: ignore[attr-defined]


def _alike(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return {name: tensor.shape for name, tensor in one.items()} == {n: tensor.shape for n, tensor in other.items()}


def _frozen_copy(model: nn.Module) -> nn.Module:
    """Copy a model for inference only."""
    return copied(model).eval().requires_grad_(False)

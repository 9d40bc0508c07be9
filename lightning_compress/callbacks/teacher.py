"""The teacher's outputs for the inputs of a model, and losses between them and the model's own outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import engine
from engine.program import tensors_in
from lightning_compress.trainer.packages import MisconfigurationException

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(eq=False)
class Outputs:
    """Outputs of the teacher and the student for one input.

    Attributes:
        teacher, student: outputs of the two models.
        layers: pairs of the teacher's and the student's outputs, by layer name.
    """

    teacher: Any
    student: Any = None
    layers: dict[str, list[tuple[Tensor, Any]]] = field(default_factory=dict)


class Teacher:
    """Run a teacher on the inputs of each call of a student with gradients.

    Args:
        model: the teacher, in eval mode.

    Attributes:
        outputs: outputs of both models, one entry per call.
    """

    def __init__(self, model: nn.Module) -> None:
        self.outputs: list[Outputs] = []
        self._model = model
        self._layer_outputs: dict[str, list[Tensor]] = {}
        self._in_call = False

    def register_hooks(self, student: nn.Module, layers: Sequence[str]) -> Iterator[RemovableHandle]:
        """Register hooks that run the teacher whenever the student is called, and yield their handles.

        Args:
            student: the student.
            layers: names of layers whose outputs are compared.
        """
        yield student.register_forward_pre_hook(self._run, with_kwargs=True)
        for name in layers:
            yield student.get_submodule(name).register_forward_hook(self._student_hook(name))
        yield student.register_forward_hook(self._finish, always_call=True)
        for name in layers:
            yield self._model.get_submodule(name).register_forward_hook(self._teacher_hook(name))

    def _run(self, student: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or self._in_call:
            return
        self._layer_outputs = {}
        self._in_call = True
        with torch.inference_mode():
            # either model may write to its inputs or outputs in place
            args, kwargs = apply_to_collection((args, dict(kwargs)), Tensor, torch.clone)
            try:
                out = self._model(*args, **kwargs)
            except Exception as error:
                self._in_call = False
                raise MisconfigurationException(
                    f"The teacher, a `{type(self._model).__name__}`, rejects the inputs of the model: "
                    f"{type(error).__name__}: {error}"
                ) from error
        self.outputs.append(Outputs(apply_to_collection(out, Tensor, torch.clone)))
        self._layer_outputs = {n: [t.clone() for t in tensors] for n, tensors in self._layer_outputs.items()}

    def _teacher_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            self._layer_outputs.setdefault(name, []).append(out)

        return hook

    def _student_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            expected = self._layer_outputs.get(name)
            if self._in_call and expected:
                self.outputs[-1].layers.setdefault(name, []).append((expected.pop(0), out))

        return hook

    def _finish(self, student: nn.Module, args: Any, out: Any) -> None:
        if self._in_call:
            self._in_call = False
            self.outputs[-1].student = out
            if out is None:  # it raised an error, which a step may catch
                self.outputs.pop()


@dataclass(frozen=True)
class DistillationLoss:
    """Distance between the outputs of a student and of its teacher.

    Attributes:
        loss: ``"kl"``, ``"mse"``, or a function of the student's and the teacher's outputs.
        temperature: temperature of ``"kl"``.
        dim: dimension of the classes, if the outputs are not (samples, classes).

    Example:
        >>> logits = torch.tensor([[1.0, 2.0]])
        >>> DistillationLoss("kl", 4.0)(Outputs(logits, logits), {}).item()
        0.0
    """

    loss: Any
    temperature: float
    dim: int | None = None

    def __call__(self, outputs: Outputs, kept: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of the outputs plus those of the layers.

        Args:
            outputs: outputs of both models.
            kept: indices of the teacher's channels that the student still has, by layer name; all if missing.
        """
        total = self._output_loss(outputs)
        for name, pairs in outputs.layers.items():
            for teacher, student in pairs:
                total = total + _relative_error(name, student, teacher, kept.get(name))
        return total

    def _output_loss(self, outputs: Outputs) -> Tensor:
        if callable(self.loss):
            result: Any = self.loss(outputs.student, outputs.teacher)
            if not isinstance(result, Tensor) or result.numel() != 1:
                raise MisconfigurationException(
                    f"The function `loss={self.loss!r}` of `Distillation` must return a tensor of one number, got "
                    f"{result!r}."
                )
            return result.reshape(())
        if self.loss == "kl":
            return self._divergence(_logits(outputs.student), _logits(outputs.teacher))
        pairs = zip(_floating(outputs.student), _floating(outputs.teacher), strict=True)
        return torch.stack([F.mse_loss(one.float(), other.float()) for one, other in pairs]).mean()

    def _divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        dim = 1 if self.dim is None and student.ndim == 2 else self.dim
        if dim is None:
            raise MisconfigurationException(
                f"Which dimension of the outputs, of shape {tuple(student.shape)}, holds the classes? Pass "
                "`Distillation(dim=1)` for segmentation maps, `dim=-1` for tokens, or another `loss`."
            )
        if not -student.ndim <= dim < student.ndim:
            raise MisconfigurationException(
                f"`Distillation(dim={dim})` is no dimension of the outputs, of shape {tuple(student.shape)}."
            )
        kind = torch.promote_types(student.dtype, torch.float32)
        ours, theirs = (F.log_softmax(z.to(kind) / self.temperature, dim) for z in (student, teacher))
        divergence = F.kl_div(ours, theirs, reduction="none", log_target=True).sum(dim)
        return divergence.mean() * self.temperature**2


def _floating(out: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(out) if tensor.is_floating_point()]


def _logits(out: Any) -> Tensor:
    if isinstance(out, Mapping) and isinstance(out.get("logits"), Tensor):
        logits: Tensor = out["logits"]
        return logits
    tensors = _floating(out)
    if len(tensors) != 1:
        raise MisconfigurationException(
            f"The model returns {len(tensors)} floating-point tensors; which one holds the logits? Pass `Distillation("
            "loss=...)`, a function of the student's and the teacher's outputs."
        )
    return tensors[0]


def _relative_error(name: str, student: Any, teacher: Any, kept: Tensor | None) -> Tensor:
    if not isinstance(student, Tensor) or not isinstance(teacher, Tensor):
        raise MisconfigurationException(
            f"The layer {name!r} of `layers` returns a {type(student).__name__} instead of a tensor."
        )
    kind = torch.promote_types(student.dtype, torch.float32)
    scale = teacher.to(kind).square().sum().clamp(min=torch.finfo(kind).tiny)
    if student.shape != teacher.shape and kept is not None:
        dims = [d for d in range(teacher.ndim) if student.size(d) != teacher.size(d)]
        teacher = teacher.index_select(dims[0], kept.to(teacher.device))
    if student.shape != teacher.shape:
        raise MisconfigurationException(
            f"The layer {name!r} of `layers` returns shape {tuple(student.shape)}, but the teacher's returns "
            f"{tuple(teacher.shape)}: name a convolution or a linear layer, whose channels can be followed."
        )
    return (student.to(kind) - teacher.to(kind)).square().sum() / scale


def find_layers(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names of the modules that match a pattern, in the model's order.

    Raises:
        MisconfigurationException: if a pattern matches no module.

    Example:
        >>> find_layers(nn.Sequential(nn.ReLU(), nn.Linear(1, 1)), ["1"])
        ['1']
    """
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            some = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
            raise MisconfigurationException(
                f"`layers`: {pattern!r} matches no module of `{type(model).__name__}`, whose modules are {some}."
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]


def output_channels(layer: nn.Module, cut: engine.Slice) -> Tensor:
    """Return the output channels that remain after slicing a layer's weight, in ascending order.

    Args:
        layer: a convolution, a linear layer, or another layer whose weight has its outputs first.
        cut: the slice of the weight.

    Example:
        >>> output_channels(nn.Linear(2, 4), engine.Slice.along(0, torch.tensor([0, 3]), (4, 2)))
        tensor([0, 3])
    """
    shape = cut.before
    if isinstance(layer, _TRANSPOSED):
        groups = layer.groups if shape[0] % layer.groups == 0 else 1
        first = torch.arange(shape[0]).div(shape[0] // groups, rounding_mode="floor") * shape[1]
        channels = first[:, None] + torch.arange(shape[1])
    else:
        channels = torch.arange(shape[0])
    channels = channels.reshape(*channels.shape, *([1] * (len(shape) - channels.ndim)))
    return cut.apply(channels.expand(shape).contiguous()).unique()

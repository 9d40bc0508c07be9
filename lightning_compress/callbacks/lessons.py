"""A teacher's answers to the inputs of a model, and the distance of the model's own answers from them."""

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
class Answer:
    """Outputs of one call.

    Attributes:
        teacher, student: what the two returned.
        inside: by the layer's name, pairs of the teacher's and the student's outputs.
    """

    teacher: Any
    student: Any = None
    inside: dict[str, list[tuple[Tensor, Any]]] = field(default_factory=dict)


class Lesson:
    """The teacher's answers to each call of a model with gradients.

    Args:
        teacher: in eval mode.
    """

    def __init__(self, teacher: nn.Module) -> None:
        self.answers: list[Answer] = []
        self._teacher = teacher
        self._expected: dict[str, list[Tensor]] = {}
        self._open = False

    def listen(self, model: nn.Module, layers: Sequence[str]) -> Iterator[RemovableHandle]:
        """Yield the handles of hooks that run the teacher whenever the model is called.

        Args:
            model: the student.
            layers: names of layers whose outputs are kept.
        """
        yield model.register_forward_pre_hook(self._ask, with_kwargs=True)
        for name in layers:
            yield model.get_submodule(name).register_forward_hook(self._keeping(name))
        yield model.register_forward_hook(self._keep)
        for name in layers:
            yield self._teacher.get_submodule(name).register_forward_hook(self._expecting(name))

    def _ask(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or self._open:
            return
        self._expected = {}
        self._open = True
        with torch.inference_mode():
            # either may write into what it is given
            ours = apply_to_collection((args, dict(kwargs)), Tensor, torch.clone)
            answer = self._teacher(*ours[0], **ours[1])
        self.answers.append(Answer(apply_to_collection(answer, Tensor, torch.clone)))
        self._expected = {n: [t.clone() for t in tensors] for n, tensors in self._expected.items()}

    def _expecting(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            self._expected.setdefault(name, []).append(out)

        return hook

    def _keeping(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            expected = self._expected.get(name)
            if self._open and expected:
                self.answers[-1].inside.setdefault(name, []).append((expected.pop(0), out))

        return hook

    def _keep(self, model: nn.Module, args: Any, out: Any) -> None:
        if self._open:
            self.answers[-1].student = out
            self._open = False


@dataclass(frozen=True)
class Losses:
    """The distance of an answer from the teacher's.

    Attributes:
        loss: ``"kl"``, ``"mse"``, or a function of the student's and the teacher's outputs.
        temperature: of ``"kl"``.
        dim: the classes' dimension, where the outputs are not (samples, classes).

    Example:
        >>> logits = torch.tensor([[1.0, 2.0]])
        >>> Losses("kl", 4.0)(Answer(logits, logits), {}).item()
        0.0
    """

    loss: Any
    temperature: float
    dim: int | None = None

    def __call__(self, answer: Answer, kept: Mapping[str, Tensor]) -> Tensor:
        """The loss of the outputs plus those of the layers.

        Args:
            answer: of both.
            kept: by the layer's name, which of the teacher's channels the student still has; all where it is missing.
        """
        total = self._of_outputs(answer)
        for name, pairs in answer.inside.items():
            for teacher, student in pairs:
                total = total + _relative_error(name, student, teacher, kept.get(name))
        return total

    def _of_outputs(self, answer: Answer) -> Tensor:
        if callable(self.loss):
            result: Tensor = self.loss(answer.student, answer.teacher)
            return result
        if self.loss == "kl":
            return self._divergence(_logits(answer.student), _logits(answer.teacher))
        pairs = zip(_floating(answer.student), _floating(answer.teacher), strict=True)
        return torch.stack([F.mse_loss(one.float(), other.float()) for one, other in pairs]).mean()

    def _divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        dim = 1 if self.dim is None and student.ndim == 2 else self.dim
        if dim is None:
            raise MisconfigurationException(
                f"Which dimension of the outputs, of shape {tuple(student.shape)}, holds the classes? Pass "
                "`Distillation(dim=1)` for maps of classes, `dim=-1` for tokens, or another `loss`."
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
            f"The model returns {len(tensors)} floating point tensors; which of them are logits? Pass `Distillation("
            "loss=...)`, a function of the student's and the teacher's outputs."
        )
    return tensors[0]


def _relative_error(name: str, student: Any, teacher: Any, kept: Tensor | None) -> Tensor:
    if not isinstance(student, Tensor) or not isinstance(teacher, Tensor):
        raise MisconfigurationException(
            f"The layer {name!r} of `layers` returns no tensor but {type(student).__name__}."
        )
    kind = torch.promote_types(student.dtype, torch.float32)
    scale = teacher.to(kind).square().sum().clamp(min=torch.finfo(kind).tiny)
    if student.shape != teacher.shape and kept is not None:
        dims = [d for d in range(teacher.ndim) if student.size(d) != teacher.size(d)]
        teacher = teacher.index_select(dims[0], kept.to(teacher.device))
    if student.shape != teacher.shape:
        raise MisconfigurationException(
            f"The layer {name!r} of `layers` gives {tuple(student.shape)} where the teacher's gives "
            f"{tuple(teacher.shape)}: name a convolution or a linear layer, whose channels can be followed."
        )
    return (student.to(kind) - teacher.to(kind)).square().sum() / scale


def find_layers(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Return the names of the modules that match, in the model's order.

    Raises:
        MisconfigurationException: where a pattern matches nothing.

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
    """Return which output channels a cut of a layer's weight leaves, ascending.

    Args:
        layer: a convolution, a linear layer, or another with its outputs first.
        cut: of its weight.

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

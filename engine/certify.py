"""Prove a compaction: masked and compacted model compute the same, inside as well as at the output.

On randomised mobile nets the output hardly depends on the input, so that comparing outputs alone hides wrongly removed
channels. What every norm and every contraction puts out is compared too, channel by channel, each relative to that
channel's own size. Channels are compared by random projections: for ``r ~ N(0, I)`` the expected square of ``<r, a -
b>`` is ``|a - b|²``, so a few of them find any difference, and nothing large has to be stored.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from engine.decisions import Decision, Decisions
from engine.errors import VerificationError
from engine.ops.heads import headwise
from engine.signature import signature
from engine.tracer import call_model, evaluation
from engine.trees import tensors_in
from engine.witness import Channels, Witness

__all__ = ["Certificate", "Observation", "compare", "observe"]

_PROJECTIONS = 4


@dataclass(frozen=True)
class Certificate:
    """The verdict on a compaction.

    Attributes:
        verified: whether numbers were compared; False where only shapes were predicted (``confidence=0``).
        max_error: largest relative error found.
        tolerance: what it was held against.
        dtype: dtype of the comparison.
        samples: random samples that were run.
        shapes: shapes of the inputs that were run.
        compared: number of tensors compared inside the model, per run.
        exact_in_train: whether train mode is exact too (no constant was folded).
        notes: what could not be compared, and why.
        exact: whether it is meant to compute the same; False where norms over what is left were asked for. Then
            ``max_error`` is that of the outputs, and nothing is verified.

    Example:
        >>> import engine
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
        >>> mask = torch.tensor([1, 0, 1, 0])
        >>> masks = {"0": {"weight": mask.view(4, 1, 1, 1), "bias": mask}}
        >>> speedup = engine.ModelSpeedup(net, torch.rand(2, 1, 4, 4), masks)
        >>> _ = speedup.speedup_model()
        >>> speedup.certificate.verified, speedup.certificate.max_error < 1e-9, speedup.certificate.exact_in_train
        (True, True, True)
    """

    verified: bool = False
    max_error: float = math.nan
    tolerance: float = math.nan
    dtype: str = ""
    samples: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    compared: int = 0
    exact_in_train: bool = False
    notes: tuple[str, ...] = ()
    exact: bool = True

    def state_dict(self) -> dict[str, Any]:
        """Return the certificate as primitives."""
        state = asdict(self)
        return state | {"shapes": [list(s) for s in self.shapes], "notes": list(self.notes)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Certificate:
        """Read what `state_dict` wrote."""
        known = {name: state[name] for name in cls.__dataclass_fields__ if name in state}
        known["shapes"] = tuple(tuple(int(n) for n in s) for s in known.get("shapes", ()))
        return cls(**{**known, "notes": tuple(known.get("notes", ()))})

    def __str__(self) -> str:
        train = "train mode too" if self.exact_in_train else "eval mode (constants were folded)"
        lines = [f"exact in {train}"]
        if not self.exact:
            measured = "" if math.isnan(self.max_error) else f"; the outputs differ by {self.max_error:.1e}"
            lines = [f"not exact: norms take the statistics of the channels that are left{measured}"]
        elif self.verified:
            lines = [
                f"verified: relative error {self.max_error:.1e} (tolerance {self.tolerance:.0e}, {self.dtype}) on "
                f"{self.samples} samples, outputs and {self.compared} inner tensors; {lines[0]}"
            ]
        else:
            lines = [f"not verified by numbers; by the rules {lines[0]}"]
        return "Certificate: " + "\n  ".join([*lines, *self.notes])


@dataclass
class Observation:
    """Projections of what a model computed.

    Attributes:
        inner: per observed node (channels, projections), with the norm of each channel.
        outputs: the outputs.
        runs: number of observed calls.
        decisions: what was compared, sorted and chosen on the way.
    """

    inner: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    runs: int = 0
    decisions: list[Decision] = field(default_factory=list)


class _Observer(TorchDispatchMode):
    """Projects the outputs of the witness's nodes as they are computed."""

    def __init__(
        self, witness: Witness, channels: Sequence[Channels], found: Observation, decisions: Decisions
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._witness, self._channels, self._found, self._decisions = witness, channels, found, decisions
        self._ops = {node.op for node in witness.nodes}
        self._directions: dict[tuple[int, torch.dtype], Tensor] = {}
        self._depth = 0  # of modules that are not looked into

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op; look at its output if it is the next of the witness's nodes."""
        args, kwargs = _unrounded(func, args, kwargs or {})
        out, op = func(*args, **kwargs), signature(func).op
        if self._depth:
            return out
        if op in self._ops:
            self._look(op, next(tensors_in(out)))
        return self._decisions.settle(op, args, kwargs, out)

    @contextmanager
    def passing_over(self, model: nn.Module) -> Iterator[None]:
        """Look away while a module runs that is not looked into."""

        def enter(module: nn.Module, args: Any) -> None:
            self._depth += 1

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._depth -= 1

        hooks: list[RemovableHandle] = []
        for module in map(model.get_submodule, self._witness.opaque):
            hooks.append(module.register_forward_pre_hook(enter))
            hooks.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _look(self, op: str, out: Tensor) -> None:
        position, self._found.runs = self._found.runs, self._found.runs + 1
        if position >= len(self._witness.nodes) or self._witness.nodes[position].op != op:
            return
        channels, dim = self._channels[position], self._witness.dims[position]
        if channels is not None and all(d < out.ndim and int(i.max()) < out.size(d) for d, i in channels.items()):
            for d, index in channels.items():
                out = out if d == dim else out.index_select(d, index.to(out.device))
            norms = torch.linalg.vector_norm(out, dim=[d for d in range(out.ndim) if d != dim]).cpu().double()
            projected = _projected(out, dim, self._random(out, dim)).cpu().double()
            chosen = channels.get(dim, slice(None))
            self._found.inner[position] = (projected[chosen], norms[chosen])

    def _random(self, out: Tensor, dim: int) -> Tensor:
        """Return random directions of what each channel of a tensor holds; those of the same size are made once."""
        size = out.numel() // max(out.size(dim), 1)
        if (size, out.dtype) not in self._directions:
            generator = torch.Generator().manual_seed(size)
            drawn = torch.randn(size, _PROJECTIONS, generator=generator, dtype=torch.float32)
            self._directions[size, out.dtype] = drawn.to(out)
        return self._directions[size, out.dtype].to(out.device)


def _projected(out: Tensor, dim: int, random: Tensor) -> Tensor:
    """Return ``rows @ random``, (channels, projections), where a row holds all of a channel; mostly without a copy."""
    if dim == out.ndim - 1:
        return (random.T @ out.reshape(-1, out.size(-1))).T
    if dim == 1:
        return torch.bmm(out.flatten(2), random.view(out.size(0), -1, random.size(1))).sum(0)
    return out.movedim(dim, 0).flatten(1) @ random


@functools.cache
def _dtype_at(func: Any) -> int | None:
    """Position of the argument that says in which dtype an op computes, or what it converts to."""
    names = [argument.name for argument in func._schema.arguments]
    return names.index("dtype") if "dtype" in names else None


def _unrounded(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Stay in float64 where a model converts to less (a norm in float32): no difference is rounded off then."""
    position = _dtype_at(func)
    if position is None or all(t.dtype != torch.float64 for t in tensors_in((args, kwargs))):
        return args, kwargs
    if len(args) > position and _is_less(args[position]):
        return (*args[:position], torch.float64, *args[position + 1 :]), kwargs
    return args, kwargs | {"dtype": torch.float64} if _is_less(kwargs.get("dtype")) else kwargs


def _is_less(dtype: Any) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype != torch.float64


def observe(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
    witness: Witness,
    channels: Sequence[Channels],
    earlier: Observation | None = None,
    tolerance: float = 0.0,
) -> Observation:
    """Run a model in eval mode with other parameters and buffers, and look inside.

    Args:
        model: is left as it was.
        tensors: parameters and buffers to run it with.
        inputs: positional and keyword arguments.
        witness, channels: what to look at.
        earlier: the run whose decisions are repeated wherever the numbers are the same.
        tolerance: relative difference up to which they are.
    """
    decisions = Decisions(None if earlier is None else earlier.decisions, tolerance)
    found = Observation(decisions=decisions.taken)
    buffers = {name for name, _ in model.named_buffers()}  # a forward may write into them
    own = {f"model.{name}": t.clone() if name in buffers else t for name, t in tensors.items()}
    observer = _Observer(witness, channels, found, decisions)
    with evaluation(model), headwise(model), torch.inference_mode(), observer.passing_over(model), observer:
        torch.manual_seed(0)
        out = torch.func.functional_call(_Call(model), own, inputs)
    found.outputs = [t.detach().cpu() for t in tensors_in(out)]
    return found


class _Call(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return call_model(self.model, args, kwargs)


def compare(reference: Observation, compacted: Observation, witness: Witness, tolerance: float) -> tuple[float, str]:
    """Return the largest relative error between two observations, and where it is.

    Raises:
        VerificationError: where the runs did not make the same calls, or the reference is not finite.
    """
    if reference.runs != compacted.runs or [t.shape for t in reference.outputs] != [t.shape for t in compacted.outputs]:
        raise VerificationError("The compacted model takes another path through its code than the masked one.")
    worst, where = 0.0, "the output"
    for old, new in zip(reference.outputs, compacted.outputs, strict=True):
        scale = float(old.abs().max()) if old.numel() else 0.0
        if not math.isfinite(scale):
            raise VerificationError("The masked model's own output is not finite on random inputs; nothing to compare.")
        worst = max(worst, _relative(float((old.double() - new.double()).abs().max()) if old.numel() else 0.0, scale))
    for position, (projected, norms) in reference.inner.items():
        if position not in compacted.inner:
            raise VerificationError(
                f"The compacted model does not reach {witness.nodes[position]!r} as the masked one does."
            )
        error = _inner_error(projected, norms, compacted.inner[position][0], tolerance)
        if error > worst:
            worst, where = error, repr(witness.nodes[position])
    return worst, where


def _relative(difference: float, scale: float) -> float:
    return difference / scale if scale > 0 else (0.0 if difference == 0 else math.inf)


def _inner_error(projected: Tensor, norms: Tensor, other: Tensor, tolerance: float) -> float:
    """Relative error per channel; what is so small that rounding hides it is measured against the largest channel."""
    resolution = torch.finfo(torch.float64).eps if tolerance < 1e-6 else torch.finfo(torch.float32).eps
    floor = 100 * resolution / tolerance * float(norms.max())
    error = (projected - other).abs().amax(1) / norms.clamp(min=max(floor, 1e-300))
    worst = float(error.max())
    return worst if math.isfinite(worst) else math.inf

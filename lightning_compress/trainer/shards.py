"""A model whose parameters are spread over the processes of a fit: look at it, cut it, compare it, write it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import engine
from engine.compaction import ShardedCompaction
from engine.errors import PlanError, TraceError, VerificationError
from engine.program import (
    distinct_modules,
    has_shards,
    map_tensors,
    owners,
    parts,
    placeholders,
    resharded,
    stored_tensors,
    support,
    tensors_in,
    whole,
)
from engine.recording import call_model, resolve_inputs
from lightning_compress.trainer.packages import MisconfigurationException

__all__ = ["Sharding", "check_whole_units"]

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_NOTE = (
    "Compared on the sharded model, on all ranks: the outputs, not what is inside. What is said of train mode holds by "
    "the rules alone."
)

_WHOLE = (
    "Under tensor parallelism the whole network is recorded, and not the part of one process: code that depends on the "
    "number of heads of a process has to ask its input for it (`x.view(batch, length, -1, head_dim)`)."
)


class Sharding:
    """A model, some of whose parameters are spread over processes; every process has to ask for the same.

    Args:
        model: the model, or the LightningModule.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @contextmanager
    def without_data(self) -> Iterator[None]:
        """Let the model be whole, on the meta device, for a while; within itself it does nothing.

        Raises:
            MisconfigurationException: for masks that would have no effect, or code that runs in parts alone.
        """
        self.at_rest()  # what was gathered are plain tensors
        pruned = engine.read_masks(self._model) if has_shards(self._model) else {}
        if pruned:
            raise MisconfigurationException(
                f"{next(iter(pruned))!r} is masked by `torch.nn.utils.prune`, whose masks are not sharded. Prune with "
                "`ChannelPruning`."
            )
        is_split = bool(self.parts())
        with placeholders(self._model) if has_shards(self._model) else nullcontext():
            try:
                yield
            except (TraceError, MisconfigurationException) as error:
                if not is_split or not isinstance(error.__cause__ or error, TraceError):
                    raise
                raise MisconfigurationException(f"{error} {_WHOLE}") from error

    def parts(self) -> dict[str, dict[int, int]]:
        """Into how many parts tensor parallelism splits the dimensions of parameters, by name; others are missing."""
        group_of = owners(self._model)
        splits = {name: parts(p, group_of) for name, p in self._model.named_parameters(remove_duplicate=False)}
        return {name: sizes for name, sizes in splits.items() if sizes}

    def at_rest(self) -> None:
        """Let the model hold its shards."""
        resharded(self._model)

    def prepared(self, plan: engine.Plan, optimizers: Sequence[Optimizer]) -> ShardedCompaction:
        """A change of the model and of its optimizers."""
        return ShardedCompaction(plan, self._model, optimizers)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the model run in eval mode, on all ranks together; its attributes and buffers are as before afterwards.

        What FSDP2 has freed cannot be looked at, so that objects inside of attributes are left alone.
        """
        modules = list(distinct_modules(self._model).values())
        before = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]
        buffers = {id(b): (b, b.clone()) for _, _, own in before for b in own.values() if b is not None}
        with torch.random.fork_rng(devices=[]):
            try:
                for module in modules:
                    module.training = False
                yield
            finally:
                self.at_rest()
                for module, attributes, own in before:
                    for name in vars(module).keys() - attributes.keys():
                        del vars(module)[name]
                    vars(module).update(attributes)
                    module._buffers.update(own)
                for buffer, values in buffers.values():
                    with torch.no_grad():
                        buffer.copy_(values)

    def outputs(self, example: Any, confidence: int) -> list[list[Tensor]]:
        """What the model computes of random inputs, the same ones on all ranks."""
        runs = []
        for seed in range(min(confidence, 2)):
            args, kwargs = resolve_inputs(_noise(example, seed))
            with self.running(), torch.no_grad():
                outputs = list(tensors_in(call_model(self._model, args, kwargs)))
            runs.append([whole(tensor) for tensor in outputs])
        return runs

    def compared(
        self, before: Any, example: Any, confidence: int, certificate: engine.Certificate
    ) -> engine.Certificate:
        """The certificate of a change, with what was compared.

        Raises:
            VerificationError: where the outputs differ.
        """
        if not before:
            return certificate
        after = self.outputs(example, confidence)
        error, dtype = 0.0, torch.float64
        for masked, small in zip(before, after, strict=True):
            for one, other in zip(masked, small, strict=True):
                if one.shape != other.shape:
                    raise VerificationError(
                        f"An output has shape {tuple(other.shape)} after the compaction, and {tuple(one.shape)} before."
                    )
                if one.is_floating_point() and one.numel():
                    scale = one.abs().max().clamp(min=torch.finfo(one.dtype).tiny)
                    error = max(error, float((one - other).abs().max() / scale))
                    dtype = min(dtype, one.dtype, key=lambda kind: torch.finfo(kind).bits)
        tolerance = _TOLERANCES.get(dtype, 1e-1)
        if not error <= tolerance:
            raise VerificationError(
                f"The outputs of the compacted model differ from those of the masked one by {error:.1e} (tolerance "
                f"{tolerance:.0e}, {dtype})."
            )
        shapes = tuple(tuple(tensor.shape) for tensor in tensors_in(example))
        return replace(
            certificate, verified=True, max_error=error, tolerance=tolerance, dtype=str(dtype).removeprefix("torch."),
            samples=sum(shape[0] if shape else 1 for shape in shapes[:1]) * len(before), shapes=shapes,
            notes=(*certificate.notes, _NOTE),
        )  # fmt: skip

    def digest(self) -> str:
        """A digest of the names, classes and shapes of the model."""
        stored = {name: tuple(tensor.shape) for name, tensor in stored_tensors(self._model).items()}
        kinds = {name: type(module).__name__ for name, module in self._model.named_modules()}
        return hashlib.sha256(repr((stored, kinds)).encode()).hexdigest()[:12]

    def state_dict(self) -> dict[str, Any]:
        """The state dict with whole tensors, on the CPU."""
        self.at_rest()
        state = self._model.state_dict()
        for name, value in state.items():
            state[name] = whole(value).cpu() if isinstance(value, Tensor) else value
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state dict of an optimizer with whole tensors, on the CPU."""
        state: dict[str, Any] = map_tensors(optimizer.state_dict(), lambda tensor: whole(tensor).cpu())
        return state


def check_whole_units(
    plan: engine.Plan, groups: Sequence[engine.Group], splits: Mapping[str, Mapping[int, int]]
) -> None:
    """Refuse a plan after which a head would be split over processes, each of which computes whole heads.

    Args:
        plan: the plan.
        groups: the dependency groups of the model before it.
        splits: what `Sharding.parts` says of the model.

    Raises:
        PlanError: naming the parameter.
    """
    for member in [member for group in groups for member in group.members]:
        cut = plan.slices.get(member.parameter)
        for dim, number in splits.get(member.parameter, {}).items():
            if cut is not None and support(member.units) == (dim,) and cut.shape[dim] % number == 0:
                kept = cut.apply_compact(member.units)
                before, after = (_shares(units.flatten(), number) for units in (member.units, kept))
                if any(count > before[unit] for unit, count in after.items()):
                    raise PlanError(
                        f"{member.parameter!r} would keep {cut.shape[dim]} channels along dimension {dim}, and tensor "
                        f"parallelism would split a head of them between two of its {number} processes. Prune "
                        f"attention to multiples of {number} times the size of a head "
                        "(`ChannelPruning(round_to=...)`), or leave it out (`exclude=`)."
                    )


def _shares(units: Tensor, number: int) -> Counter[int]:
    """In how many of the equal parts of a dimension each unit has channels."""
    return Counter(unit for part in units.chunk(number) for unit in part.unique().tolist())


def _noise(example: Any, seed: int) -> Any:
    """Random numbers in the form of an example; integers are those of the example, in another order."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype).to(tensor.device)
        order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
        return tensor.flatten()[order].view(tensor.shape)

    return map_tensors(example, drawn)

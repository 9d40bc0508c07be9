"""Models with sharded parameters: analysis, compaction, comparison and state dicts."""

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
    precision,
    resharded,
    stored_tensors,
    support,
    tensors_in,
    whole,
)
from engine.running import call_model, resolve_inputs
from lightning_compress.trainer.packages import MisconfigurationException

__all__ = ["Sharding", "check_whole_units", "shared_widths"]

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_NOTE = (
    "Only outputs of the sharded model were compared, on all ranks, not values inside the network. Exactness in train "
    "mode follows from the rules alone."
)

Splits = Mapping[str, Mapping[int, int]]
"""Number of parts into which tensor parallelism splits each dimension, by parameter name; others are omitted."""

_WHOLE = (
    "Under tensor parallelism the whole network is traced, not the part of one process: code that depends on the "
    "number of heads of a process has to infer it from its input (`x.view(batch, length, -1, head_dim)`)."
)


class Sharding:
    """A model with sharded parameters. All methods are collective: every process has to call them.

    Args:
        model: the model, or the LightningModule.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @contextmanager
    def without_data(self) -> Iterator[None]:
        """Replace shards by whole parameters on the meta device inside the context. Nested contexts have no effect.

        Raises:
            MisconfigurationException: for masks of `torch.nn.utils.prune`, or code that only runs on shards.
        """
        self.at_rest()  # gathered parameters are plain tensors
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
        """Return the number of parts into which tensor parallelism splits each dimension, by parameter name."""
        group_of = owners(self._model)
        splits = {name: parts(p, group_of) for name, p in self._model.named_parameters(remove_duplicate=False)}
        return {name: sizes for name, sizes in splits.items() if sizes}

    def at_rest(self) -> None:
        """Reshard parameters that were gathered."""
        resharded(self._model)

    def prepared(self, plan: engine.Plan, optimizers: Sequence[Optimizer]) -> ShardedCompaction:
        """Prepare the application of a plan to the model and its optimizers."""
        return ShardedCompaction(plan, self._model, optimizers)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the model in eval mode inside the context, and restore its attributes and buffers afterwards.

        Objects inside attributes are not restored, because tensors that FSDP2 has freed cannot be read.
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

    def outputs(self, example: Any, runs: int) -> list[Tensor]:
        """Return the model's outputs for random inputs, which are the same on all ranks."""
        outputs: list[Tensor] = []
        for seed in range(runs):
            with self.running(), torch.no_grad():
                outputs += tensors_in(call_model(self._model, *resolve_inputs(_noise(example, seed))))
        return [whole(tensor) for tensor in outputs]

    def compared(self, before: Any, example: Any, runs: int, certificate: engine.Certificate) -> engine.Certificate:
        """Compare the model's outputs with those before a compaction, and add the result to the certificate.

        Raises:
            VerificationError: if the outputs differ.
        """
        if not before:
            return certificate
        error, dtype = 0.0, precision(self._model)
        for one, other in zip(before, self.outputs(example, runs), strict=True):
            if one.shape != other.shape:
                raise VerificationError(
                    f"An output has shape {tuple(other.shape)} after the compaction, but {tuple(one.shape)} before."
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
            samples=sum(shape[0] if shape else 1 for shape in shapes[:1]) * runs, shapes=shapes,
            notes=(*certificate.notes, _NOTE),
        )  # fmt: skip

    def digest(self) -> str:
        """Return a digest of the names, classes and shapes of the model."""
        stored = {name: tuple(tensor.shape) for name, tensor in stored_tensors(self._model).items()}
        kinds = {name: type(module).__name__ for name, module in self._model.named_modules()}
        return hashlib.sha256(repr((stored, kinds)).encode()).hexdigest()[:12]

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict with whole tensors on the CPU."""
        self.at_rest()
        state = self._model.state_dict()
        for name, value in state.items():
            state[name] = whole(value).cpu() if isinstance(value, Tensor) else value
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict of an optimizer with whole tensors on the CPU."""
        state: dict[str, Any] = map_tensors(optimizer.state_dict(), lambda tensor: whole(tensor).cpu())
        return state


def check_whole_units(plan: engine.Plan, groups: Sequence[engine.Group], splits: Splits) -> None:
    """Check that a plan splits no head between processes, because each process computes whole heads.

    Args:
        plan: the plan.
        groups: the dependency groups of the model before the compaction.
        splits: as `Sharding.parts` returns them.

    Raises:
        PlanError: naming the parameter of a head that would be split.
    """
    for member, dim, number in _split(groups, splits):
        cut = plan.slices.get(member.parameter)
        if cut is None or cut.shape[dim] % number:
            continue
        if not _is_fair(member.units.flatten(), cut.apply_compact(member.units).flatten(), number):
            raise PlanError(
                f"{member.parameter!r} would keep {cut.shape[dim]} channels along dimension {dim}, so that tensor "
                f"parallelism would split a head between two of its {number} processes. Prune attention to multiples "
                f"of {number} times the head size (`ChannelPruning(round_to=...)`), or exclude it (`exclude=`)."
            )


def shared_widths(groups: Sequence[engine.Group], splits: Splits) -> dict[str, frozenset[int]]:
    """Return the numbers of units that divide into equal numbers of whole heads per process, by group name.

    Args:
        groups: the dependency groups of a model.
        splits: as `Sharding.parts` returns them; groups that are not split are omitted.
    """
    widths: dict[str, frozenset[int]] = {}
    for group in groups:
        labels = [(member.units.flatten(), number) for member, _, number in _split([group], splits)]
        sizes = range(1, group.size + 1)
        if labels:
            fair = (n for n in sizes if all(_is_fair(own, own[own < n], number) for own, number in labels))
            widths[group.name] = frozenset(fair)
    return widths


def _split(groups: Sequence[engine.Group], splits: Splits) -> Iterator[tuple[engine.Member, int, int]]:
    """Yield members that are split along their units, with the dimension and the number of parts."""
    for member in (member for group in groups for member in group.members):
        for dim, number in splits.get(member.parameter, {}).items():
            if support(member.units) == (dim,):
                yield member, dim, number


def _is_fair(units: Tensor, kept: Tensor, number: int) -> bool:
    """Whether splitting the kept channels into equal parts splits no unit more often than before."""
    if len(kept) % number or len(units) == len(units.unique()):
        return not len(kept) % number
    before, after = (_shares(own, number) for own in (units, kept))
    return all(count <= before[unit] for unit, count in after.items())


def _shares(units: Tensor, number: int) -> Counter[int]:
    """Count in how many of the equal parts of a dimension each unit has channels."""
    return Counter(unit for part in units.chunk(number) for unit in part.unique().tolist())


def _noise(example: Any, seed: int) -> Any:
    """Draw random numbers in the form of an example; integers are a permutation of the example's."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype).to(tensor.device)
        order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
        return tensor.flatten()[order].view(tensor.shape)

    return map_tensors(example, drawn)

"""Comparison of the masked and the compacted model, inside as well as at the output.

On randomised mobile nets the output hardly depends on the input, so that comparing outputs alone hides wrongly removed
channels. The outputs of every norm and every contraction are compared too, channel by channel, each relative to that
channel's own size. Channels are compared by a few random projections, which find any difference, so that nothing large
has to be stored.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from engine.ops import convolving, products, zeros
from engine.ops.draws import EvenDraws
from engine.program.arrays import plain
from engine.program.signature import signature
from engine.program.stored import distinct_modules, stored_tensors
from engine.program.trees import tensors_in
from engine.running.evaluation import State, evaluating
from engine.running.inputs import call_model
from engine.running.process import seed_generators
from engine.running.recomputed import RecomputedTensor
from engine.surgery.kinds.attention import headwise
from engine.verification.decisions import Decision, Decisions
from engine.verification.projections import PROJECTIONS, Directions, channel_norms
from engine.verification.remains import Remains
from engine.verification.results import results_of
from engine.verification.rounding import unrounded
from engine.verification.way import Way
from engine.verification.witness import Look, Witness

__all__ = ["Observation", "observe"]


@dataclass
class Observation:
    """Projections of what a model computed.

    They are written to memory reserved before the run, because small tensors allocated between short-lived activations
    would prevent the reuse of the activations' memory.

    Attributes:
        table: projections of the channels of all observed nodes, (projections, channels), float64; after `choose`, of
            the compared ones.
        norms: norm of each of these channels, in the reference run.
        counts: number of channels of each observed node in the table, in order.
        shapes: shape of the output of each node, or None if it was not reached.
        outputs: the outputs.
        runs: number of observed calls.
        written: number of channels in the table.
        reserved: memory for projections and norms of what is compared.
        decisions: the comparisons, sorts and choices of the run.
        diverged: whether the model took another path through its code than the recorded one.
        leaves: whether the call left something behind for the next one.
        again: observation of the next consecutive call, if there was one.
    """

    table: Tensor
    norms: Tensor
    counts: dict[int, int]
    shapes: list[tuple[int, ...] | None]
    outputs: list[Tensor] = field(default_factory=list)
    runs: int = 0
    written: int = 0
    reserved: tuple[Tensor, ...] = ()
    decisions: list[Decision] = field(default_factory=list)
    diverged: bool = False
    leaves: bool = False
    again: Observation | None = None

    @property
    def calls(self) -> list[Observation]:
        """The consecutive calls, starting with this one."""
        return [self, *(self.again.calls if self.again is not None else ())]

    @classmethod
    def of(cls, looks: Sequence[Look | None], reference: bool) -> Observation:
        """Reserve memory for the observed channels."""
        actual_looks = [look for look in looks if look is not None]
        compared = sum(look.size if look.channels is None else len(look.channels) for look in actual_looks)
        lengths = (compared, compared if reference else 0)
        reserved = _tables(*lengths)
        table, norms = _tables(*(sum(look.size for look in actual_looks) if length else 0 for length in lengths))
        return cls(table, norms, {}, [None] * len(looks), reserved=reserved)

    @property
    def finite(self) -> bool:
        """Whether all numbers are finite."""
        return all(bool(t.isfinite().all()) for call in self.calls for t in (*call.outputs, call.norms))

    def note(self, position: int, projected: Tensor, norms: Tensor | None) -> None:
        """Store the channels of a node."""
        start, stop = self.written, self.written + projected.size(1)
        self.counts[position], self.written = stop - start, stop
        self.table = _written(self.table, start, stop, projected)
        if norms is not None:
            self.norms = _written(self.norms, start, stop, norms)

    def choose(self, looks: Sequence[Look | None], comparable: Collection[int]) -> None:
        """Keep the channels to compare, of nodes that are comparable, in the order in which these ran."""
        rows, start, counts = [torch.zeros(0, dtype=torch.long)], 0, {}
        for position, count in self.counts.items():
            look = looks[position]
            if look is not None and position in comparable:
                rows.append((torch.arange(count) if look.channels is None else look.channels) + start)
                counts[position] = len(rows[-1])
            start += count
        self.counts = counts
        self.shapes = [shape if position in comparable else None for position, shape in enumerate(self.shapes)]
        index = torch.cat(rows)
        tables = (self.table, self.norms) if len(self.norms) else (self.table,)
        kept_tables = [_selected(table, index, out) for table, out in zip(tables, self.reserved, strict=False)]
        self.table, self.norms, self.reserved = (
            kept_tables[0],
            kept_tables[-1] if len(kept_tables) > 1 else self.norms,
            (),
        )

    def at(self, positions: Collection[int]) -> Tensor:
        """Return the projections at some of the observed nodes."""
        if list(self.counts) == list(positions):
            return self.table
        parts = dict(zip(self.counts, self.table.split(list(self.counts.values()), 1), strict=True))
        return torch.cat([parts[p] for p in positions], 1)


def _tables(channels: int, norms: int) -> tuple[Tensor, Tensor]:
    """Reserve memory for projections and norms."""
    return torch.empty(PROJECTIONS, channels, dtype=torch.float64), torch.empty(norms, dtype=torch.float64)


def _selected(table: Tensor, index: Tensor, out: Tensor) -> Tensor:
    """Return columns of a table, in the reserved memory if its size fits."""
    fits = out.size(-1) == len(index)
    return torch.index_select(table, -1, index, out=out) if fits else table.index_select(-1, index)


def _written(table: Tensor, start: int, stop: int, values: Tensor) -> Tensor:
    """Write values to the last dimension of a table, or of a longer copy if there are more than expected."""
    if stop > table.size(-1):
        table = torch.cat([table, table.new_empty(*table.shape[:-1], stop)], -1)
    table[..., start:stop] = values
    return table


_KERNELS = (zeros.in_float64, convolving.in_float64, products.in_float64)


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op; some in float64 by the engine's own kernels, where torch has none or a slow one."""
    for kernel in _KERNELS:
        output = kernel(func, args, kwargs)
        if output is not None:
            return output
    return func(*args, **kwargs)


class _Observer(TorchDispatchMode):
    """Projects the outputs of the witness's nodes as they are computed."""

    def __init__(
        self,
        witness: Witness,
        looks: Sequence[Look | None],
        observation: Observation,
        decisions: Decisions,
        wide: bool,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wide = wide  # whether the model runs in float64, and nothing is to be rounded off
        self._witness, self._looks, self._observation, self._decisions = witness, looks, observation, decisions
        self._ops = {node.op for node in witness.nodes}
        self._directions = Directions()
        self._depth = 0  # of modules that are not looked into
        self._modules = [""]  # that run
        self.way = Way(witness)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op, and observe its output if it is the next of the witness's nodes."""
        args, kwargs = unrounded(func, args, kwargs or {}) if self._wide else (args, kwargs or {})
        out, op = _computed(func, args, kwargs), signature(func).op
        if self._depth:
            return out
        if op in self._ops:
            self._look(op, next(tensors_in(out)))
        return self._decisions.settle(op, args, kwargs, out)

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Stop observing while an opaque module runs; if data decide, note which module runs."""
        watched = self._witness.opaque if not self._witness.decided else distinct_modules(model)
        hooks: list[RemovableHandle] = []
        for name in watched:
            hidden, module = name in self._witness.opaque, model.get_submodule(name)
            hooks.append(module.register_forward_pre_hook(functools.partial(self._enter, name, hidden)))
            hooks.append(module.register_forward_hook(functools.partial(self._leave, hidden), always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, name: str, hidden: bool, module: nn.Module, args: Any) -> None:
        self._depth += hidden
        self._modules.append(name)

    def _leave(self, hidden: bool, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= hidden
        self._modules.pop()

    def _look(self, op: str, out: Tensor) -> None:
        self._observation.runs += 1
        position = self.way.step(self._modules[-1] if self._witness.decided else "", op)
        if position is None:
            return
        self._observation.shapes[position] = tuple(out.shape)
        look = self._looks[position]
        if look is not None and look.fits(out):
            out = _summable(out)
            for d, index in look.others:
                out = out.index_select(d, index.to(out.device))
            norms = None if self._decisions.repeats else channel_norms(out, look.dim)
            self._observation.note(position, self._directions.project(out, look.dim), norms)


def _summable(tensor: Tensor) -> Tensor:
    """Return a tensor in a dtype whose range includes the sum of its squares."""
    narrow = tensor.is_floating_point() and torch.finfo(tensor.dtype).bits < 32
    return tensor.float() if narrow else tensor


def observe(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
    witness: Witness,
    looks: Sequence[Look | None],
    earlier: Observation | None = None,
    tolerance: float = 0.0,
    *further: tuple[tuple[Any, ...], Mapping[str, Any]],
) -> Observation:
    """Run a model in eval mode with other parameters and buffers, and observe its inner values.

    Args:
        model: the model, which is not changed.
        tensors: parameters and buffers to run it with.
        inputs: positional and keyword arguments.
        witness, looks: the nodes and the channels to observe.
        earlier: the run whose decisions are repeated if their inputs agree.
        tolerance: relative difference up to which they agree.
        further: arguments of consecutive calls, which read what the first has left behind.
    """
    calls: list[Observation] = []
    before = [None] * (1 + len(further)) if earlier is None else earlier.calls
    wide = any(tensor.dtype == torch.float64 for tensor in tensors.values())
    try:
        with evaluating(model, (), (inputs, *further)) as state, headwise(model), torch.inference_mode():
            _exchange(model, tensors)
            seed_generators(0)
            for arguments, reference in zip((inputs, *further), before, strict=True):
                decisions = Decisions(None if reference is None else reference.decisions, tolerance)
                calls.append(_call(model, arguments, witness, looks, decisions, state, wide))
    finally:
        for tensor in tensors.values():
            if isinstance(tensor, RecomputedTensor):
                tensor.forget()
    for call, following in itertools.pairwise(calls):
        call.again = following
    return calls[0]


def _call(
    model: nn.Module,
    arguments: Any,
    witness: Witness,
    looks: Sequence[Look | None],
    decisions: Decisions,
    state: State,
    wide: bool,
) -> Observation:
    """Run a model once, and observe its inner values."""
    observation = Observation.of(looks, reference=not decisions.repeats)
    observation.decisions = decisions.taken
    observer = _Observer(witness, looks, observation, decisions, wide)
    remains = Remains(model, state)
    with observer.following(model), observer, EvenDraws() if witness.draws else nullcontext():
        out = call_model(model, *arguments)
        observation.outputs = [
            plain(t.detach()).to("cpu", copy=True) for t in results_of(out, model, remains.before, witness.weights)
        ]
    del out
    observation.leaves = not decisions.repeats and remains.differ()
    comparable, observation.diverged = observer.way.end(), observer.way.diverged
    del observer
    observation.choose(looks, comparable)
    return observation


def _alias(tensor: Tensor) -> Tensor:
    """Return another tensor with the same memory, because a forward may assign its ``data``."""
    return tensor if isinstance(tensor, RecomputedTensor) else tensor.detach()


def _as_parameter(tensor: Tensor) -> nn.Parameter:
    """Return a tensor as code that looks parameters up expects it (`get_parameter`); a recomputed one as it is."""
    is_other = not isinstance(tensor, (nn.Parameter, RecomputedTensor))
    return nn.Parameter(tensor, requires_grad=False) if is_other else tensor  # type: ignore[return-value]


def _exchange(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace the tensors in a model's tables, under every name; `evaluating` restores the model's own.

    Index tables that a compaction added stay.
    """
    stored = stored_tensors(model)
    others = {id(stored[name]): _alias(tensor) for name, tensor in tensors.items()}
    for module in distinct_modules(model).values():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = _as_parameter(others.get(id(parameter), parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = others.get(id(buffer), buffer).clone()  # a forward may write into it

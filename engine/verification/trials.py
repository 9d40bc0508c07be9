"""The runs behind a verdict: random samples, resolutions, and batch sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.alternatives.axes import Axis, resized
from engine.ops.convolving import COLUMNS
from engine.program.contraction import Contraction
from engine.program.graph import Graph, Node
from engine.program.trees import map_tensors, tensors_in
from engine.rule import Registry

__all__ = ["Inputs", "Trial", "agree", "not_compared", "random_inputs", "sample_bytes", "sample_work", "small_inputs"]

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_SIDE = 32
"""Maximum size of the dimensions behind the channels in small inputs."""

_WIDE = torch.float64.itemsize


@dataclass(frozen=True)
class Trial:
    """One run of both models.

    Attributes:
        batch: number of samples, or None for the example's.
        larger: whether the dimensions behind the channels are larger than the example's.
        dtype: dtype to compute in, or None for the model's own.
        first: number of the first sample; a sample is the same in all runs of one resolution.
        smaller: whether these dimensions have half the example's size.
        wider: whether only the last of them is larger.
        resized: sizes of inputs that differ from the example's, possibly including the number of samples.
        calls: number of consecutive calls, on different samples.
    """

    batch: int | None
    larger: bool
    dtype: torch.dtype | None
    first: int = 0
    smaller: bool = False
    wider: bool = False
    resized: tuple[tuple[Axis, int], ...] = ()
    calls: int = 1

    def sizes(self, sizes: Sequence[int]) -> list[int]:
        """Return the sizes of the dimensions behind the channels, from those of the example."""
        if self.smaller:
            return [max(n // 2, 1) for n in sizes]
        first = len(sizes) - 1 if self.wider else 0 if self.larger else len(sizes)
        return [*sizes[:first], *(n + 32 if n >= 64 else 2 * n for n in sizes[first:])]

    @property
    def resolution(self) -> str:
        """Resolution of the run, in words."""
        if self._sides:
            return f"at other sizes ({', '.join(self._sides)})"
        other = "smaller" if self.smaller else "larger"
        return f"at a {other} resolution" if self.larger or self.smaller else "at the example's resolution"

    @property
    def place(self) -> tuple[Any, ...]:
        """A key of the resolution."""
        return self.larger, self.smaller, self.resized

    @property
    def _sides(self) -> list[str]:
        return [f"{axis}: {n} for {axis.size}" for axis, n in self.resized if not axis.batch]

    @property
    def samples(self) -> str:
        """Number of samples that run at once, in words."""
        batch = next((n for axis, n in self.resized if axis.batch), self.batch)
        return ("the example's batch size" if batch is None else f"batch size {batch}") + ", a second call" * (
            self.calls > 1
        )

    @property
    def precision(self) -> str:
        """Dtype of the run, in words."""
        return "the model's own dtype" if self.dtype is None else "float64"

    def __str__(self) -> str:
        return f"{self.resolution}, {self.samples}, {self.precision}"


def not_compared(rejected: Iterable[tuple[Trial, str]], notes: Sequence[str] = ()) -> Iterator[str]:
    """Yield notes on the runs that a model rejected, each cause once and unless it is noted already.

    Args:
        rejected: runs, with the errors that ended them.
        notes: notes that may name the cause already.

    Example:
        >>> error = "Net rejected the example input ((1, 3, 9) float32): ValueError: no. Pass example inputs that …"
        >>> [note] = not_compared([(Trial(1, True, None), error), (Trial(None, True, None), error)])
        >>> note.partition(": ")[2]
        'the model rejects that, with ValueError: no.'
    """
    causes: dict[tuple[str, str, str], list[str]] = {}
    for trial, error in rejected:
        causes.setdefault((trial.resolution, trial.precision, _cause(error)), []).append(trial.samples)
    for (resolution, precision, cause), sizes in causes.items():
        is_noted = any(cause in note for note in notes)
        where = f"{resolution}, {' or '.join(dict.fromkeys(sizes))}, {precision}"
        yield f"Not compared {where}: the model rejects that, {'as above' if is_noted else f'with {cause}'}."


def _cause(error: str) -> str:
    """Return the model's own error message, without the shapes of the inputs and the advice."""
    match = re.search(r"\): (.*?)\.* Pass example inputs", error, re.DOTALL)
    return error.removesuffix(".") if match is None else match[1]


def random_inputs(graph: Graph, trial: Trial, batch_dim: int, call: int = 0) -> Inputs:
    """Return random inputs like the graph's example inputs.

    Floating-point tensors become normal noise with the example's mean and deviation (0 and 1 if it is constant),
    different for each sample; other tensors are repeated.

    Args:
        graph: the model.
        trial: determines the number of samples and the sizes.
        batch_dim: the batch dimension of the inputs.
        call: number of the call among consecutive ones.
    """
    args, kwargs = resized(graph.args, dict(graph.kwargs), dict(trial.resized))
    tensors = list(tensors_in((args, kwargs)))
    size = _batch(graph, batch_dim)
    places = {id(tensor): (place + (call << 8)) for place, tensor in enumerate(tensors)}

    def vary(tensor: Tensor) -> Tensor:
        batched = trial.batch is not None and bool(size) and tensor.ndim > batch_dim and tensor.size(batch_dim) == size
        samples = range(trial.first, trial.first + (trial.batch or 1)) if batched else range(1)
        if tensor.is_floating_point():
            seeds = [(places[id(tensor)] << 32) + sample for sample in samples]
            return _noise(tensor, trial, batch_dim if batched else None, seeds).to(trial.dtype or tensor.dtype)
        if not batched or size is None:
            return tensor
        return tensor.index_select(batch_dim, (torch.tensor(samples) % size).to(tensor.device))

    return map_tensors(args, vary), map_tensors(kwargs, vary)


def _batch(graph: Graph, batch_dim: int) -> int | None:
    """Batch size of the example: that of the first tensor."""
    first = next(tensors_in((graph.args, graph.kwargs)))
    return first.size(batch_dim) if first.ndim > batch_dim else None


def _noise(tensor: Tensor, trial: Trial, batch_dim: int | None, seeds: Sequence[int]) -> Tensor:
    """Return noise in float64, one piece per seed along the batch dimension, else one piece."""
    shape = list(tensor.shape)
    shape[2:] = trial.sizes(shape[2:])
    if batch_dim is not None:
        shape[batch_dim] = 1
    drawn = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    noise = (drawn[0] if batch_dim is None else torch.cat(drawn, batch_dim)).to(tensor.device).double()
    wide = tensor.double()
    mean, deviation = wide.mean(), wide.std(correction=0)
    return noise.mul_(deviation).add_(mean) if float(deviation) > 0 else noise


def sample_bytes(graph: Graph, rules: Registry, batch_dim: int, trial: Trial) -> int:
    """Estimate the memory that one sample takes in float64 during the most memory-intensive op of a model.

    Args:
        graph: the model.
        rules: op rules, which identify contractions.
        batch_dim: the batch dimension of the inputs.
        trial: determines the resolution; the memory of an op is assumed to grow with the inputs.

    Returns:
        Bytes of the op's inputs, outputs and workspace. Tensors that later ops need are not counted.
    """
    held = max((_elements(node, rules.contractions(node)) for node in graph.nodes if node.path == "eval"), default=0)
    sizes = [t.shape[2:] for t in tensors_in((graph.args, graph.kwargs)) if t.is_floating_point()]
    growth = max((math.prod(trial.sizes(s)) / max(math.prod(s), 1) for s in sizes), default=1.0)
    for axis, n in trial.resized:
        growth *= 1.0 if axis.batch else n / axis.size
    return int(held * _WIDE * growth) // max(_batch(graph, batch_dim) or 1, 1)


def sample_work(graph: Graph, rules: Registry, batch_dim: int) -> int:
    """Return the number of multiplications in the layers of a model for one sample of the example's sizes.

    Args:
        graph: the model.
        rules: op rules, which identify contractions.
        batch_dim: the batch dimension of the inputs.
    """
    layers = [c for node in graph.nodes if node.path == "eval" for c in rules.contractions(node)]
    work = sum(math.prod(c.weight.shape) * math.prod(c.output.shape) // (c.groups * c.outputs) for c in layers)
    return work // max(_batch(graph, batch_dim) or 1, 1)


def _elements(node: Node, contractions: Sequence[Contraction]) -> int:
    """Return the number of elements that a node reads and writes, without weights, plus those of unfolded columns."""
    values = {value.index: value for value in (*node.inputs, *node.outputs) if not value.stored}
    return sum(math.prod(value.shape) for value in values.values()) + sum(map(_columns, contractions))


def _columns(c: Contraction) -> int:
    """Return the number of elements of the columns that a convolution unfolds at once."""
    if c.hidden or not c.weight.stored or c.stacked:
        return 0
    kernel = math.prod(c.weight.shape) // (c.groups * c.outputs * c.inputs)
    positions = math.prod(c.output.shape) // (c.groups * c.outputs)
    columns = kernel * c.inputs * positions if kernel > 1 else 0
    return columns if c.transposed else min(columns, COLUMNS // _WIDE)


def agree(whole: Sequence[Tensor], alone: Sequence[Tensor], place: int, batch_dim: int, tolerance: float) -> bool:
    """Whether a sample's outputs are independent of the other samples in its batch.

    Args:
        whole: outputs of a batch.
        alone: outputs of another batch, whose first sample is the one at ``place`` of the first.
        place: position of the sample.
        batch_dim: batch dimension of each output.
        tolerance: relative difference up to which outputs are the same.
    """
    if len(whole) != len(alone) or any(t.ndim <= batch_dim for t in (*whole, *alone)):
        return False
    if any(a.size(batch_dim) <= place or not b.size(batch_dim) for a, b in zip(whole, alone, strict=True)):
        return False
    return all(_close(*pair, tolerance) for pair in _rows(whole, alone, place, batch_dim))


def _rows(
    whole: Sequence[Tensor], alone: Sequence[Tensor], place: int, batch_dim: int
) -> Iterator[tuple[Tensor, Tensor]]:
    for one, other in zip(whole, alone, strict=True):
        yield one.select(batch_dim, place), other.select(batch_dim, 0)


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    scale = float(one.abs().max()) if one.numel() else 0.0
    return not one.numel() or float((one - other).abs().max()) <= tolerance * scale


def small_inputs(tree: Any) -> Any:
    """Return inputs with smaller dimensions behind the channels, so that a backward pass in float64 is fast.

    Example:
        >>> small_inputs((torch.zeros(2, 3, 64, 48),))[0].shape
        torch.Size([2, 3, 32, 32])
    """

    def cut(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or all(n <= _SIDE for n in tensor.shape[2:]):
            return tensor
        return tensor[tuple(slice(_SIDE if dim > 1 else None) for dim in range(tensor.ndim))]

    return map_tensors(tree, cut)

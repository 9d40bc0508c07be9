"""Batches for fitting weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.errors import InputError
from engine.program.contraction import Contraction
from engine.program.graph import Graph, Node
from engine.program.trees import map_tensors, tensors_in

__all__ = ["as_arguments", "drawn_rows", "inputs_of", "samples_in"]

_ROWS = 8  # minimum number of rows per column of the least squares
_FEWEST = 16_384  # minimum number of rows


def inputs_of(batches: Iterable[Any], graph: Graph, samples: int) -> list[list[Tensor]]:
    """Return the tensors of the batches, up to a number of samples.

    Raises:
        InputError: if there are too few samples, or a batch does not match the example.
    """
    examples = list(tensors_in((graph.args, graph.kwargs)))
    inputs: list[list[Tensor]] = []
    count = 0
    for batch in batches:
        tensors = _like_example(batch, examples)
        size = min(samples_in(tensors), samples - count)
        whole = all(len(t) == samples_in(tensors) for t in tensors if t.ndim)
        inputs.append([_placed(t[:size] if whole and t.ndim else t, e) for t, e in zip(tensors, examples, strict=True)])
        count += size
        if count >= samples:
            break
    if count < 2:
        raise InputError(
            f"The batches contain {count} samples; compensation needs at least two, and works well with some hundreds."
        )
    return inputs


def samples_in(tensors: Iterable[Tensor]) -> int:
    """Return the number of samples in the tensors of a batch, some of which may be a single number for all.

    Example:
        >>> samples_in([torch.tensor(0.5), torch.ones(8, 3)])
        8
    """
    return next((len(tensor) for tensor in tensors if tensor.ndim), 0)


def as_arguments(
    batches: Iterable[Any], graph: Graph, samples: int
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yield batches as positional and keyword arguments of the model.

    Raises:
        InputError: as for `inputs_of`.
    """
    for tensors in inputs_of(batches, graph, samples):
        remaining = iter(tensors)
        trees = (graph.args, dict(graph.kwargs))
        args, kwargs = (map_tensors(tree, lambda _, left=remaining: next(left)) for tree in trees)  # type: ignore[misc]
        yield args, kwargs


def _like_example(batch: Any, examples: Sequence[Tensor]) -> list[Tensor]:
    tensors = list(tensors_in(batch))
    if len(examples) == 1 and isinstance(batch, (list, tuple)) and tensors:
        tensors = tensors[:1]
    if len(tensors) != len(examples):
        raise InputError(
            f"A batch contains {len(tensors)} tensors, the example {len(examples)}; pass batches like `dummy_input`."
        )
    for tensor, example in zip(tensors, examples, strict=True):
        if tensor.is_meta:
            raise InputError(f"A batch of shape {tuple(tensor.shape)} is on the meta device and has no entries.")
        if tensor.ndim != example.ndim or tensor.is_floating_point() != example.is_floating_point():
            raise InputError(
                f"A batch contains a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}, but the example "
                f"{tuple(example.shape)} and {example.dtype}; pass batches like `dummy_input`."
            )
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise InputError(f"A batch of shape {tuple(tensor.shape)} contains NaN or infinite entries.")
    return tensors


def _placed(tensor: Tensor, example: Tensor) -> Tensor:
    return tensor.to(example.device, example.dtype if tensor.is_floating_point() else tensor.dtype)


def drawn_rows(node: Node, c: Contraction, rows: int, sizes: Sequence[int], number: int) -> Tensor:
    """Draw enough positions of an output for the least squares, equally many of each sample.

    Args:
        node: the call.
        c: its contraction.
        rows: number of positions of the output on this batch.
        sizes: sizes of all batches.
        number: index of this batch.
    """
    wanted = max(_FEWEST, _ROWS * math.prod(c.weight.shape) // c.weight.shape[c.output_place])
    positions = rows // sizes[number]
    each = min(positions, -(-wanted // sum(sizes)))
    generator = torch.Generator().manual_seed(node.index * 1_000_003 + number)
    chosen = torch.rand(sizes[number], positions, generator=generator).argsort(1)[:, :each]
    return (chosen + torch.arange(sizes[number])[:, None] * positions).reshape(-1)

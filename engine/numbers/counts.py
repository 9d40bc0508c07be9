"""Check that the new value of a number in a module follows from the narrowed tensors, at compaction and at loading.

Such a number counts channels or blocks of them (heads, groups), or is a part or a multiple of these. Its new value is
the count of what is kept; if no tensor around it is narrowed, it does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Dimension", "blocks", "explained", "follows", "related", "sizes_of"]


class Dimension(NamedTuple):
    """A dimension of a tensor, the number of entries that are kept, and which ones (None if that differs by row)."""

    size: int
    kept: int
    mask: Tensor | None


def blocks(mask: Tensor, count: int, outer: int = 1) -> int | None:
    """Return the number of blocks of a dimension that are kept; None if these lose different numbers of entries.

    Args:
        mask: which entries are kept.
        count: number of blocks in each outer block.
        outer: number of outer blocks; those that are removed as a whole do not count.

    Example:
        >>> import torch
        >>> blocks(torch.tensor([1, 0, 0, 0, 0, 1]), 3)
        2
    """
    sizes_by_block = mask.bool().view(outer, count, -1).sum(2)
    left = sizes_by_block[sizes_by_block.any(1)]
    sizes, counts = left[left > 0].unique(), (left > 0).sum(1).unique()
    return int(counts[0]) if len(sizes) == 1 == len(counts) else None


def related(number: int, dimensions: Iterable[Dimension]) -> bool:
    """Whether a number divides one of some dimensions, or is a multiple of one."""
    return any(d.size % number == 0 or number % d.size == 0 for d in dimensions if d.size > 1)


def explained(old: int, new: int, dimensions: Iterable[Dimension], listed: bool = False) -> bool:
    """Whether the narrowing of some dimension explains the new value of a number.

    Args:
        old: the value before.
        new: the value afterwards.
        dimensions: all dimensions that the number may count.
        listed: whether the number is an item of a list, such as the sizes that a dimension is split into.

    Example:
        >>> import torch
        >>> heads = torch.tensor([1, 1, 0, 0, 1, 1, 0, 0])
        >>> explained(4, 2, [Dimension(8, 4, heads)]), explained(4, 2, [Dimension(8, 8, torch.ones(8))])
        (True, False)
    """
    return old == new or any(new in _counts(old, d, listed) for d in dimensions if d.kept < d.size)


def follows(
    path: str,
    name: str,
    olds: Mapping[str, int],
    news: Mapping[str, int],
    dimensions_under: Callable[[str], list[Dimension]],
) -> bool:
    """Whether the new value of a module's number follows from tensors in the nearest module that has a related size.

    If the number of groups changes as well, the number counts the channels of one group.

    Args:
        path: name of the module.
        name: name of the number; ``name[position]`` in a list.
        olds: all numbers of the module.
        news: the new values of those that change.
        dimensions_under: returns the dimensions of all tensors whose names have a prefix.
    """
    old, new = olds[name], news[name]
    groups = olds.get("groups", 1), news.get("groups", olds.get("groups", 1))
    if name != "groups" and 0 < groups[1] < groups[0] and old % groups[0] == 0 == new % groups[1]:
        per_group = {name: old // groups[0]}, {name: new // groups[1]}
        if follows(path, name, *per_group, dimensions_under):
            return True
    while True:
        dimensions = dimensions_under(f"{path}." if path else "")
        if not path or related(old, dimensions):
            return explained(old, new, dimensions, name.endswith("]"))
        path = path.rpartition(".")[0]


def _counts(number: int, d: Dimension, listed: bool) -> set[int | None]:
    """Return the possible new values of a number: as a multiple, as blocks, or as a part of a dimension."""
    if number % d.size == 0:
        return {number // d.size * d.kept}
    if d.mask is None:
        return {number * d.kept // d.size} if d.size % number == 0 == number * d.kept % d.size else set()
    if number > d.size:
        return set()
    rest, rows = divmod(d.size, number)[::-1]
    counts = set() if rest else {blocks(d.mask, number, outer) for outer in range(1, rows + 1) if rows % outer == 0}
    counts -= {None}
    return counts | _parts(d.mask, number, 1 if rest or listed else number) if listed or not counts else counts


def _parts(mask: Tensor, size: int, step: int) -> set[int | None]:
    """Return how many entries are kept in each part of a given size into which a dimension may be split."""
    ends = F.pad(mask.long().cumsum(0), (1, 0))
    return set((ends[size:] - ends[:-size])[::step].tolist())


def sizes_of(module: nn.Module, shapes: Mapping[str, tuple[int, ...]], groups: int = 1) -> dict[str, int]:
    """Return the sizes in the attributes of a torch layer that its tensors determine.

    Args:
        module: the layer; for other modules the result is empty.
        shapes: shapes of its parameters and buffers, by name in the layer.
        groups: number of groups of a convolution.

    Example:
        >>> sizes_of(nn.Linear(3, 2), {"weight": (1, 3)})
        {'out_features': 1, 'in_features': 3}
    """
    try:
        if isinstance(module, nn.Linear):
            return dict(zip(("out_features", "in_features"), shapes["weight"], strict=True))
        if isinstance(module, _Convolution):
            sides = (shapes["weight"][0], shapes["weight"][1] * groups)
            inputs, outputs = sides if module.transposed else sides[::-1]
            return {"in_channels": inputs, "out_channels": outputs}
        if isinstance(module, (_Norm, nn.GroupNorm)):
            channels = shapes["weight" if "weight" in shapes else "running_mean"][0]
            return {"num_features" if isinstance(module, _Norm) else "num_channels": channels}
        return _recurrent(module, shapes)
    except (KeyError, IndexError, ValueError):  # a parametrised weight, or a subclass with tensors of its own
        return {}


def _recurrent(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    gates = next((gates for kind, gates in _GATES.items() if isinstance(module, kind)), 0)
    if not gates:
        return {}
    suffix = "_l0" if isinstance(module, nn.RNNBase) else ""
    rows, inputs = shapes[f"weight_ih{suffix}"]
    projected = {"proj_size": shapes["weight_hr_l0"][0]} if "weight_hr_l0" in shapes else {}
    return {"input_size": inputs, "hidden_size": rows // gates, **projected}


_Convolution, _Norm = nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase
_GATES = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3, nn.RNN: 1, nn.RNNCell: 1}

"""Whether the numbers that a plan sets on layers of torch agree with what it removes from their weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from engine.compaction.slices import Slice
from engine.errors import PlanError
from engine.source.integers import of_torch

__all__ = ["check_counts", "changed_sizes"]

Sizes = Collection[tuple[int, int]]

# One dimension of a weight has this size; of grouped convolutions, one may have a fraction of it.
_OF_ONE = ("in_features", "input_size", "num_features", "out_features")
# Not all of the rows that count them need lose equally many: those of queries and keys, and those of values.
_OF_PARTS = ("head_dim", "hidden_size", "num_heads", "proj_size")


def changed_sizes(module: nn.Module, cuts: Mapping[int, Slice]) -> set[tuple[int, int]] | None:
    """Return the sizes before and after of what a plan removes from a module's tensors; None for one that has none.

    Args:
        module: as it is now.
        cuts: by ``id`` of a tensor, what stays of it.
    """
    stored = [*module.parameters(), *module.buffers()]
    found = [cuts[id(tensor)] for tensor in stored if id(tensor) in cuts]
    sizes = {pair for cut in found for pair in zip(cut.before, cut.shape, strict=True) if pair[0] != pair[1]}
    return sizes if any(tensor.ndim for tensor in stored) else None


def check_counts(path: str, module: nn.Module, values: Mapping[str, int], sizes: Sizes) -> None:
    """Refuse a number of a layer of torch's that its weights do not become.

    Args:
        path: of the module in the model.
        module: as it is now, with tensors.
        values: the numbers that a plan sets.
        sizes: as `changed_sizes` gives them.

    Raises:
        PlanError: naming the number.

    Example:
        >>> check_counts("fc", nn.Linear(4, 8), {"out_features": 6}, {(8, 6)})
    """
    for name, new in values.items():
        old = vars(module).get(name)
        if not of_torch(module, name) or not isinstance(old, int) or old == new:
            continue
        agrees = (old, new) in sizes
        if name not in _OF_ONE or not type(module).__module__.startswith("torch."):
            agrees = any(before * new == after * old for before, after in sizes)
        by_parts = name in _OF_PARTS and any((before - after) % (old - new) == 0 for before, after in sizes)
        if not agrees and not by_parts:
            raise PlanError(
                f"The plan sets `{name}` of {path!r} ({type(module).__name__}) from {old} to {new}, and removes "
                "nothing of its weights that would make it so. Take another copy of the file, or compact again."
            )

"""Slices: the part of a tensor to keep, as index sets along its dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.errors import PlanError

__all__ = ["Cut", "Packed", "Slice", "Unpacked", "slice_from_mask", "slice_from_rows"]


@dataclass(frozen=True, eq=False)
class Cut:
    """Indices to keep along one dimension, or along the first two jointly.

    Attributes:
        dims: ``(d,)``, or ``(0, 1)`` if each row keeps different columns.
        index: int64, indices to keep along the flattened dimensions.
        sizes: sizes of these dimensions afterwards.
    """

    dims: tuple[int, ...]
    index: Tensor
    sizes: tuple[int, ...]

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the kept part of a tensor."""
        index = self.index.to(tensor.device)
        if len(self.dims) == 1:
            return tensor.index_select(self.dims[0], index)
        return tensor.flatten(0, 1).index_select(0, index).unflatten(0, self.sizes)

    def rest(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor that is not kept."""
        whole = tensor if len(self.dims) == 1 else tensor.flatten(0, 1)
        dim = self.dims[0] if len(self.dims) == 1 else 0
        removed = torch.ones(whole.size(dim), dtype=torch.bool, device=tensor.device)
        removed[self.index.to(tensor.device)] = False
        return whole.index_select(dim, removed.nonzero()[:, 0])

    def expand(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor in its shape before the cut, with zeros for removed entries."""
        full, index = tensor.new_zeros(shape), self.index.to(tensor.device)
        if len(self.dims) == 1:
            return full.index_copy(self.dims[0], index, tensor)
        return full.flatten(0, 1).index_copy(0, index, tensor.flatten(0, 1)).view(shape)


@dataclass(frozen=True, eq=False)
class Slice:
    """The part of a tensor to keep.

    Attributes:
        before: shape of the tensor.
        cuts: cuts, applied in order.

    Raises:
        PlanError: by its methods, for tensors of other shapes.

    Example:
        >>> cut = Slice.along(0, torch.tensor([0, 2]), (3, 2))
        >>> cut.shape, cut.apply(torch.arange(6).view(3, 2)).tolist()
        ((2, 2), [[0, 1], [4, 5]])
    """

    before: tuple[int, ...]
    cuts: tuple[Cut, ...]

    @classmethod
    def along(cls, dim: int, index: Tensor, before: tuple[int, ...]) -> Slice:
        """Return a slice that keeps some indices along one dimension.

        Args:
            dim: the dimension.
            index: int64, ascending.
            before: shape of the tensor.
        """
        return cls(before, (Cut((dim,), index, (len(index),)),))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the kept part."""
        sizes = list(self.before)
        for cut in self.cuts:
            for dim, size in zip(cut.dims, cut.sizes, strict=True):
                sizes[dim] = size
        return tuple(sizes)

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the kept part of a tensor, on its device and in its memory format.

        Args:
            tensor: tensor of the shape ``before``.
        """
        layout = _layout(tensor)
        for cut in self.cuts:
            tensor = cut.apply(tensor)
        return tensor.contiguous(memory_format=layout)

    def parts(self, tensor: Tensor, mask: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Return the kept part of a tensor times a mask, and the removed ones: what each cut takes off.

        Args:
            tensor: tensor of the shape ``before``.
            mask: compact array of its rank; removed parts where it is zero are left out.

        Example:
            >>> cut = Slice((2, 3), (Cut((0,), torch.tensor([1]), (1,)), Cut((1,), torch.tensor([0, 2]), (2,))))
            >>> tensor = torch.arange(6).view(2, 3)
            >>> cut.parts(tensor)
            (tensor([[3, 5]]), [tensor([[0, 1, 2]]), tensor([[4]])])
            >>> cut.parts(tensor, torch.tensor([[0], [1]]))
            (tensor([[3, 5]]), [tensor([[4]])])
        """
        removed, sizes = [], list(self.before)
        for cut in self.cuts:
            rest = None
            if mask is not None and any(mask.size(d) > 1 for d in cut.dims):
                mask = mask.expand([sizes[d] if d in cut.dims else n for d, n in enumerate(mask.shape)])
                mask, rest = cut.apply(mask), cut.rest(mask)
            elif mask is not None:
                rest = mask if len(cut.dims) == 1 else mask.flatten(0, 1)
            if rest is None or bool(rest.any()):
                part = cut.rest(tensor)
                removed.append(part if rest is None else part * rest.to(part))
            tensor = cut.apply(tensor)
            for dim, size in zip(cut.dims, cut.sizes, strict=True):
                sizes[dim] = size
        return tensor if mask is None else tensor * mask.to(tensor), removed

    def then(self, later: Slice) -> Slice:
        """Return the slice that is equivalent to this one followed by a later one.

        Args:
            later: slice of the part that this one keeps.

        Raises:
            PlanError: if the later slice has another initial shape.

        Example:
            >>> first = Slice.along(0, torch.tensor([0, 2, 3]), (4,))
            >>> first.then(Slice.along(0, torch.tensor([1, 2]), (3,))).apply(torch.arange(4))
            tensor([2, 3])
        """
        if later.before != self.shape:
            raise PlanError(f"A slice that starts from {later.before} cannot follow one that ends with {self.shape}.")
        return Slice(self.before, self.cuts + later.cuts)

    def apply_compact(self, mask: Tensor) -> Tensor:
        """Return the kept part of a compact array, of size 1 along dimensions that it does not depend on.

        Args:
            mask: array of the rank of the tensor.
        """
        sizes = list(self.before)
        for cut in self.cuts:
            if any(mask.size(d) > 1 for d in cut.dims):
                mask = cut.apply(mask.expand([sizes[d] if d in cut.dims else n for d, n in enumerate(mask.shape)]))
            for dim, size in zip(cut.dims, cut.sizes, strict=True):
                sizes[dim] = size
        return mask

    def expand(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the shape ``before``, with kept entries in their places and zeros elsewhere.

        Args:
            tensor: tensor of the kept part's shape.

        Raises:
            PlanError: if the tensor has another shape.
        """
        if tuple(tensor.shape) != self.shape:
            raise PlanError(f"A tensor of shape {tuple(tensor.shape)} is not what was left of {self.before}.")
        layout, shapes = _layout(tensor), [self.before]
        for cut in self.cuts:
            sizes = dict(zip(cut.dims, cut.sizes, strict=True))
            shapes.append(tuple(sizes.get(d, n) for d, n in enumerate(shapes[-1])))
        for cut, shape in reversed(list(zip(self.cuts, shapes, strict=False))):
            tensor = cut.expand(tensor, shape)
        return tensor.contiguous(memory_format=layout)

    def state_dict(self, packed: Packed | None = None) -> dict[str, Any]:
        """Return the slice as primitives and tensors; indices are stored in the smallest form.

        Args:
            packed: index sets shared with other slices in the same file.
        """
        packed = Packed() if packed is None else packed
        cuts, sizes = [], list(self.before)
        for cut in self.cuts:
            size = math.prod(sizes[d] for d in cut.dims)
            cuts.append({"dims": list(cut.dims), **packed.of(cut.index, size), "sizes": list(cut.sizes)})
            for dim, left in zip(cut.dims, cut.sizes, strict=True):
                sizes[dim] = left
        return {"before": list(self.before), "cuts": cuts}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], unpacked: Unpacked | None = None) -> Slice:
        """Load and validate a state written by `state_dict`.

        Args:
            state: primitives and tensors.
            unpacked: index sets shared with other slices from the same file.

        Raises:
            PlanError: if an index is out of range or sizes do not match.
        """
        unpacked = Unpacked() if unpacked is None else unpacked
        sizes = [int(n) for n in state["before"]]
        before, cuts = tuple(sizes), []
        for c in state["cuts"]:
            index, low, high = unpacked.of(c)
            cut = Cut(tuple(int(d) for d in c["dims"]), index, tuple(int(n) for n in c["sizes"]))
            _check(tuple(sizes), cut, low, high)
            for dim, size in zip(cut.dims, cut.sizes, strict=True):
                sizes[dim] = size
            cuts.append(cut)
        return cls(before, tuple(cuts))


_FEW = 256  # size below which bits save little


class Packed:
    """Index sets in stored form; equal sets share one tensor, which a file then contains once.

    Example:
        >>> packed = Packed()
        >>> one, other = (packed.of(torch.tensor([0, 2]), 3)["index"] for _ in range(2))
        >>> one, one is other
        (tensor([0, 2], dtype=torch.int32), True)
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int], tuple[Tensor, dict[str, Tensor]]] = {}
        self._equal: dict[tuple[torch.dtype, bytes], Tensor] = {}

    def of(self, index: Tensor, size: int) -> dict[str, Tensor]:
        """Return ``{"index" or "bits": tensor}`` for a subset of ``size`` indices."""
        key = (id(index), size)
        if key not in self._entries:
            entry = {name: self._once(tensor.cpu()) for name, tensor in _packed(index, size).items()}
            self._entries[key] = index, entry  # the index is kept for its identity
        return self._entries[key][1]

    def _once(self, tensor: Tensor) -> Tensor:
        return self._equal.setdefault((tensor.dtype, tensor.numpy().tobytes()), tensor)


def _packed(index: Tensor, size: int) -> dict[str, Tensor]:
    """Return indices as a list, or as one bit for each of ``size`` if that is much smaller."""
    if size < _FEW or 32 * len(index) < size or not bool((index.diff() > 0).all()):
        return {"index": index.to(torch.int32 if size < 2**31 else torch.int64)}
    kept = torch.zeros(size, dtype=torch.bool)
    kept[index] = True
    return {"bits": torch.from_numpy(np.packbits(kept.numpy()))}


class Unpacked:
    """Index sets in working form, each unpacked once, however often a file refers to it.

    Example:
        >>> unpacked, stored = Unpacked(), {"index": torch.tensor([0, 2], dtype=torch.int32)}
        >>> unpacked.of(stored)
        (tensor([0, 2]), 0, 2)
        >>> unpacked.of(stored)[0] is unpacked.of(stored)[0]
        True
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Tensor, tuple[Tensor, int, int]]] = {}

    def of(self, cut: Mapping[str, Any]) -> tuple[Tensor, int, int]:
        """Return the int64 indices of a stored cut, with their minimum and maximum."""
        stored = cut["bits"] if "bits" in cut else cut["index"]
        if id(stored) not in self._entries:
            index = _bits(stored) if "bits" in cut else _index(stored)
            ends = index.aminmax() if len(index) else (-1, -1)
            self._entries[id(stored)] = stored, (index, int(ends[0]), int(ends[1]))  # kept for its identity
        return self._entries[id(stored)][1]


def _bits(bits: Tensor) -> Tensor:
    if bits.dtype != torch.uint8 or bits.ndim != 1 or bits.numel() > bits.untyped_storage().nbytes():
        raise PlanError("The bits of a cut of the plan are damaged.")
    return torch.from_numpy(np.unpackbits(bits.contiguous().cpu().numpy())).nonzero()[:, 0]


def _index(index: Tensor) -> Tensor:
    if index.numel() * index.element_size() > index.untyped_storage().nbytes():
        raise PlanError(f"A cut of the plan claims {index.numel()} indices, but holds fewer.")
    if index.ndim != 1 or index.dtype not in (torch.int32, torch.int64):
        raise PlanError(f"The indices of a cut of the plan are a tensor of {index.dtype}, {index.ndim} dimensions.")
    return index.long()


def _layout(tensor: Tensor) -> torch.memory_format:
    """Return the memory format of a tensor; row-major if ambiguous."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(tensor.ndim)
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def _check(before: tuple[int, ...], cut: Cut, low: int, high: int) -> None:
    """Reject a cut that does not fit the shape it applies to; ``low`` and ``high`` are the ends of its indices."""
    has_valid_dims = cut.dims == (0, 1) and len(before) > 1 or len(cut.dims) == 1 and 0 <= cut.dims[0] < len(before)
    limit = math.prod(before[d] for d in cut.dims) if has_valid_dims else 0
    inside = len(cut.index) > 0 and 0 <= low <= high < limit and len(cut.index) <= limit
    sized = len(cut.sizes) == len(cut.dims) and all(size > 0 for size in cut.sizes)
    if not has_valid_dims or not inside or not sized or math.prod(cut.sizes) != len(cut.index):
        raise PlanError(
            f"A cut of the plan does not fit a tensor of shape {before}: dims {cut.dims}, sizes {cut.sizes}."
        )


def slice_from_rows(before: tuple[int, ...], rows: Mapping[int, Tensor]) -> Slice | None:
    """Return the slice that keeps some indices along some dimensions; None if there are none.

    Args:
        before: shape of the tensor.
        rows: dimension -> indices to keep, int64, ascending.
    """
    cuts = [Cut((dim,), index, (len(index),)) for dim, index in rows.items()]
    return Slice(before, tuple(cuts)) if cuts else None


def slice_from_mask(before: tuple[int, ...], mask: Tensor, what: str) -> Slice:
    """Return the slice that keeps the entries of a compact bool mask.

    Args:
        before: shape of the tensor.
        mask: compact; a product of index sets, or rows that keep equally many columns each.
        what: name of the tensor, for the error.

    Raises:
        PlanError: if the kept entries do not form a rectangle.
    """
    sets = {d: mask.movedim(d, 0).reshape(mask.size(d), -1).any(1) for d in range(mask.ndim) if mask.size(d) > 1}
    product = torch.ones([1] * mask.ndim, dtype=torch.bool)
    for dim, is_kept in sets.items():
        product = product & is_kept.view([-1 if d == dim else 1 for d in range(mask.ndim)])
    if torch.equal(product.expand(mask.shape), mask):
        cuts = [Cut((d,), s.nonzero()[:, 0], (int(s.sum()),)) for d, s in sets.items() if not s.all()]
        return Slice(before, tuple(cuts))
    rows = mask.reshape(mask.size(0), -1) if set(sets) == {0, 1} else mask[:0].reshape(0, 1)
    counts = rows.sum(1)[rows.any(1)]
    if not len(counts) or int(counts.min()) != int(counts.max()):
        raise PlanError(f"The kept entries of {what} form no rectangle. This is a bug in a rule; please report it.")
    return Slice(before, (Cut((0, 1), rows.reshape(-1).nonzero()[:, 0], (len(counts), int(counts[0]))),))

"""The dimensions of example inputs that have other sizes in other inputs: batch, height, width, tokens, time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.errors import InputError
from engine.program.trees import map_tensors, tensors_in

__all__ = ["Axis", "axes_of", "larger", "odd", "resized", "smaller"]


@dataclass(frozen=True)
class Axis:
    """A size that inputs share: dimensions that are larger or smaller together.

    Attributes:
        places: (position of a tensor among the inputs, dimension).
        size: the example's.
        batch: whether samples are counted along it.
        picture: whether it is a side of pictures, which are larger along all sides as a rule.
    """

    places: frozenset[tuple[int, int]]
    size: int
    batch: bool = False
    picture: bool = False

    def __str__(self) -> str:
        position, dim = min(self.places)
        return f"dimension {dim} of input {position}"


def larger(size: int) -> int:
    """Return a larger size, one that is not an odd multiple: many models want multiples of 32, or of a small number."""
    return size + 32 if size >= 64 else 2 * size


def odd(size: int, place: int = 0) -> int:
    """Return a size that is a bit larger and, from an even one, no multiple of anything."""
    return size + 1 + 2 * place


def smaller(size: int) -> int:
    """Return a smaller size that is not half of the other; 1 stays."""
    return max(size * 5 // 8, 1)


def axes_of(args: Any, kwargs: Any, dynamic_dims: Any = None) -> list[Axis]:
    """Return the dimensions that may have other sizes.

    Args:
        args, kwargs: the example inputs.
        dynamic_dims: says which: for each argument, by position or by name, a set of dimensions, a dictionary from
            dimensions to names (those of one name are of one size), or None for none. By default all but the
            channels of pictures; whether a model accepts other sizes there is found out by running it.

    Raises:
        InputError: for a dimension that an input does not have, or for what is not a set of dimensions.

    Example:
        >>> [(sorted(axis.places), axis.size) for axis in axes_of((torch.zeros(2, 3, 8, 6),), {})]
        [([(0, 0)], 2), ([(0, 2)], 8), ([(0, 3)], 6)]
        >>> [(sorted(axis.places), axis.size) for axis in axes_of((torch.zeros(2, 3, 8, 6),), {}, ({3},))]
        [([(0, 3)], 6)]
    """
    tensors = list(tensors_in((args, kwargs)))
    first = next((t.size(0) for t in tensors if t.ndim), 0)
    places: dict[Any, list[tuple[int, int]]] = {}
    varying_dims = _all_dims(tensors) if dynamic_dims is None else _named(args, kwargs, dynamic_dims)
    for position, dim, name in varying_dims:
        tensor = tensors[position]
        places.setdefault(_key(tensor, dim, name, first), []).append((position, dim))
    return [_axis(tensors, key, at) for key, at in places.items()]


def _axis(tensors: Sequence[Tensor], key: Any, places: Sequence[tuple[int, int]]) -> Axis:
    position, dim = places[0]
    picture = tensors[position].ndim > 3 and dim > 1
    return Axis(frozenset(places), tensors[position].size(dim), key == "batch", picture)


def _key(tensor: Tensor, dim: int, name: Any, batch: int) -> Any:
    """What dimensions have in common that are one size: a name, else their place and their size."""
    if name is not None:
        return "named", name
    if dim == 0 and tensor.size(0) == batch:
        return "batch"
    return (tensor.ndim > 3, tensor.ndim - dim if tensor.ndim > 3 else dim, tensor.size(dim))


def _all_dims(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int, None]]:
    for position, tensor in enumerate(tensors):
        for dim in range(tensor.ndim):
            if dim != 1 or tensor.ndim < 4:
                yield position, dim, None


def _named(args: Any, kwargs: Any, dynamic_dims: Any) -> Iterator[tuple[int, int, Any]]:
    """Yield (position of the tensor, dimension, name or None) as the user says it."""
    numbers = {id(t): position for position, t in enumerate(tensors_in((args, kwargs)))}
    by_name = isinstance(dynamic_dims, Mapping)
    pairs = [(kwargs.get(k), v) for k, v in dynamic_dims.items()] if by_name else list(_pairs(args, dynamic_dims))
    for tree, said in pairs:
        for tensor, dims in _leaves(tree, said):
            for dim in dims:
                if not isinstance(dim, int) or not -tensor.ndim <= dim < tensor.ndim:
                    raise InputError(
                        f"`dynamic_dims` names dimension {dim!r} of an input of shape {tuple(tensor.shape)}."
                    )
                name = dims[dim] if isinstance(dims, Mapping) else None
                yield numbers[id(tensor)], dim % tensor.ndim, name if isinstance(name, str) else None


def _pairs(trees: Sequence[Any], said: Any) -> Iterable[tuple[Any, Any]]:
    if not isinstance(said, (list, tuple)) or len(said) > len(trees):
        raise InputError(
            f"`dynamic_dims` has an entry for each of the {len(trees)} arguments, a set of dimensions or None; got "
            f"{said!r}."
        )
    return zip(trees, said, strict=False)


def _leaves(tree: Any, said: Any) -> Iterator[tuple[Tensor, Any]]:
    if said is None:
        return
    if isinstance(tree, Tensor) and isinstance(said, (set, frozenset, list, tuple, Mapping)):
        yield tree, said
    elif isinstance(tree, (list, tuple)):
        for part, dims in _pairs(tree, said):
            yield from _leaves(part, dims)
    elif isinstance(tree, Mapping) and isinstance(said, Mapping) and said.keys() <= tree.keys():
        for key, dims in said.items():
            yield from _leaves(tree[key], dims)
    else:
        raise InputError(f"`dynamic_dims` says {said!r} of an argument that is a {type(tree).__name__}.")


def resized(args: Any, kwargs: Any, sizes: Mapping[Axis, int]) -> tuple[Any, Any]:
    """Return inputs of other sizes: the example's entries, repeated or cut off.

    Example:
        >>> x = torch.arange(3)[None]
        >>> [axis] = [axis for axis in axes_of((x,), {}) if not axis.batch]
        >>> resized((x,), {}, {axis: 5})[0][0].tolist()
        [[0, 1, 2, 0, 1]]
    """
    tensors = list(tensors_in((args, kwargs)))
    others: dict[int, Tensor] = {}
    for axis, size in sizes.items():
        for position, dim in axis.places:
            tensor = others.get(id(tensors[position]), tensors[position])
            index = torch.arange(size, device=tensor.device) % max(axis.size, 1)
            others[id(tensors[position])] = tensor.index_select(dim, index)
    return tuple(map_tensors(tree, lambda t: others.get(id(t), t)) for tree in (args, kwargs))  # type: ignore[return-value]

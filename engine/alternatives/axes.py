"""The dimensions of example inputs whose sizes differ in other inputs: batch, height, width, tokens, time."""

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
    """A set of dimensions of inputs that always have the same size.

    Attributes:
        places: positions of tensors among the inputs, each with a dimension.
        size: size in the example.
        batch: whether it is the number of samples.
        is_image_side: whether it is the height or width of images, which usually grow together.
    """

    places: frozenset[tuple[int, int]]
    size: int
    batch: bool = False
    is_image_side: bool = False

    def __str__(self) -> str:
        position, dim = min(self.places)
        return f"dimension {dim} of input {position}"


def larger(size: int) -> int:
    """Return a larger size that many models accept: they require multiples of 32, or of a small number."""
    return size + 32 if size >= 64 else 2 * size


def odd(size: int, place: int = 0) -> int:
    """Return a size that is slightly larger, and odd for an even size."""
    return size + 1 + 2 * place


def smaller(size: int) -> int:
    """Return a smaller size that is not one half; at least 1."""
    return max(size * 5 // 8, 1)


def axes_of(args: Any, kwargs: Any, dynamic_dims: Any = None) -> list[Axis]:
    """Return the dimensions that may have other sizes.

    Args:
        args, kwargs: the example inputs.
        dynamic_dims: for each argument, by position or by name, a set of dimensions, a dictionary from dimensions to
            names (dimensions with the same name have the same size), or None for none. By default all dimensions but
            the channels of images; a run determines whether the model accepts other sizes.

    Raises:
        InputError: for a dimension that an input lacks, or a declaration that is not a set of dimensions.

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
    is_image_side = tensors[position].ndim > 3 and dim > 1
    return Axis(frozenset(places), tensors[position].size(dim), key == "batch", is_image_side)


def _key(tensor: Tensor, dim: int, name: Any, batch: int) -> Any:
    """Return a key that is equal for dimensions of the same size: a name, else position and size."""
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
    """Yield position of the tensor, dimension, and name or None, as the user declares."""
    numbers = {id(t): position for position, t in enumerate(tensors_in((args, kwargs)))}
    by_name = isinstance(dynamic_dims, Mapping)
    pairs = [(kwargs.get(k), v) for k, v in dynamic_dims.items()] if by_name else list(_pairs(args, dynamic_dims))
    for tree, declared in pairs:
        for tensor, dims in _leaves(tree, declared):
            for dim in dims:
                if not isinstance(dim, int) or not -tensor.ndim <= dim < tensor.ndim:
                    raise InputError(
                        f"`dynamic_dims` names dimension {dim!r} of an input of shape {tuple(tensor.shape)}."
                    )
                name = dims[dim] if isinstance(dims, Mapping) else None
                yield numbers[id(tensor)], dim % tensor.ndim, name if isinstance(name, str) else None


def _pairs(trees: Sequence[Any], declared: Any) -> Iterable[tuple[Any, Any]]:
    if not isinstance(declared, (list, tuple)) or len(declared) > len(trees):
        raise InputError(
            f"`dynamic_dims` has an entry for each of the {len(trees)} arguments, a set of dimensions or None; got "
            f"{declared!r}."
        )
    return zip(trees, declared, strict=False)


def _leaves(tree: Any, declared: Any) -> Iterator[tuple[Tensor, Any]]:
    if declared is None:
        return
    if isinstance(tree, Tensor) and isinstance(declared, (set, frozenset, list, tuple, Mapping)):
        yield tree, declared
    elif isinstance(tree, (list, tuple)):
        for part, dims in _pairs(tree, declared):
            yield from _leaves(part, dims)
    elif isinstance(tree, Mapping) and isinstance(declared, Mapping) and declared.keys() <= tree.keys():
        for key, dims in declared.items():
            yield from _leaves(tree[key], dims)
    else:
        raise InputError(f"`dynamic_dims` has {declared!r} for an argument that is a {type(tree).__name__}.")


def resized(args: Any, kwargs: Any, sizes: Mapping[Axis, int]) -> tuple[Any, Any]:
    """Return inputs of other sizes, with their entries repeated or cut off.

    They may be of other sizes than the example whose axes these are, and have fewer tensors: a list of other length.

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
            if position >= len(tensors) or dim >= tensors[position].ndim:
                continue
            tensor = others.get(id(tensors[position]), tensors[position])
            index = torch.arange(size, device=tensor.device) % max(tensor.shape[dim], 1)
            others[id(tensors[position])] = tensor.index_select(dim, index)
    return tuple(map_tensors(tree, lambda t: others.get(id(t), t)) for tree in (args, kwargs))  # type: ignore[return-value]

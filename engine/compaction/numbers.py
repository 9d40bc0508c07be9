"""Validation of the integer attributes in a plan against its slices.

A plan may come from a manipulated file, whose digests anyone can compute: it could give a module fewer heads or groups
over the same weights. Therefore each number has to match what the plan keeps. Layers of torch have to agree with their
weights afterwards as they did before; a number in a user's module has to count something that is narrowed in the
module, or in the nearest enclosing module whose tensors it can count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from engine.compaction.slices import Slice
from engine.errors import PlanError
from engine.numbers.counts import Dimension, blocks, follows, sizes_of
from engine.numbers.integers import integers
from engine.program.stored import distinct_modules, stored_tensors
from engine.surgery.exchange import Exchange
from engine.surgery.kinds.norms import NarrowedNorm
from engine.surgery.kinds.spread import Spread

__all__ = ["check_numbers"]

Numbers = Mapping[str, Mapping[str, int]]


def check_numbers(
    model: nn.Module, slices: Mapping[str, Slice], attributes: Numbers, exchanges: tuple[Exchange, ...]
) -> None:
    """Reject numbers that no compaction would set together with these slices.

    Args:
        model: the model before the plan is applied.
        slices: the part of each tensor to keep.
        attributes: module name -> integers to set.
        exchanges: changes of modules.

    Raises:
        PlanError: naming the module and the number.
    """
    check = _Check(model, slices)
    for path in sorted({*attributes, *(name.rpartition(".")[0] for name in slices)}):
        check.layer(path, attributes.get(path, {}))
    for exchange in exchanges:
        if isinstance(exchange, NarrowedNorm):
            check.norm(exchange)
        elif isinstance(exchange, Spread):
            check.spread(exchange, attributes.get(exchange.module, {}))


class _Check:
    """A model before compaction, and the slices of its tensors."""

    def __init__(self, model: nn.Module, slices: Mapping[str, Slice]) -> None:
        self._modules = distinct_modules(model)
        self._stored = {name: tensor for name, tensor in stored_tensors(model).items() if not is_lazy(tensor)}
        cuts = {id(self._stored[name]): cut for name, cut in slices.items() if name in self._stored}
        self._cuts = {name: cuts[id(tensor)] for name, tensor in self._stored.items() if id(tensor) in cuts}
        self._dimensions: dict[int, list[Dimension]] = {}

    def layer(self, path: str, news: Mapping[str, int]) -> None:
        """Check the numbers that are set in a module, and those that have to be set with them in a layer of torch."""
        module = self._modules.get(path)
        if module is None:  # rejected elsewhere, or checked under another name
            return
        olds = integers(module)
        groups = olds.get("groups", 1)
        before = self._sizes(path, module, self._whole, groups)
        after = self._sizes(path, module, self._kept, news.get("groups", groups))
        tied = {key: size for key, size in after.items() if before.get(key) == olds.get(key)}
        if news.keys() & {"groups", *tied} or not isinstance(module, _Convolution):
            self._blocks(path, module, {**olds, **news})
        for key, new in news.items():
            if key in olds and key not in tied and not follows(path, key, olds, news, self._inside):
                raise _wrong(path, module, key, olds[key], new, "which does not match what it keeps")
        # A layer whose numbers stay may be used for its weights only, unless it is recurrent.
        checked = news.keys() & tied.keys() or isinstance(module, (nn.RNNBase, nn.RNNCellBase))
        for key, size in tied.items() if checked else ():
            if news.get(key, olds[key]) != size:
                raise _wrong(path, module, key, olds[key], news.get(key, olds[key]), f"but its weights have {size}")

    def _sizes(
        self, path: str, module: nn.Module, shape: Callable[[str], tuple[int, ...]], groups: int
    ) -> dict[str, int]:
        return sizes_of(module, {key: shape(f"{path}.{key}" if path else key) for key in _own(module)}, groups)

    def _whole(self, name: str) -> tuple[int, ...]:
        return tuple(self._stored[name].shape)

    def _kept(self, name: str) -> tuple[int, ...]:
        return self._cuts[name].shape if name in self._cuts else self._whole(name)

    def _blocks(self, path: str, module: nn.Module, numbers: Mapping[str, int]) -> None:
        """Check that the number of groups or heads is the number of those that keep something."""
        rows = (row for row in _BLOCKS if isinstance(module, row[0]))
        _, key, tensor, dim = next(rows, (None, "", "", 0))
        name, old = f"{path}.{tensor}" if path else tensor, int(getattr(module, key, 1))
        mask = _mask(self._cuts[name], dim) if old != 1 and name in self._cuts else None
        if mask is None or len(mask) % old:
            return
        left = blocks(mask, old)
        if left != numbers[key]:
            raise _wrong(path, module, key, old, numbers[key], f"but its weights keep {left or 'unequal parts'}")
        if left and key == "num_heads" and left * numbers["head_dim"] != int(mask.sum()):
            why, size = f"but its {left} heads keep {int(mask.sum())} columns", len(mask) // old
            raise _wrong(path, module, "head_dim", size, numbers["head_dim"], why)

    def _inside(self, prefix: str) -> list[Dimension]:
        inside = (names for module, names in self._by_module.items() if module.startswith(prefix))
        return [d for names in inside for name in names for d in self._of(name)]

    @functools.cached_property
    def _by_module(self) -> dict[str, list[str]]:
        """The names of tensors by the prefix of their module."""
        names: dict[str, list[str]] = {}
        for name in self._stored:
            names.setdefault(name[: name.rfind(".") + 1], []).append(name)
        return names

    def _of(self, name: str) -> list[Dimension]:
        tensor, cut = self._stored[name], self._cuts.get(name)
        if id(tensor) not in self._dimensions:
            whole = [Dimension(size, size, None) for size in tensor.shape]
            self._dimensions[id(tensor)] = whole if cut is None else _dimensions(cut)
        return self._dimensions[id(tensor)]

    def norm(self, norm: NarrowedNorm) -> None:
        """Check that a narrowed norm keeps as many channels as its weights."""
        module = self._modules.get(norm.module)
        groups = getattr(module, "num_groups", 1)
        for key in {"weight", "bias"} & {*_own(module)} if module is not None else ():
            name = f"{norm.module}.{key}" if norm.module else key
            size = self._kept(name)[0]
            if size != norm.kept or groups != norm.groups:
                difference = f"but {name!r} keeps {size}, in {groups} groups"
                raise _wrong(norm.module, module, "kept", norm.size, norm.kept, difference)

    def spread(self, spread: Spread, news: Mapping[str, int]) -> None:
        """Check that a spread output has one place for each kept channel, in order."""
        module = self._modules.get(spread.module)
        inside = spread.table[spread.table < spread.kept]
        if not torch.equal(inside, inside.unique()):
            raise PlanError(f"The table that spreads the output of {spread.module!r} is damaged: it is out of order.")
        groups = news.get("groups", getattr(module, "groups", 1))
        sizes = {} if module is None else self._sizes(spread.module, module, self._kept, groups)
        width = next((sizes[key] for key in _OUTPUTS if key in sizes), spread.kept)
        if module is not None and width != spread.kept:
            raise _wrong(spread.module, module, "kept", width, spread.kept, f"but its weights have {width}")


_Convolution = nn.modules.conv._ConvNd
# Modules with blocks: the attribute that counts them, and a tensor with its blocked dimension.
_BLOCKS: tuple[tuple[Any, str, str, int], ...] = (
    (_Convolution, "groups", "weight", 0),
    (nn.GroupNorm, "num_groups", "weight", 0),
    (nn.MultiheadAttention, "num_heads", "out_proj.weight", 1),
)
_OUTPUTS = ("out_channels", "out_features", "num_features", "num_channels")


def _own(module: nn.Module) -> list[str]:
    tensors = {**module._parameters, **module._buffers}
    return [key for key, tensor in tensors.items() if tensor is not None and not is_lazy(tensor) and tensor.ndim]


def _dimensions(cut: Slice) -> list[Dimension]:
    return [Dimension(n, k, _mask(cut, d)) for d, (n, k) in enumerate(zip(cut.before, cut.shape, strict=True))]


def _mask(cut: Slice, dim: int) -> Tensor | None:
    """Return a mask of the indices of a dimension that a slice keeps; None if it differs by row."""
    sizes, index = list(cut.before), torch.arange(cut.before[dim])
    for one in cut.cuts:
        if one.dims == (dim,):
            index = index[one.index]
        elif dim in one.dims and dim == 1:
            return None
        elif dim in one.dims:
            index = index[one.index.div(sizes[1], rounding_mode="floor").unique()]
        for d, size in zip(one.dims, one.sizes, strict=True):
            sizes[d] = size
    return torch.zeros(cut.before[dim], dtype=torch.bool).index_fill(0, index, True)


def _wrong(path: str, module: Any, key: str, old: int, new: int, why: str) -> PlanError:
    return PlanError(
        f"The plan sets `{key}` of {path!r} ({type(module).__name__}) to {new} (it is {old}), {why}: the plan is "
        "damaged. Use another copy of the file, or compact again."
    )

"""Importance criteria for output channels, and masks that prune the least important ones.

A criterion maps the weights of each channel, one row per channel, to one score per channel; low scores are pruned
first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from engine.errors import InputError
from engine.groups import Group, group_masks
from engine.masks import parameter_name
from engine.program.arrays import support
from engine.program.stored import stored_tensors

__all__ = [
    "CRITERIA",
    "Criterion",
    "Masking",
    "cut",
    "fpgm",
    "l1",
    "l2",
    "level_mask",
    "mask_groups",
    "mask_layer",
    "masked",
    "unit_rows",
    "unit_sums",
]

Criterion = Callable[[Tensor], Tensor]
"""Weights ``(channels, weights per channel)`` -> scores ``(channels,)``."""


def l1(rows: Tensor) -> Tensor:
    r"""Sum of absolute weights, :math:`s_u = \sum_k |w_{uk}|`.

    Args:
        rows: weights, shape (channels, weights per channel).

    Returns:
        Scores, shape (channels,).

    Example:
        >>> l1(torch.tensor([[1.0, -2.0], [0.0, 1.0]]))
        tensor([3., 1.])

    Li et al., "Pruning Filters for Efficient ConvNets", 2017.
    """
    return rows.abs().sum(1)


def l2(rows: Tensor) -> Tensor:
    r"""Euclidean norm of the weights, :math:`s_u = \sqrt{\sum_k w_{uk}^2}`.

    Args:
        rows: weights, shape (channels, weights per channel).

    Returns:
        Scores, shape (channels,).

    Example:
        >>> l2(torch.tensor([[3.0, -4.0], [0.0, 1.0]]))
        tensor([5., 1.])
    """
    return torch.linalg.vector_norm(rows, dim=1)


def fpgm(rows: Tensor) -> Tensor:
    r"""Distance to all other channels, :math:`s_u = \sum_v \lVert w_u - w_v \rVert_2`.

    Channels that others can replace are pruned first.

    Args:
        rows: weights, shape (channels, weights per channel).

    Returns:
        Scores, shape (channels,).

    Example:
        >>> fpgm(torch.tensor([[0.0], [1.0], [4.0]]))
        tensor([5., 4., 7.])

    He et al., "Filter Pruning via Geometric Median for Deep Convolutional Neural Networks Acceleration", 2019.
    """
    return torch.cdist(rows, rows).sum(1)


CRITERIA: Mapping[str, Criterion] = {"fpgm": fpgm, "l1": l1, "l2": l2}


def cut(scores: Tensor, sparsity: float, rows: Tensor | None = None) -> Tensor:
    """Choose channels to keep: prune the ``floor(sparsity * channels)`` lowest scores, but keep at least one.

    Args:
        scores: shape (channels,); of equal scores, the first is pruned first.
        sparsity: fraction in [0, 1].
        rows: int, shape (channels,): each row loses equally many channels. None: all channels are one row.

    Returns:
        Bool, shape (channels,), True for channels to keep.

    Example:
        >>> cut(torch.tensor([3.0, 1.0, 2.0, 1.0]), 0.5)
        tensor([ True, False,  True, False])
    """
    keep = torch.ones(len(scores), dtype=torch.bool)
    ranked = scores.detach().cpu().argsort(stable=True)
    rows = torch.zeros_like(ranked) if rows is None else rows.cpu()
    for row in rows.unique():
        of_row = ranked[rows[ranked] == row]
        keep[of_row[: min(_count(sparsity, len(of_row)), len(of_row) - 1)]] = False
    return keep


def _count(sparsity: float, size: int) -> int:
    # 0.29 * 100 is 28.999…: the small addition avoids rounding it down.
    return math.floor(sparsity * size + 1e-9)


def level_mask(weight: Tensor, sparsity: float) -> Tensor:
    """Mask the ``floor(sparsity * n)`` entries of a weight with the smallest magnitudes.

    Args:
        weight: any shape.
        sparsity: fraction in [0, 1].

    Returns:
        Bool, shape of the weight, True for entries to keep.

    Example:
        >>> level_mask(torch.tensor([[3.0, -1.0], [2.0, -4.0]]), 0.5)
        tensor([[ True, False],
                [False,  True]])
    """
    keep = torch.ones(weight.numel(), dtype=torch.bool)
    keep[weight.detach().cpu().abs().reshape(-1).argsort(stable=True)[: _count(sparsity, weight.numel())]] = False
    return keep.view(weight.shape)


def unit_rows(group: Group, parameter: Callable[[str], Tensor]) -> Tensor:
    """Return the weights that produce each unit of a group, concatenated over all its layers.

    Args:
        group: a dependency group.
        parameter: returns a parameter by its full name.

    Returns:
        Shape (units, weights per unit), on the device of the weights; padded with 0 if units have unequally many.

    Example:
        >>> import engine
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
        >>> group = engine.dependency_groups(net, torch.zeros(1, 1, 8, 8))[0]
        >>> unit_rows(group, net.get_parameter).shape
        torch.Size([4, 9])
    """
    weights = [(parameter(m.parameter), m.units) for m in group.members if m.role == "out"]
    parts = [_by_unit(weight.detach().float(), units, group.size) for weight, units in weights if weight.ndim > 1]
    if not parts:
        return torch.zeros(group.size, 0)
    return parts[0] if len(parts) == 1 else torch.cat([part.to(parts[0].device) for part in parts], 1)


def _by_unit(weight: Tensor, units: Tensor, size: int) -> Tensor:
    """Return the weights of each unit as a row, padded with zeros."""
    axes = support(units)
    if len(axes) == 1:  # units are whole slices: sort these, not single weights
        weight, units = weight.movedim(axes[0], 0).flatten(1), units.reshape(-1)
    else:
        weight, units = weight.reshape(-1, 1), units.expand(weight.shape).reshape(-1)
    index = (units >= 0).nonzero()[:, 0]
    order = index[units[index].argsort(stable=True)]
    if len(order) != len(weight) or not torch.equal(order, torch.arange(len(order))):
        weight = weight[order.to(weight.device)]
    counts = torch.bincount(units[order], minlength=size)
    if len(counts.unique()) == 1:
        return weight.reshape(size, -1)
    place = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    rows = weight.new_zeros(size, int(counts.max()), weight.shape[1])
    rows[units[order].to(rows.device), place.to(rows.device)] = weight
    return rows.flatten(1)


def unit_sums(values: Tensor, units: Tensor, size: int) -> Tensor:
    """Sum the entries of a tensor by unit.

    Args:
        values: one value per entry of a parameter.
        units: int64, broadcastable to ``values``: the unit of each entry, -1 for none.
        size: number of units.

    Returns:
        Shape (size,), on the device of the values.

    Example:
        >>> unit_sums(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([[1], [0], [-1]]), 2)
        tensor([7., 3.])
    """
    # First sum over dimensions that units do not depend on: the rest is small, with few collisions in index_add.
    free = [d for d in range(values.ndim) if units.shape[d] == 1]
    values = values.sum(free, keepdim=True) if free else values
    index = torch.where(units < 0, size, units).to(values.device).expand_as(values)
    return values.new_zeros(size + 1).index_add_(0, index.reshape(-1), values.reshape(-1))[:size]


# Masking of some layers: sparsity -> {full parameter name: bool or float mask, broadcastable}.
Masking = Callable[[float], Mapping[str, Tensor]]


def mask_groups(groups: Iterable[Group], model: nn.Module, criterion: Criterion) -> Masking:
    """Prune units of groups in every parameter that produces them, including norms.

    Args:
        groups: dependency groups of the model.
        model: provides the current weights.
        criterion: scores the units.

    Returns:
        A function of a sparsity that returns ``{full parameter name: mask}``.

    Example:
        >>> import engine
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3))
        >>> groups = engine.dependency_groups(net, torch.zeros(1, 1, 8, 8))[:1]
        >>> masks = mask_groups(groups, net, l1)(0.5)
        >>> int(masks["1.bias"].sum()), sorted(masks)
        (2, ['0.bias', '0.weight', '1.bias', '1.weight'])
    """
    chosen = list(groups)
    scores = {group.name: criterion(unit_rows(group, model.get_parameter)) for group in chosen}

    def masks(sparsity: float) -> Mapping[str, Tensor]:
        keep = {group.name: cut(scores[group.name], sparsity, group.rows) for group in chosen}
        masks_by_module = group_masks(chosen, keep)
        return {
            f"{m}.{key}" if m else key: mask for m, entries in masks_by_module.items() for key, mask in entries.items()
        }

    return masks


def mask_layer(model: nn.Module, name: str, criterion: Criterion | None) -> Masking:
    """Prune outputs of one convolution or linear layer, or single weights with ``criterion=None``.

    Args:
        model: provides the current weights.
        name: name of the layer.
        criterion: scores the outputs.

    Returns:
        A function of a sparsity that returns ``{full parameter name: mask}`` for weight and bias.

    Raises:
        InputError: if the weight is uninitialised, or computed from something other than a parameter that a mask
            applies to.

    Example:
        >>> masks = mask_layer(nn.Sequential(nn.Linear(2, 4)), "0", l1)(0.25)
        >>> masks["0.weight"].shape, int(masks["0.bias"].sum())
        (torch.Size([4, 1]), 3)
    """
    module, parameters = model.get_submodule(name), dict(model.named_parameters(remove_duplicate=False))
    stored = parameter_name(name, "weight", parameters)
    if stored is None or is_lazy(parameters[stored]):
        raise InputError(f"The layer {name!r} has no weight yet, or computes it from elsewhere; it cannot be analysed.")
    weight = _effective(module, parameters[stored])
    if criterion is None:
        if weight.shape != parameters[stored].shape:
            raise InputError(f"Single weights of {name!r} cannot be pruned: it is parametrised ({stored!r}).")
        return lambda sparsity: {stored: level_mask(weight, sparsity)}
    scores = criterion(_output_rows(module, weight.cpu().float()))
    bias = parameter_name(name, "bias", parameters)

    def masks(sparsity: float) -> Mapping[str, Tensor]:
        keep = cut(scores, sparsity)
        layer_masks = {stored: _output_mask(module, keep, weight)}
        return layer_masks if bias is None else {**layer_masks, bias: keep}

    return masks


def _effective(module: nn.Module, stored: Tensor) -> Tensor:
    """Return the weight the layer computes with; `torch.nn.utils.prune` updates its own only in the next forward."""
    buffer = getattr(module, "weight_mask", None)
    if isinstance(buffer, Tensor):
        return stored.detach() * buffer
    weight: Tensor = module.get_parameter("weight") if "weight" in module._parameters else module.weight  # type: ignore[assignment]
    return weight.detach()


def _output_rows(module: nn.Module, weight: Tensor) -> Tensor:
    if not getattr(module, "transposed", False):
        return weight.flatten(1)
    groups: int = module.groups  # type: ignore[assignment]
    return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flatten(1)


def _output_mask(module: nn.Module, keep: Tensor, weight: Tensor) -> Tensor:
    if not getattr(module, "transposed", False):
        return keep.view([-1] + [1] * (weight.ndim - 1))
    groups: int = module.groups  # type: ignore[assignment]
    rows = keep.view(groups, 1, -1).expand(-1, weight.shape[0] // groups, -1).flatten(0, 1)
    return rows.reshape([*rows.shape] + [1] * (weight.ndim - 2))


@contextmanager
def masked(model: nn.Module, masks: Mapping[str, Tensor]) -> Iterator[None]:
    """Zero masked entries inside the context, and restore modules, parameters, buffers and modes afterwards.

    Args:
        model: the model, changed in place.
        masks: full name of a parameter or table -> mask, broadcastable to it.

    Example:
        >>> layer = nn.Linear(1, 2)
        >>> with masked(layer, {"weight": torch.tensor([[1], [0]])}):
        ...     int(layer.weight.count_nonzero())
        1
        >>> int(layer.weight.count_nonzero())
        2
    """
    stored = stored_tensors(model)
    # All of them: the body may train norms, fine-tune the model, fuse its layers or run it in another precision.
    before = [(t, t.detach(), t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
    modes = [(module, module.training) for module in model.modules()]
    tables = [(t, dict(t)) for m, _ in modes for t in (m._parameters, m._buffers, m._modules)]
    try:
        with torch.no_grad():
            for name, mask in masks.items():
                stored[name].masked_fill_((mask == 0).to(stored[name].device), 0)
        yield
    finally:
        for table, entries in tables:
            changed = {name: entry for name, entry in entries.items() if table.get(name) is not entry}
            table.update(changed)  # type: ignore[arg-type]
        with torch.no_grad():
            for tensor, own, value in before:
                if (tensor.dtype, tensor.device, tensor.shape) != (own.dtype, own.device, own.shape):
                    tensor.data = own
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        for module, training in modes:
            module.training = training

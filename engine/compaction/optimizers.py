"""Check whether an optimizer behaves the same on a narrowed parameter as on a masked one, and narrow its state.

It does if the update of an entry depends only on that entry's weight, gradient and state. Optimizers that use a
parameter as a whole do not: Muon orthogonalises it, Adafactor factors its statistics, LAMB and LARS scale by its norm.
Names are no evidence, and options matter; so the optimizer is tested on a small parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.compaction.slices import Slice
from engine.errors import PlanError

__all__ = ["check_entrywise", "check_follows", "follows", "is_entrywise", "small_state"]

_STEPS, _CUT_AT = 6, 3
# A step count by which warm-ups have ended and that most periods divide, and the number of steps to test there.
_FAR, _FAR_STEPS = 1_386_000, 3
_SCALES = (1.0, 1e3)  # of weights and gradients, below and above common thresholds
_TOLERANCE = 1e-9
# Options of the implementation, which do not affect results, and keys of a group's parameters.
_MEANS: dict[str, Any] = {"fused": False, "foreach": False, "capturable": False, "differentiable": False}
_OF_PARAMETERS = ("params", "param_names")


def check_entrywise(optimizer: Optimizer, group: Mapping[str, Any], ndim: int, name: str) -> None:
    """Reject an optimizer whose update of an entry depends on other entries.

    Args:
        optimizer: left unchanged; a new one of its class and with its options is tested.
        group: the parameter group of the parameter.
        ndim: number of dimensions of the parameter.
        name: name of the parameter, for the message.

    Raises:
        PlanError: if it does, or if the optimizer cannot be tested.

    Example:
        >>> optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2, 2))])
        >>> check_entrywise(optimizer, optimizer.param_groups[0], 2, "weight")
    """
    if ndim == 0:
        return
    kind = type(optimizer).__name__
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            error = max(_difference(type(optimizer), group, ndim, scale) for scale in _SCALES)
        except Exception as failure:  # of any kind: it is the optimizer's own code
            raise PlanError(
                f"{kind} cannot be tested on a small parameter ({type(failure).__name__}: {failure}), so it is unknown "
                f"whether it would train as with masks once {name!r} is smaller. Compact after training, or use "
                "another optimizer."
            ) from failure
    if not error <= _TOLERANCE:
        raise PlanError(
            f"{kind} updates an entry of a parameter depending on the other entries, so with a smaller {name!r} it "
            f"would train differently than with masks (by {error:.1e}, tested on a small parameter). Compact after "
            "training, or use an optimizer that treats each entry separately, as SGD and Adam do."
        )


def is_entrywise(optimizer: Optimizer) -> bool:
    """Whether an optimizer updates each entry alone, so that its state can be narrowed along with the parameters.

    Args:
        optimizer: left unchanged.

    Example:
        >>> weights = [nn.Parameter(torch.ones(2, 2))]
        >>> is_entrywise(torch.optim.Adam(weights)), is_entrywise(torch.optim.LBFGS(weights))
        (True, False)
    """
    try:
        for group in optimizer.param_groups:
            for ndim in sorted({parameter.ndim for parameter in group["params"]}):
                check_entrywise(optimizer, group, ndim, "a parameter")
    except PlanError:
        return False
    states = ((parameter, entry) for parameter, state in optimizer.state.items() for entry in state.values())
    return all(_has_sizes(e, p.shape) for p, e in states if isinstance(e, Tensor) and e.ndim)


def _difference(kind: Any, group: Mapping[str, Any], ndim: int, scale: float) -> float:
    """Return the final difference between a parameter that is narrowed midway and one that is masked, per ``scale``.

    The last steps are far ahead: updates that begin after a while, or come every so often, are among them.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (6, 4, *[2] * (ndim - 2))[:ndim]
    # Removed entries have no gradient; weights of the layer's own channels are zero, those of its consumers are not.
    rows, columns = torch.tensor([0, 2, 3, 5]), torch.tensor([1, 3])
    cut = Slice.along(0, rows, shape)
    if ndim > 1:
        cut = cut.then(Slice.along(1, columns, cut.shape))
    alive = cut.expand(torch.ones(cut.shape, dtype=torch.float64))
    start = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    if ndim > 1:
        start = start * alive.any(1, keepdim=True)
    whole = nn.Parameter(start)
    optimizer = _optimizer_of(kind, group, whole)
    small, other = whole, optimizer
    for step in range(_STEPS + _FAR_STEPS):
        before = _scalars(optimizer)
        if step == _CUT_AT:
            small = nn.Parameter(cut.apply(whole.detach()))
            other = _optimizer_of(kind, group, small)
            other.state[small] = {k: _cut_entry(v, cut) for k, v in optimizer.state.get(whole, {}).items()}
            _take_counts(optimizer, other)
        gradient = scale * torch.randn(shape, generator=generator, dtype=torch.float64) * alive
        whole.grad, small.grad = gradient, gradient if small is whole else cut.apply(gradient)
        optimizer.step()
        if other is not optimizer:
            other.step()
        if step == _STEPS - 1:
            counters = [place for place, value in _scalars(optimizer).items() if value - before.get(place, value) == 1]
            _set_counters(optimizer, counters)
            _set_counters(other, counters)
    return float((cut.apply(whole.detach()) - small.detach()).abs().max()) / scale


def _scalars(optimizer: Optimizer) -> dict[tuple[bool, str], float]:
    """Return the numbers in the state of an optimizer of one parameter, and in its group."""
    state: Mapping[str, Any] = next(iter(optimizer.state.values()), {})
    return {
        (in_state, key): float(value)
        for in_state, entries in ((True, state), (False, optimizer.param_groups[0]))
        for key, value in entries.items()
        if (isinstance(value, Tensor) and value.ndim == 0) or type(value) in (int, float)
    }


def _set_counters(optimizer: Optimizer, counters: Iterable[tuple[bool, str]]) -> None:
    """Make an optimizer of one parameter behave as after many steps."""
    for in_state, key in counters:
        entries = next(iter(optimizer.state.values())) if in_state else optimizer.param_groups[0]
        entries[key] = torch.full_like(entries[key], _FAR - 1) if isinstance(entries[key], Tensor) else _FAR - 1


def _optimizer_of(kind: Any, group: Mapping[str, Any], parameter: nn.Parameter) -> Optimizer:
    options = {key: copy.deepcopy(value) for key, value in group.items() if key not in _OF_PARAMETERS}
    options |= {key: value for key, value in _MEANS.items() if key in options}
    lr = {"lr": options["lr"]} if "lr" in options else {}
    optimizer: Optimizer = kind([{"params": [parameter], **options}], **lr)
    return optimizer


def _take_counts(optimizer: Optimizer, other: Optimizer) -> None:
    """Copy counters that an optimizer stores in its groups."""
    for old, new in zip(optimizer.param_groups, other.param_groups, strict=True):
        new.update({key: copy.deepcopy(value) for key, value in old.items() if key not in _OF_PARAMETERS})


def _cut_entry(entry: Any, cut: Slice) -> Any:
    if not isinstance(entry, Tensor) or entry.ndim == 0:
        return copy.deepcopy(entry)
    if not follows(entry, cut):
        raise ValueError(f"it keeps a state of shape {tuple(entry.shape)}")
    return small_state(entry, cut)


def follows(entry: Tensor, cut: Slice) -> bool:
    """Whether an entry of an optimizer's state has the parameter's sizes, or 1 where it is factored (Adafactor).

    Args:
        entry: an entry of the parameter's state.
        cut: the slice of the parameter.
    """
    return _has_sizes(entry, cut.before)


def _has_sizes(entry: Tensor, sizes: Sequence[int]) -> bool:
    return entry.ndim == len(sizes) and all(n in (1, m) for n, m in zip(entry.shape, sizes, strict=True))


def check_follows(entry: Tensor, cut: Slice, what: str) -> None:
    """Reject an entry of an optimizer's state that does not have the parameter's sizes.

    Args:
        entry: an entry of the parameter's state.
        cut: the slice of the parameter.
        what: description of the optimizer, the entry and the parameter, for the message.

    Raises:
        PlanError: if it does not.
    """
    if not follows(entry, cut):
        raise PlanError(
            f"{what} in shape {tuple(entry.shape)}, which cannot be sliced like the parameter {cut.before}. Compact "
            "after training, or use another optimizer."
        )


def small_state(entry: Tensor, cut: Slice) -> Tensor:
    """Return the narrowed entry of an optimizer's state; a dimension of size 1 is shared, and keeps its size.

    Args:
        entry: an entry of the parameter's state that follows the slice.
        cut: the slice of the parameter.
    """
    small = cut.apply(entry if tuple(entry.shape) == cut.before else entry.expand(cut.before))
    for dim, (size, full) in enumerate(zip(entry.shape, cut.before, strict=True)):
        if size != full:
            small = small.narrow(dim, 0, 1)
    return small.clone() if small.shape != cut.shape else small

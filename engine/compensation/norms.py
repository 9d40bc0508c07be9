"""Batch norm statistics, re-estimated."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from engine.compensation.weights import Processes
from engine.errors import InputError
from engine.program.stored import distinct_modules
from engine.recording.inputs import call_model, check_model

__all__ = ["recalibrate_norms"]

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def recalibrate_norms(
    model: nn.Module, batches: Iterable[Any], *, processes: Processes | None = None
) -> dict[str, float]:
    """Replace the statistics of batch norms by those of batches, each batch with the same weight.

    After pruning, the statistics are still those of the dense model. This is the cheap repair; where `compensate` was
    used they belong to the fitted weights, and re-estimating them makes the model worse.

    Args:
        model: its norms change in place; parameters, modes and all other buffers stay. Masked parameters have to be
            zero in it.
        batches: inputs as the model takes them: a tensor, a tuple of positional arguments, a mapping of keyword
            arguments; of a pair of inputs and targets the inputs, where the model can be called with one argument.
        processes: those that run the model together, each on as many batches of its own; every process has to call
            this, and all get the same statistics. Needed where parameters are sharded.

    Returns:
        By the norm's name, how far its mean moved, in standard deviations (root mean square over channels).

    Raises:
        InputError: where there are no batches, or a batch gives statistics that are not finite; the model is as before.
        TraceError: where the model rejects a batch; the model is as before.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm1d(2))
        >>> moved = recalibrate_norms(net, [torch.tensor([[1.0, 2.0], [3.0, 6.0]])])
        >>> net[0].running_mean, list(moved)
        (tensor([2., 4.]), ['0'])
    """
    if processes is None:
        check_model(model)
    norms = {name: m for name, m in distinct_modules(model).items() if _has_statistics(m)}
    alone = _takes_one(model)
    before = {name: {key: t.clone() for key, t in _statistics(norm).items()} for name, norm in norms.items()}
    try:
        count = 0
        with torch.no_grad(), _estimating(model, norms):
            for batch in batches:
                call_model(model, *_arguments(batch, alone))
                count += 1
            if processes is not None:
                _average(norms, processes)
        _check(count, norms)
    except BaseException:
        for name, norm in norms.items():
            for key, statistic in _statistics(norm).items():
                statistic.copy_(before[name][key])
        raise
    return {name: _moved(norm, before[name]) for name, norm in norms.items()}


def _statistics(norm: nn.Module) -> dict[str, Tensor]:
    return {key: getattr(norm, key) for key in _STATISTICS}


def _has_statistics(module: nn.Module) -> bool:
    return all(isinstance(module._buffers.get(key), Tensor) for key in _STATISTICS) and hasattr(module, "momentum")


def _takes_one(model: nn.Module) -> bool:
    """Whether the model can be called with one positional argument."""
    try:
        inspect.signature(model.forward).bind(None)
    except TypeError:
        return False
    return True


def _arguments(batch: Any, alone: bool) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(batch, Mapping):
        return (), batch
    if isinstance(batch, (tuple, list)):
        pair = alone and len(batch) == 2 and isinstance(batch[0], Tensor)
        return (batch[0],) if pair else tuple(batch), {}
    return (batch,), {}


@contextmanager
def _estimating(model: nn.Module, norms: Mapping[str, nn.Module]) -> Iterator[None]:
    """Put the norms alone into train mode, averaging over all batches from now on."""
    modes = [(module, module.training) for module in distinct_modules(model).values()]
    momenta = [(norm, norm.momentum) for norm in norms.values()]
    try:
        for module, _ in modes:
            module.training = False
        for norm in norms.values():
            norm.training = True
            norm.momentum = None  # type: ignore[assignment]  # cumulative averages
            norm.reset_running_stats()  # type: ignore[operator]
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for norm, momentum in momenta:
            norm.momentum = momentum


def _average(norms: Mapping[str, nn.Module], processes: Processes) -> None:
    number = float(processes.summed(torch.ones(())))
    for norm in norms.values():
        for key in ("running_mean", "running_var"):
            statistic = _statistics(norm)[key]
            statistic.copy_(processes.summed(statistic.clone()) / number)


def _check(count: int, norms: Mapping[str, nn.Module]) -> None:
    if not count:
        raise InputError("There are no batches to take the statistics of; pass one at least.")
    for name, norm in norms.items():
        if not all(t.isfinite().all() for t in _statistics(norm).values()):
            raise InputError(f"The batches give {name!r} statistics that are not finite; look for NaN in them.")


def _moved(norm: nn.Module, before: Mapping[str, Tensor]) -> float:
    deviation = before["running_var"].double().clamp(min=1e-12).sqrt()
    shift = (_statistics(norm)["running_mean"].double() - before["running_mean"].double()) / deviation
    return float(shift.square().mean().sqrt())

"""Re-estimation of batch norm statistics."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engine.bounds import check_kinds
from engine.compensation.weights import Processes
from engine.errors import InputError
from engine.program.defaults import own_defaults
from engine.program.dtensors import resharded, spread, whole
from engine.program.stored import distinct_modules
from engine.program.trees import tensors_in
from engine.running.evaluation import evaluating
from engine.running.inputs import call_model, check_model
from engine.running.provenance import METADATA_FUNCTIONS, QUERY_PREFIXES
from engine.running.tensor_backup import unwritten

__all__ = ["recalibrate_norms"]

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

Estimates = Mapping[str, Mapping[str, Tensor]]
"""Mean, variance and number of batches, by norm."""


@own_defaults()
def recalibrate_norms(
    model: nn.Module, batches: Iterable[Any], *, keep_outputs: bool = False, processes: Processes | None = None
) -> dict[str, float]:
    r"""Replace the statistics of batch norms by averages over batches, with equal weights.

    After pruning, the statistics are still those of the dense model; updating them is a cheap repair. After
    `compensate`, the fitted weights rely on the statistics, and updating them would degrade the model. In that case,
    ``keep_outputs=True`` preserves eval mode and brings train mode, which normalises by the statistics of each batch,
    close to it: the weight :math:`\gamma` and the bias :math:`\beta` of a norm compensate for the change,

    .. math:: \gamma' = \gamma \frac{s'}{s}, \quad \beta' = \beta + \gamma \frac{\mu' - \mu}{s},
        \quad s = \sqrt{\sigma^2 + \epsilon}

    Args:
        model: the model, whose norms change in place; all other parameters, buffers and modes are preserved. Masked
            parameters have to be zero.
        batches: inputs of the model: a tensor, a tuple of positional arguments, or a mapping of keyword arguments;
            pairs of inputs and targets are accepted if the model can be called with one argument.
        keep_outputs: whether to preserve the outputs of eval mode up to rounding; norms that do not have a weight and a
            bias, or of which something else reads a weight, a bias or a statistic, are then not changed.
        processes: processes that run the model together, each on the same number of batches; every process has to call
            this, and all get the same statistics. Required if parameters are sharded.

    Returns:
        The shift of each norm's mean in standard deviations (root mean square over channels), by name. Norms that no
        batch reaches keep their statistics and are omitted.

    Raises:
        InputError: if there are no batches, or the statistics are not finite; the model is then unchanged.
        TraceError: if the model rejects a batch; the model is then unchanged.

    Example:
        >>> net = nn.Sequential(nn.BatchNorm1d(2))
        >>> moved = recalibrate_norms(net, [torch.tensor([[1.0, 2.0], [3.0, 6.0]])])
        >>> net[0].running_mean, list(moved)
        (tensor([2., 4.]), ['0'])
    """
    check_kinds(recalibrate_norms, locals())
    if processes is None:
        check_model(model)
    norms = {name: m for name, m in distinct_modules(model).items() if _has_statistics(m)}
    if keep_outputs:
        norms = {name: m for name, m in norms.items() if _is_scaled_alone(m, model)}
    if not norms:
        return {}
    alone = _takes_one(model)
    before = {name: {key: t.clone() for key, t in _statistics(norm).items()} for name, norm in norms.items()}
    estimating: Callable[[Mapping[str, nn.Module]], Any] = _Observing if keep_outputs else _replacing
    try:
        count = 0
        with torch.no_grad(), _untouched(model, norms, processes), estimating(norms) as estimates:
            for batch in batches:
                call_model(model, *_arguments(batch, alone), batch=True)
                count += 1
            if processes is not None:
                _average(estimates, processes)
            _check(count, estimates)
    except BaseException:
        _restore(norms, before)
        raise
    run = {name: norm for name, norm in norms.items() if estimates[name]["num_batches_tracked"]}
    _restore({name: norm for name, norm in norms.items() if name not in run}, before)
    if keep_outputs:
        resharded(model)
        for name, norm in run.items():
            _take_over(norm, estimates[name])
    return {name: _moved(norm, before[name]) for name, norm in run.items()}


def _statistics(norm: nn.Module) -> dict[str, Tensor]:
    return {key: getattr(norm, key) for key in _STATISTICS}


def _restore(norms: Mapping[str, nn.Module], before: Mapping[str, Mapping[str, Tensor]]) -> None:
    for name, norm in norms.items():
        for key, statistic in _statistics(norm).items():
            statistic.copy_(before[name][key])


def _has_statistics(module: nn.Module) -> bool:
    return all(isinstance(module._buffers.get(key), Tensor) for key in _STATISTICS) and hasattr(module, "momentum")


def _is_scaled_alone(norm: nn.Module, model: nn.Module) -> bool:
    """Whether a norm has a weight and a bias, and shares neither these nor its statistics with another module."""
    own = [norm._parameters.get(key) for key in ("weight", "bias")]
    if not isinstance(norm, _BATCH_NORMS) or None in own:
        return False
    stored = [t for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values())]
    return all(sum(t is other for other in stored) == 1 for t in (*own, *_statistics(norm).values()))


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


# ---------------------------------------------------------------- estimates


@contextmanager
def _untouched(model: nn.Module, norms: Mapping[str, nn.Module], processes: Processes | None) -> Iterator[None]:
    """Run the body in eval mode, and undo all its effects on the model, except for the norms' statistics."""
    with ExitStack() as stack:
        if processes is None:
            stack.enter_context(evaluating(model))
            stack.enter_context(
                unwritten(model, but=[t for norm in norms.values() for t in _statistics(norm).values()])
            )
        else:
            stack.enter_context(_evaluating(model))
        yield


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in distinct_modules(model).values()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _replacing(norms: Mapping[str, nn.Module]) -> Iterator[Estimates]:
    """Make norms use the statistics of each batch, and replace their own by averages over all batches."""
    momenta = [(norm, norm.momentum) for norm in norms.values()]
    try:
        for norm in norms.values():
            norm.training = True
            norm.momentum = None  # type: ignore[assignment]  # cumulative averages
            norm.reset_running_stats()  # type: ignore[operator]
        yield {name: _statistics(norm) for name, norm in norms.items()}
    finally:
        for norm, momentum in momenta:
            norm.momentum = momentum


class _Observing(TorchFunctionMode):
    """Average the statistics of the batches while the norms use their own.

    A norm whose weight, bias or statistics anything but batch normalisation reads counts as not run, because there the
    changes would not compensate for each other.
    """

    def __init__(self, norms: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._norms: Mapping[str, Any] = norms
        self._owners = {id(t): name for name, norm in norms.items() for t in _tensors(norm)}
        self.estimates = {
            n: {k: torch.zeros_like(t) for k, t in _statistics(norm).items()} for n, norm in norms.items()
        }
        self._read: set[str] = set()

    def __enter__(self) -> Estimates:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self.estimates

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for name in self._read:
            self.estimates[name]["num_batches_tracked"].zero_()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        owners = {self._owners[id(t)] for t in tensors_in((args, kwargs)) if id(t) in self._owners}
        if not owners:
            return func(*args, **kwargs)
        call = inspect.signature(F.batch_norm).bind(*args, **kwargs) if func is F.batch_norm else None
        name = next(iter(owners))
        if call is not None and self._is_its_own(name, call):
            _observe(self.estimates[name], call.arguments["input"])
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if not _is_metadata(func, result):
            self._read |= owners
        return result

    def _is_its_own(self, name: str, call: inspect.BoundArguments) -> bool:
        """Whether a call normalises with exactly the norm's statistics, weight, bias and eps."""
        norm = self._norms[name]
        call.apply_defaults()
        own = {key: getattr(norm, key) for key in ("running_mean", "running_var", "weight", "bias")}
        settings = call.arguments["eps"] == norm.eps and not call.arguments["training"]
        return settings and all(call.arguments[key] is tensor for key, tensor in own.items())


def _tensors(norm: Any) -> list[Tensor]:
    return [norm.weight, norm.bias, norm.running_mean, norm.running_var]


def _is_metadata(func: Any, result: Any) -> bool:
    """Whether a function only reads metadata of a tensor: its shape, its dtype, whether it is on a GPU."""
    if any(True for _ in tensors_in(result)):
        return False
    name = getattr(func, "__name__", "")
    return name in ("__get__", *METADATA_FUNCTIONS) or name.startswith(("is_", *QUERY_PREFIXES))


def _observe(estimate: Mapping[str, Tensor], x: Tensor) -> None:
    mean, variance, count = estimate.values()
    if x.numel() > len(mean):  # one value has no variance
        count += 1
        F.batch_norm(x, mean, variance, training=True, momentum=1 / float(count))


def _average(estimates: Estimates, processes: Processes) -> None:
    number = float(processes.summed(torch.ones(())))
    for estimate in estimates.values():
        for key in ("running_mean", "running_var"):
            estimate[key].copy_(processes.summed(estimate[key].clone()) / number)


def _check(count: int, estimates: Estimates) -> None:
    if not count:
        raise InputError("There are no batches; pass at least one.")
    for name, estimate in estimates.items():
        if not all(t.isfinite().all() for t in estimate.values()):
            raise InputError(f"The statistics of {name!r} on these batches are not finite; check the batches for NaN.")


# ---------------------------------------------------------------- results


@torch.no_grad()
def _take_over(norm: Any, estimate: Mapping[str, Tensor]) -> None:
    """Replace a norm's mean and variance, and compensate for the change by its weight and bias."""
    weight, bias = whole(norm.weight).double(), whole(norm.bias).double()
    before, after = ((t["running_var"].double() + norm.eps).sqrt() for t in (_statistics(norm), estimate))
    bias = bias + weight * (estimate["running_mean"].double() - norm.running_mean.double()) / before
    weight = weight * after / before
    for parameter, value in ((norm.weight, weight), (norm.bias, bias)):
        parameter.copy_(spread(value.to(parameter.dtype), parameter))
    norm.running_mean.copy_(estimate["running_mean"])
    norm.running_var.copy_(estimate["running_var"])


def _moved(norm: nn.Module, before: Mapping[str, Tensor]) -> float:
    deviation = before["running_var"].double().clamp(min=1e-12).sqrt()
    shift = (_statistics(norm)["running_mean"].double() - before["running_mean"].double()) / deviation
    return float(shift.square().mean().sqrt())

"""Comparison of a class that is built from a configuration with the model in memory.

Outputs are compared on random inputs in the model's precision. If rounding may explain the difference, they are
compared again in float64 with unrounded weights, and, if norms share an eps, again with their own eps.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engine.errors import InputError, TraceError
from engine.program import distinct_modules, tensors_in
from engine.running import call_model, resolve_inputs
from engine.surgery import original, weights_of
from engine.verification import Rescaled, Unrounded
from lightning_compress.checkpoints.export import difference
from lightning_compress.stock.describe import Differing, Look, Number, Search
from lightning_compress.stock.fields import Values
from lightning_compress.stock.formats import Form
from lightning_compress.stock.inputs import random_like, seeded_on

__all__ = ["TOLERANCE", "Fit", "agree", "check_reached", "evaluating", "fitted", "measured"]

TOLERANCE = 1e-6
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest errors that may be due to rounding of the new weights."""


@dataclass(frozen=True)
class Fit:
    """A new instance of a class with the weights of a narrowed network.

    Attributes:
        stock: the instance.
        error: largest difference of the outputs, relative to the largest, in the model's precision.
        exact: whether the two compute the same up to rounding and the shared eps.
        shared: eps of the norms whose eps differs from that in memory, by name.
        failure: error that the instance raised, in which case ``error`` is infinite.
    """

    stock: nn.Module
    error: float
    exact: bool
    shared: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""


def fitted(
    model: nn.Module,
    form: Form,
    values: Values,
    norms: Mapping[str, Rescaled],
    differing: Differing,
    example: Any,
) -> Fit:
    """Build the class from a configuration, and compare it with the model.

    Args:
        model: the narrowed network.
        form: how its class is built.
        values: the numbers of the configuration that change.
        norms: tensors and numbers of the ordinary norms that replace the narrowed ones.
        differing: numbers of modules that differ: in memory, and under the configuration.
        example: example input of the model.
    """
    weights = _weights(model, norms, _scales(model, norms, differing))
    stock = _loaded(model, form, values, weights)
    try:
        error = measured(model, stock, example)
    except TraceError:  # the model itself rejects the example
        raise
    except Exception as problem:  # the class may raise anything for inconsistent numbers
        return Fit(stock, math.inf, False, failure=f"{type(problem).__name__}: {problem}")
    if error <= TOLERANCE:
        return Fit(stock, error, True)
    wide = _wide(stock, weights)
    reference = copy.deepcopy(model).double()
    if _may_be_rounding(stock, error) and _in_float64(reference, wide, example) <= TOLERANCE:
        return Fit(stock, error, True)
    shared = _with_own_eps(wide, norms, differing)
    exact = bool(shared) and _in_float64(reference, wide, example) <= TOLERANCE
    if shared and not exact:  # in float64 the class may not run
        narrow = copy.deepcopy(stock)
        _with_own_eps(narrow, norms, differing)
        exact = measured(model, narrow, example) <= TOLERANCE
    return Fit(stock, error, exact, shared if exact else {})


def agree(one: nn.Module, other: nn.Module, error: float, example: Any) -> bool:
    """Whether two models of one class compute the same up to rounding.

    Args:
        one, other: the models.
        error: largest difference of their outputs, relative to the largest output.
        example: their example input.
    """
    if error <= TOLERANCE:
        return True
    wide = [copy.deepcopy(model).double() for model in (one, other)]
    return _may_be_rounding(one, error) and _in_float64(wide[0], wide[1], example) <= TOLERANCE


def _may_be_rounding(model: nn.Module, error: float) -> bool:
    return error <= _ROUNDING.get(next(model.parameters()).dtype, TOLERANCE)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode inside the context."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in training:
            module.training = True


def _scales(model: nn.Module, norms: Mapping[str, Rescaled], differing: Differing) -> dict[str, float]:
    """Return factors for the weights of modules whose outputs are scaled by a number, such as scaled embeddings.

    In the class, the number follows the width of the network, while the narrowed network keeps the old number.
    """
    modules = distinct_modules(model)
    kinds = {original(type(modules[name])) for name in norms}
    factors: dict[str, float] = {}
    for (name, key), (own, other) in differing.items():
        module = modules.get(name)
        if module is None or original(type(module)) in kinds or not isinstance(own, float) or not own or not other:
            continue
        if next(module.children(), None) is None and next(module.parameters(), None) is not None:
            factors |= {} if _is_eps(module, key, other) else {name: own / other}
    return factors


def _is_eps(module: nn.Module, key: str, other: Number) -> bool:
    """Whether a number of a module only matters for small inputs, like the eps of a norm.

    Example:
        >>> _is_eps(nn.RMSNorm(2, eps=1e-5), "eps", 1e-6)
        True
    """
    sizes = {parameter.shape for parameter in module.parameters()}
    if len(sizes) != 1 or len(next(iter(sizes))) != 1:
        return False
    one = copy.deepcopy(module).cpu().double()
    two = copy.deepcopy(one)
    setattr(two, key, other)
    x = 1e6 * torch.randn(2, *next(iter(sizes)), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad(), Unrounded():  # type: ignore[no-untyped-call]
        try:
            return torch.allclose(one(x), two(x), rtol=1e-9, atol=0)
        except (RuntimeError, TypeError):  # the module does not accept floating-point inputs
            return False


def _weights(model: nn.Module, norms: Mapping[str, Rescaled], scales: Mapping[str, float]) -> dict[str, Tensor]:
    """Return the weights, with new ones unrounded."""
    weights: dict[str, Tensor] = weights_of(model)
    for name, norm in norms.items():
        for key, value in norm.tensors.items():
            weights[f"{name}.{key}" if name else key] = value
    for name, factor in scales.items():
        for key, parameter in model.get_submodule(name).named_parameters():
            weights[f"{name}.{key}"] = parameter.detach().double() * factor
    return weights


def _loaded(model: nn.Module, form: Form, values: Values, weights: Mapping[str, Tensor]) -> nn.Module:
    stock = form.build(values, "cpu")
    parameter = next(model.parameters())
    stock = stock.to(device=parameter.device, dtype=parameter.dtype)
    stock.load_state_dict(dict(weights))
    return stock.eval()


def _wide(stock: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy in float64."""
    wide = copy.deepcopy(stock).double()
    wide.load_state_dict(dict(weights))
    return wide


def _with_own_eps(wide: nn.Module, norms: Mapping[str, Rescaled], differing: Differing) -> dict[str, float]:
    """Set the eps of norms to that in memory, and return the replaced values."""
    keys = {key for norm in norms.values() for key in norm.numbers}
    shared: dict[str, float] = {}
    for (name, key), (own, other) in differing.items():
        if isinstance(own, float) and (key in keys or _is_eps(wide.get_submodule(name), key, own)):
            setattr(wide.get_submodule(name), key, own)
            shared[name] = float(other)
    return shared


def _in_float64(model: nn.Module, stock: nn.Module, example: Any) -> float:
    """Return the error in float64; infinite if the class does not run in float64."""
    with Unrounded():  # type: ignore[no-untyped-call]
        try:
            return measured(model, stock, _doubled(example))
        except (RuntimeError, TypeError):
            return math.inf


def _doubled(example: Any) -> Any:
    return apply_to_collection(example, Tensor, lambda t: t.double() if t.is_floating_point() else t)


def measured(model: nn.Module, stock: nn.Module, example: Any) -> float:
    """Return the largest relative difference of the outputs of two models, on an example and on random inputs."""
    return difference(_Seeded(model), _Seeded(stock), [example, *_varied(model, example)])


def _varied(model: nn.Module, example: Any) -> Iterator[Any]:
    """Yield other inputs of the same shapes that the model accepts."""
    for integers in (True, False):
        batches = [random_like(example, seed, integers) for seed in (1, 2)]
        if all(_accepts(model, batch) for batch in batches):
            yield from batches
            return


def _accepts(model: nn.Module, batch: Any) -> bool:
    args, kwargs = resolve_inputs(batch)
    try:
        with torch.no_grad():
            call_model(model, args, kwargs)
    except Exception:  # the model may raise anything, as integers may be sizes
        return False
    return True


class _Seeded(nn.Module):
    """A model that draws the same random numbers each time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output."""
        with seeded_on(self.inner):
            return self.inner(*args, **kwargs)


class _Reached(TorchFunctionMode):
    """Record which tensors are passed to functions of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.update(id(tensor) for tensor in tensors_in((args, kwargs)))
        return func(*args, **(kwargs or {}))


def check_reached(stock: nn.Module, search: Search, example: Any) -> None:
    """Check that the comparison used all narrowed parameters.

    Raises:
        InputError: naming a parameter that it did not use.
    """
    args, kwargs = resolve_inputs(example)
    with torch.no_grad(), _Reached() as reached:
        call_model(stock, args, kwargs)
    base: Look | None = search.look({})
    assert base is not None
    for name, parameter in stock.named_parameters():
        if tuple(parameter.shape) != base.shapes[name] and id(parameter) not in reached.seen:
            raise InputError(
                f"The inputs do not use {name!r}, which was narrowed, so the comparison does not cover it. Pass an "
                "`example_input` that does."
            )

"""RMS norms that lost channels, as ordinary norms over the remaining channels.

With d of D channels left and the others zero, ``w x / sqrt(S / D + eps)`` equals ``w' x / sqrt(S / d + eps')`` where
``eps' = eps D / d`` and ``w' = w sqrt(D / d)``; S is the sum of squares of the remaining channels. A removed channel
with the constant c adds c² to S: then ``eps' = (eps + sum(c²) / D) D / d``. How a class uses its weight (``w``, ``1 +
w``), and which of its numbers is eps, is not looked up but tried: every returned norm was compared on random numbers in
float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.program.stored import distinct_modules
from engine.surgery.classes import original
from engine.surgery.kinds.norms import filled_squares, spans_of
from engine.surgery.kinds.pins import divisors
from engine.verification.rounding import unrounded

__all__ = ["Rescaled", "Unrounded", "rescaled_norms"]

_TOLERANCE = 1e-12


@dataclass(frozen=True, eq=False)
class Rescaled:
    """A narrowed norm, and what an ordinary one needs to compute the same.

    Attributes:
        kind: name of the class.
        size: number of channels that the statistics span.
        kept: number of channels that remain; 0 if there is no weight per channel to show it.
        tensors: new values of the norm's parameters, by name.
        numbers: new values of the norm's attributes, by name.
        is_plain: whether an ordinary norm can compute the same; False for layer norms and group norms, whose variance
            cannot be rescaled.
    """

    kind: str
    size: int
    kept: int
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    is_plain: bool = False


def rescaled_norms(model: nn.Module) -> dict[str, Rescaled]:
    """Return the norms of a compacted model that keep the statistics of removed channels, by name.

    Example:
        >>> import engine
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.RMSNorm(8, eps=1e-5), nn.Linear(8, 2))
        >>> keep = torch.arange(8) < 2
        >>> masks = {"0": {"weight": keep[:, None].expand(8, 2), "bias": keep}, "1": {"weight": keep}}
        >>> small = engine.ModelSpeedup(model, torch.rand(4, 2), masks).speedup_model()
        >>> norm = rescaled_norms(small)["1"]
        >>> norm.size, norm.kept, round(norm.numbers["eps"], 12), norm.tensors["weight"].tolist()
        (8, 2, 4e-05, [2.0, 2.0])
    """
    sizes = {**spans_of(model), **_composed(model)}
    modules = distinct_modules(model)
    return {name: _rescaled(modules[name], size) for name, size in sizes.items()}


def _composed(model: nn.Module) -> dict[str, int]:
    """Return the norms written as a mean that a pin divides by the former number of channels."""
    sizes = {name: divisors(type(module)) for name, module in distinct_modules(model).items()}
    return {name: int(values[0]) for name, values in sizes.items() if len(values) == 1}


def _rescaled(module: nn.Module, size: int) -> Rescaled:
    kind, kept = type(module).__name__, _kept(module)
    failed = Rescaled(kind, size, kept)
    if not 0 < kept < size or any(True for _ in module.children()):
        return failed
    wide = copy.deepcopy(module).double()
    dtype = next((p.dtype for p in module.parameters()), torch.get_default_dtype())
    for name, eps in _numbers(module):
        epsilon = torch.finfo(dtype).eps if eps is None else eps
        if eps is None:
            setattr(wide, name, epsilon)
        for tensors in _weights(module, math.sqrt(size / kept)):
            numbers = {name: (epsilon + filled_squares(wide) / size) * size / kept}
            if _agree(wide, _plain(wide, kept, tensors, numbers), kept, epsilon):
                return Rescaled(kind, size, kept, tensors, numbers, True)
    return failed


def _kept(module: nn.Module) -> int:
    shapes = [tuple(p.shape) for p in module.parameters()]
    shapes += [tuple(shape) for shape in [vars(module).get("normalized_shape")] if isinstance(shape, tuple)]
    return int(shapes[0][0]) if shapes and len(set(shapes)) == 1 and len(shapes[0]) == 1 else 0


def _numbers(module: nn.Module) -> Iterator[tuple[str, float | None]]:
    """Yield the attributes that may be eps."""
    for name, value in vars(module).items():
        if name == "eps" and value is None or type(value) is float and value > 0:
            yield name, value


def _weights(module: nn.Module, factor: float) -> Iterator[dict[str, Tensor]]:
    """Yield the rescaled parameters for each way in which a class may use them: ``w``, and ``1 + w``."""
    parameters = {name: p.detach().double() for name, p in module.named_parameters()}
    yield {name: p * factor for name, p in parameters.items()}
    if parameters:
        yield {name: (1 + p) * factor - 1 for name, p in parameters.items()}


def _plain(wide: nn.Module, kept: int, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> nn.Module:
    plain = copy.deepcopy(wide)
    plain.__class__ = original(type(wide))
    if "normalized_shape" in vars(plain):
        vars(plain)["normalized_shape"] = (kept,)
    with torch.no_grad():
        for name, value in tensors.items():
            plain.get_parameter(name).copy_(value)
    vars(plain).update(numbers)
    return plain


def _agree(wide: nn.Module, plain: nn.Module, kept: int, eps: float) -> bool:
    """Whether two norms compute the same function, also for inputs so small that eps dominates."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, kept, generator=generator, dtype=torch.float64)
    for scale in (1.0, math.sqrt(eps), 0.1 * math.sqrt(eps)):
        try:
            with torch.no_grad(), Unrounded():  # type: ignore[no-untyped-call]
                one, other = wide(x * scale), plain(x * scale)
        except (RuntimeError, TypeError, AttributeError):  # it is not a norm of one tensor
            return False
        if not float((one - other).abs().max()) <= _TOLERANCE * float(one.abs().max()):
            return False
    return True


class Unrounded(TorchDispatchMode):
    """Keeps float64 where a norm converts to lower precision."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = unrounded(func, args, dict(kwargs or {}))
        return func(*args, **kwargs)

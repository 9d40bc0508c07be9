"""Exchange norms that lost channels for ordinary ones, once the compacted network has been verified."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.compaction.parts import store_certificate
from engine.compaction.plan import Plan
from engine.program.graph import Graph
from engine.program.stored import distinct_modules
from engine.program.trees import tensors_in
from engine.running.evaluation import evaluating
from engine.running.inputs import call_model
from engine.surgery.exchange import Change, Undo
from engine.surgery.kinds.norms import filled_squares, is_root_mean_square, spans_of
from engine.surgery.kinds.ordinary import OrdinaryNorm
from engine.verification.certificate import TOLERANCE, Certificate
from engine.verification.rescaled import Rescaled, rescaled_norms
from engine.verification.trials import Trial, random_inputs

__all__ = ["make_ordinary"]

Done = tuple[tuple[OrdinaryNorm, ...], Certificate, Undo]


@dataclass(frozen=True)
class _Network:
    """A compacted model, and how to run it; nothing runs unless outputs are to be compared."""

    model: nn.Module
    graph: Graph
    batch_dim: int
    compare: bool

    def outputs(self) -> list[Tensor]:
        """Return the outputs of the model, for the same inputs each time."""
        if not self.compare:
            return []
        args, kwargs = random_inputs(self.graph, Trial(None, False, None), self.batch_dim)
        with evaluating(self.model), torch.no_grad():
            torch.manual_seed(0)
            outputs = tensors_in(call_model(self.model, args, kwargs))
            return [tensor.detach().double() for tensor in outputs if tensor.is_floating_point()]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's parameters."""
        return next(parameter.dtype for parameter in self.model.parameters())


def make_ordinary(
    model: nn.Module, graph: Graph, batch_dim: int, certificate: Certificate, compare: bool, approximate: bool
) -> Done:
    """Exchange the norms of a compacted model for ordinary ones.

    Each RMS norm was compared on random numbers in float64; with ``compare``, the outputs of the network are compared,
    too. If these differ, RMS norms are not exchanged, as a note says.

    Args:
        model: the compacted and verified model, which is changed in place.
        graph: of the model before the compaction.
        batch_dim: the batch dimension of its inputs.
        certificate: certificate of the compaction.
        compare: whether to run the network.
        approximate: whether layer norms and group norms are exchanged as well.

    Returns:
        The exchanges, the certificate of the compaction with them, and a function that undoes them.
    """
    network = _Network(model, graph, batch_dim, compare)
    with ExitStack() as undo:
        exchanges, certificate, undo_exact = _exact(network, certificate)
        undo.callback(undo_exact)
        if approximate:
            others, certificate, undo_others = _approximate(network, certificate)
            undo.callback(undo_others)
            exchanges = (*exchanges, *others)
        if exchanges:
            store_certificate(model, certificate.state_dict())
        return exchanges, certificate, undo.pop_all().close


def _exact(network: _Network, certificate: Certificate) -> Done:
    exchanges = tuple(_root_mean_squares(network.model))
    if not exchanges:
        return (), certificate, lambda: None
    change, error = _exchange(network, exchanges)
    tolerance = TOLERANCE.get(network.dtype, 1e-4)
    if network.compare and not error <= tolerance:
        change.rollback()
        note = (
            f"{exchanges[0].module!r} and other RMS norms keep the statistics of all channels: with ordinary norms in "
            f"their place outputs differ by {error:.1e} of the largest. Does anything else read their weights or eps?"
        )
        return (), replace(certificate, notes=(*certificate.notes, note)), lambda: None
    note = (
        f"{_named(exchanges)} became ordinary norms over the remaining channels, with another eps and weight scale: "
        "they compute the same function, and train at another rate."
    )
    if network.compare:
        note += f" Rounding the new weights changes outputs by {error:.1e} of the largest."
    if certificate.exact and not certificate.verified and network.compare:  # nothing else was removed
        certificate = Certificate(True, error, tolerance, str(network.dtype).removeprefix("torch."), 1)
    return exchanges, replace(certificate, exact_in_train=False, notes=(*certificate.notes, note)), change.rollback


def _approximate(network: _Network, certificate: Certificate) -> Done:
    modules = distinct_modules(network.model)
    narrowed = [(name, modules[name], size) for name, size in spans_of(network.model).items()]
    exchanges = tuple(
        OrdinaryNorm(name, size, len(m.weight), "", approximate=True)  # type: ignore[arg-type]
        for name, m, size in narrowed
        if not is_root_mean_square(type(m)) and isinstance(getattr(m, "weight", None), Tensor)
    )
    if not exchanges:
        return (), certificate, lambda: None
    change, error = _exchange(network, exchanges)
    note = f"{_named(exchanges)} became ordinary norms over the remaining channels, and compute a different function."
    changed: Any = {"verified": False, "exact": False, "exact_in_train": False, "max_error": error}
    return exchanges, replace(certificate, **changed, notes=(*certificate.notes, note)), change.rollback


def _exchange(network: _Network, exchanges: tuple[OrdinaryNorm, ...]) -> tuple[Change, float]:
    """Exchange norms; return the change, and the difference of the outputs (NaN if they are not compared)."""
    change, before = Plan(exchanges=exchanges).prepare(network.model), network.outputs()
    change.commit()
    try:
        return change, _difference(before, network.outputs()) if network.compare else math.nan
    except BaseException:  # including an interrupt by the user
        change.rollback()
        raise


def _named(exchanges: tuple[OrdinaryNorm, ...]) -> str:
    """Return the names of norms for a note.

    Example:
        >>> norms = OrdinaryNorm("a", 8, 4, "eps"), OrdinaryNorm("b", 8, 4, "eps"), OrdinaryNorm("c", 8, 4, "eps")
        >>> _named(norms[:1]), _named(norms[:2]), _named(norms)
        ("The norm 'a'", "The norms 'a' and 'b'", "The norms 'a', 'b' and 1 more")
    """
    first, *others = (repr(exchange.module) for exchange in exchanges)
    if len(others) > 1:
        return f"The norms {first}, {others[0]} and {len(others) - 1} more"
    return f"The norms {first} and {others[0]}" if others else f"The norm {first}"


def _root_mean_squares(model: nn.Module) -> Iterator[OrdinaryNorm]:
    """Yield the norms that an ordinary norm can replace, and whose weights no other module shares."""
    holders = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    for name, norm in rescaled_norms(model).items():
        module = model.get_submodule(name)
        if norm.is_plain and all(holders[id(p)] == 1 for p in module.parameters()):
            (number,) = norm.numbers
            yield OrdinaryNorm(name, norm.size, norm.kept, number, filled_squares(module), _offset(norm, module))


def _offset(norm: Rescaled, module: nn.Module) -> float:
    """Return what the class adds to its weight: w' = (w + offset) f - offset."""
    factor = (norm.size / norm.kept) ** 0.5
    return max((_shift(module.get_parameter(key), new, factor) for key, new in norm.tensors.items()), default=0.0)


def _shift(old: Tensor, new: Tensor, factor: float) -> float:
    return float(((new - old.detach().double() * factor) / (factor - 1)).mean().round())


def _difference(before: list[Tensor], after: list[Tensor]) -> float:
    pairs = [(one, other) for one, other in zip(before, after, strict=True) if one.numel()]
    return max((float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in pairs), default=0.0)

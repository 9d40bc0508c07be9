"""Comparison of the values that two models computed, channel by channel."""

from __future__ import annotations

import math

import torch

from engine.errors import VerificationError
from engine.verification.certify import Observation
from engine.verification.infinities import without_infinities
from engine.verification.witness import Witness

__all__ = ["compare"]


def compare(reference: Observation, compacted: Observation, witness: Witness, tolerance: float) -> tuple[float, str]:
    """Return the largest relative error between two observations, and its place; consecutive calls are compared, too.

    Raises:
        VerificationError: if the runs did not make the same calls, or the reference is not finite.
    """
    worst = _compare(reference, compacted, witness, tolerance)
    if reference.again is None or compacted.again is None:
        return worst
    error, where = compare(reference.again, compacted.again, witness, tolerance)
    return (error, f"{where} in the call after it") if error > worst[0] else worst


def _compare(reference: Observation, compacted: Observation, witness: Witness, tolerance: float) -> tuple[float, str]:
    if reference.runs != compacted.runs:
        raise VerificationError("The compacted model takes another path through its code than the masked one.")
    want, have = ([list(t.shape) for t in each.outputs] for each in (reference, compacted))
    if want != have:
        raise VerificationError(
            "The compacted model takes another path through its code than the masked one, or leaves other results "
            f"behind (what it returns, and tensors and floats in attributes): of the shapes {have} instead of {want}."
        )
    worst, where = 0.0, "the output"
    for place, (old, new) in enumerate(zip(reference.outputs, compacted.outputs, strict=True)):
        if old.dtype is torch.bool:
            old, new = old.double(), new.double()
        old, new = without_infinities(old, new)
        scale = float(old.abs().max()) if old.numel() else 0.0
        if not math.isfinite(scale):
            raise _not_finite(f"output {place} " if place else "output ")
        error = _relative(float((old.double() - new.double()).abs().max()) if old.numel() else 0.0, scale)
        if error > worst:
            worst, where = error, "the output"
            if not old.ndim and not old.is_floating_point():
                where = f"the integer {old} in the result, which counts channels: it would be {new}"
    for position, count in reference.counts.items():
        if compacted.counts.get(position) != count:
            raise VerificationError(
                f"The compacted model does not reach {witness.nodes[position]!r} as the masked one does."
            )
    if reference.table.numel():
        error, position = _inner_error(reference, compacted, witness, tolerance)
        if error > worst:
            worst, where = error, repr(witness.nodes[position])
    return worst, where


def _not_finite(place: str) -> VerificationError:
    return VerificationError(
        f"The masked model's own {place} is not finite on random inputs; nothing to compare. Look for inf and NaN "
        "among its parameters and buffers, or for divisions by zero."
    )


def _relative(difference: float, scale: float) -> float:
    if not math.isfinite(difference):
        return math.inf
    return difference / scale if scale > 0 else (0.0 if difference == 0 else math.inf)


def _inner_error(
    reference: Observation, compacted: Observation, witness: Witness, tolerance: float
) -> tuple[float, int]:
    """Return the largest relative error of a channel, and the position of its node.

    Channels so small that rounding hides them are measured against the node's largest channel.
    """
    resolution = torch.finfo(torch.float64).eps if tolerance < 1e-6 else torch.finfo(torch.float32).eps
    counts = reference.counts
    broken = (~reference.norms.isfinite()).nonzero()[:, 0]
    nodes = torch.arange(len(counts)).repeat_interleave(torch.tensor(list(counts.values())))
    if len(broken):
        raise _not_finite(repr(witness.nodes[list(counts)[int(nodes[broken[0]])]]))
    peaks = reference.norms.new_zeros(len(counts)).scatter_reduce(0, nodes, reference.norms, "amax")
    floors = (100 * resolution / tolerance * peaks).clamp(min=1e-300)[nodes]
    errors = (reference.table - compacted.at(counts)).abs().amax(0) / reference.norms.maximum(floors)
    errors = errors.where(errors.isfinite(), math.inf)
    worst = int(errors.argmax())
    return float(errors[worst]), list(counts)[int(nodes[worst])]

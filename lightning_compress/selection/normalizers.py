"""Normalisation of scores, to compare groups of different sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import pos

import torch
from torch import Tensor

from engine import Group
from lightning_compress.selection.evidence import Evidence

__all__ = ["NORMALIZERS", "Normalizer", "among_kept", "lamp_scores"]

Normalizer = Callable[[Tensor], Tensor]


def among_kept(values: Tensor, group: Group, evidence: Evidence, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function to the values of unmasked units; those of masked units become 0."""
    kept = getattr(evidence, "kept", {}).get(group.name)
    if kept is None or bool(kept.all()):
        return function(values)
    scores = values.new_zeros(group.size)
    scores[kept.to(values.device)] = function(values[kept.to(values.device)])
    return scores


def lamp_scores(scores: Tensor) -> Tensor:
    """Divide each score by the sum of all scores that are not lower."""
    ranked, order = scores.sort(stable=True)
    sums = ranked.flip(0).cumsum(0).flip(0)
    shares = torch.empty_like(scores)
    shares[order] = ranked / sums.clamp(min=torch.finfo(sums.dtype).tiny)
    return shares


def _scaled(scores: Tensor, size: Callable[[Tensor], Tensor]) -> Tensor:
    return scores / size(scores.abs()).clamp(min=torch.finfo(scores.dtype).tiny)


def _standard(scores: Tensor) -> Tensor:
    return (scores - scores.mean()) / scores.std(correction=0).clamp(min=torch.finfo(scores.dtype).tiny)


def _ranks(scores: Tensor) -> Tensor:
    return scores.argsort(stable=True).argsort().to(scores.dtype) / len(scores)


# No closures, because strategies that spawn processes pickle them.
NORMALIZERS: dict[str, Normalizer] = {
    "lamp": lamp_scores,
    "max": partial(_scaled, size=Tensor.max),
    "mean": partial(_scaled, size=Tensor.mean),
    "none": pos,
    "norm": partial(_scaled, size=Tensor.norm),
    "rank": _ranks,
    "standard": _standard,
    "sum": partial(_scaled, size=Tensor.sum),
}

"""Random numbers drawn for each entry of a tensor: ``torch.empty_like(x).uniform_()``, ``torch.randn_like(x)``.

A narrower tensor draws fewer numbers, so all later draws differ. While training, dropout does the same, and channels
propagate; in eval mode the tensor keeps its size, so that a seed gives the same outputs.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops.pointwise import broadcast_labels
from engine.ops.shape import through
from engine.program.graph import Node
from engine.rule import Rule, Sample

__all__ = ["RULES"]

# Their numbers do not depend on what was in the tensor.
_FILLS = "cauchy exponential geometric log_normal rand_like randint_like randn_like random uniform".split()

# Their parameters may be tensors: probabilities, means, spreads.
_SAMPLES = "bernoulli binomial normal poisson".split()


def _labels(node: Node, labels: Labels) -> None:
    """Propagate while training; freeze in eval mode."""
    if node.in_train_mode:
        broadcast_labels(node, labels)
        return
    for value in node.inputs:
        labels.freeze(value, f"{node!r} draws a random number for each entry")


def _unused(node: Node, use: Use) -> None:
    """The tensor only lends its shape; parameters that are tensors are used."""
    for value in node.inputs[1:]:
        use.add_all(value)


class _Jitter(nn.Module):
    """Multiplies by random numbers while training, as routers of experts do."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * torch.empty_like(x).uniform_(0.9, 1.1)
        return x


def _samples() -> Iterable[Sample]:
    yield through("jitter while training", _Jitter())
    yield through("noise of a fixed size", lambda x: x + 0 * torch.randn_like(x))


RULES = [
    Rule(tuple(_FILLS), _labels, use=_unused, samples=_samples),
    Rule(tuple(_SAMPLES), _labels),
]

"""Packing and unpacking of sequences of several lengths."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.program.graph import Node
from engine.rule import Rule, Sample

__all__ = ["RULES"]


def _packed_labels(node: Node, labels: Labels) -> None:
    """Freeze steps and samples, which are merged into one dimension or split again; propagate features."""
    source, target = node.inputs[0], node.output
    for layer in labels.without(source, range(source.ndim - 1), f"{node!r} runs over it"):
        labels.add(target, layer.view([1] * (target.ndim - 1) + [-1]))


def _packed_constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    """Constants propagate, unless padding puts other numbers behind the end of a sequence."""
    row = constants.along(node.inputs[0], node.inputs[0].ndim - 1)
    row = torch.where(row == node.args.get("padding_value", row), row, math.nan)
    return [row.view([1] * (node.output.ndim - 1) + [-1]), torch.full([1], math.nan)]


def _packed_use(node: Node, use: Use) -> None:
    source = node.inputs[0]
    use.add(source, use.along(node.output, node.output.ndim - 1).view([1] * (source.ndim - 1) + [-1]))
    for value in node.inputs[1:]:
        use.add_all(value)


class _Packed(nn.Module):
    """Sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(5, 6), nn.GRU(6, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.arange(len(x), 0, -1).clamp(max=x.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(torch.tanh(self.first(x)), lengths, batch_first=True)
        output: Tensor = self.last(nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0])
        return output


def _packed_samples() -> Iterable[Sample]:
    yield Sample(_Packed, (3, 4, 5), "packed sequences")


RULES = [
    Rule(
        ("_pack_padded_sequence", "_pad_packed_sequence"),
        _packed_labels,
        _packed_constants,
        _packed_use,
        samples=_packed_samples,
    ),
]

"""What compares an output with targets, and gradients that code takes: all channels count, each as what it is."""

from __future__ import annotations

from engine.analysis.labels import Labels
from engine.program.graph import Node
from engine.recording.gradients import GRADIENT
from engine.rule import Rule

__all__ = ["RULES"]

_LOSSES = """
    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss ctc_loss
    gaussian_nll_loss hinge_embedding_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss nll_loss
    nll_loss2d nll_loss_nd poisson_nll_loss soft_margin_loss triplet_margin_loss
""".split()


def _compared(node: Node, labels: Labels) -> None:
    for value in (*node.inputs, *node.outputs):
        labels.freeze(value, f"{node!r} compares it with targets")


def _differentiated(node: Node, labels: Labels) -> None:
    place = f" ({node.location})" if node.location else ""
    for value in (*node.inputs, *node.outputs):
        labels.freeze(value, f"its gradient is read by the code{place}")


RULES = [Rule(tuple(_LOSSES), _compared), Rule((GRADIENT,), _differentiated)]

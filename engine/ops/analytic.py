"""Ops that compute analytic functions of their inputs, or only move entries.

A network of such ops is an analytic function of its input. If two such functions differ anywhere, they differ almost
everywhere: one random sample distinguishes them as well as many do. A ReLU, a maximum, a comparison or a
choice has pieces, some of which few samples reach.
"""

from __future__ import annotations

from engine.program.graph import Graph

__all__ = ["is_analytic"]

_MOVES = frozenset(
    """alias cat chunk clone contiguous detach expand expand_as flatten flip movedim narrow permute pixel_shuffle
    pixel_unshuffle reshape roll select slice split split_with_sizes squeeze stack swapaxes t transpose unbind unflatten
    unsqueeze view""".split()
)
_COMPUTES = frozenset(
    """adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d add addmm avg_pool1d avg_pool2d avg_pool3d baddbmm
    batch_norm bmm conv1d conv2d conv3d cos einsum erf exp gelu group_norm layer_norm linear log_softmax matmul mean mm
    mul neg scaled_dot_product_attention sigmoid silu sin softmax square sub sum tanh""".split()
)


def is_analytic(graph: Graph) -> bool:
    """Whether a recorded network is an analytic function of its input, along one path through its code.

    Args:
        graph: the recorded network.
    """
    if graph.decided or graph.decisions or graph.written or graph.opaque:
        return False
    return all(node.op in _MOVES or node.op in _COMPUTES for node in graph.nodes if not node.in_train_mode)

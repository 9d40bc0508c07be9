"""Choice of the layers worth narrowing below the width of their consumers, by spreading their output."""

from __future__ import annotations

import math

from engine.compaction.build import Analysis
from engine.program.contraction import Contraction
from engine.program.graph import Node, Value
from engine.removal.keep import Kept

__all__ = ["PAYS", "candidates"]

PAYS = 64.0
"""Minimum number of multiply-accumulates saved per entry of the spread output.

Spreading reads and writes each entry about twice. In the time of one memory access, a CPU core performs about ten
multiply-accumulates, and a GPU about forty.
"""


def candidates(analysis: Analysis, pays: float | None = None) -> dict[str, int]:
    """Return the layers worth spreading, which are those with constant outputs that consumers keep.

    Args:
        analysis: analysis of the model in its current form.
        pays: multiply-accumulates to save per moved entry; `PAYS` by default.

    Returns:
        Names of layers, with the channel dimension of their output.
    """
    structure, output_dims = analysis.structure, {}
    pays = PAYS if pays is None else pays
    calls: dict[str, int] = {}
    for node in structure.graph.nodes:
        calls[node.module] = calls.get(node.module, 0) + (node.path == "eval")
    users = structure.graph.users()
    for node, c in structure.contractions():
        last = _last(analysis, node, c, users)
        alone = calls.get(last.module) == 1 and calls.get(node.module) == 1 and c.weight.stored
        if alone and node.path == "eval" and _saved(analysis.kept, node, c, last.output) > pays:
            output_dims[last.module] = c.output_dim
    return output_dims


def _last(analysis: Analysis, node: Node, c: Contraction, users: dict[int, list[Node]]) -> Node:
    """Return the norm that is a contraction's only consumer, or the contraction's own node."""
    readers = users.get(c.output.index, [])
    absorbs = analysis.structure.rules.of(readers[0]).rare.absorbs if len(readers) == 1 else None
    outputs = {value.index for value in analysis.structure.graph.outputs}
    return node if absorbs is None or c.output.index in outputs else readers[0]


def _saved(kept: Kept, node: Node, c: Contraction, value: Value) -> float:
    """Return the multiply-accumulates saved per output entry if constant channels are not computed."""
    structure, constants = kept.shrunk.structure, kept.constants
    slots = structure.along(value, c.output_dim)
    if slots is None or c.groups > 1 or constants.has_profile(value):
        return 0.0
    is_kept = kept.shrunk.keep[slots]
    constant = ~constants.along(value, c.output_dim).isnan()
    part = float((is_kept & constant).sum()) / max(int(is_kept.sum()), 1)
    macs = structure.rules.of(node).macs(node, kept.shrunk.shape)
    return part * macs / math.prod(kept.shrunk.shape(value))

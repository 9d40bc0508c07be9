"""Which layers it pays to make smaller than their readers ask for, by spreading their output out again."""

from __future__ import annotations

import math

from engine.compaction.build import Analysis
from engine.program.contraction import Contraction
from engine.program.graph import Node, Value
from engine.removal.keep import Kept

__all__ = ["PAYS", "candidates"]

PAYS = 64.0
"""Multiply-accumulates that have to be saved per entry of the output that is spread.

Each entry is read and written about twice for it. A CPU core does some ten multiply-accumulates in the time in which it
moves a number to memory or from there, a GPU some forty.
"""


def candidates(analysis: Analysis, pays: float | None = None) -> dict[str, int]:
    """Return the layers whose output is partly a constant that others keep, and worth being spread out.

    Args:
        analysis: of the model as it is.
        pays: multiply-accumulates to be saved per entry that is moved; `PAYS` by default.

    Returns:
        Names of layers, with the dimension of the channels in their output.
    """
    structure, found = analysis.structure, {}
    pays = PAYS if pays is None else pays
    calls: dict[str, int] = {}
    for node in structure.graph.nodes:
        calls[node.module] = calls.get(node.module, 0) + (node.path == "eval")
    users = structure.graph.users()
    for node, c in structure.contractions():
        last = _last(analysis, node, c, users)
        alone = calls.get(last.module) == 1 and calls.get(node.module) == 1 and c.weight.stored
        if alone and node.path == "eval" and _saved(analysis.kept, node, c, last.output) > pays:
            found[last.module] = c.output_dim
    return found


def _last(analysis: Analysis, node: Node, c: Contraction, users: dict[int, list[Node]]) -> Node:
    """Return the norm behind a contraction that alone reads it, or the contraction itself."""
    readers = users.get(c.output.index, [])
    absorbs = analysis.structure.rules.rule(readers[0].op).absorbs if len(readers) == 1 else None
    outputs = {value.index for value in analysis.structure.graph.outputs}
    return node if absorbs is None or c.output.index in outputs else readers[0]


def _saved(kept: Kept, node: Node, c: Contraction, value: Value) -> float:
    """Return multiply-accumulates saved per entry of the output, if what is constant in it need not be computed."""
    structure, constants = kept.shrunk.structure, kept.constants
    slots = structure.along(value, c.output_dim)
    if slots is None or c.groups > 1 or constants.has_profile(value):
        return 0.0
    stays = kept.shrunk.keep[slots]
    constant = ~constants.along(value, c.output_dim).isnan()
    part = float((stays & constant).sum()) / max(int(stays.sum()), 1)
    macs = structure.rules.rule(node.op).macs(node, kept.shrunk.shape)
    return part * macs / math.prod(kept.shrunk.shape(value))

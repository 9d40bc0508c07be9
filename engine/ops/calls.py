"""Effects of torch's functions and methods, by the names under which code calls them, for code that did not run."""

from __future__ import annotations

import ast

from engine.flow.effects import Functions
from engine.ops import contraction, norm, products, slicing, span, spatial
from engine.ops.filled import OF_ONE_NUMBER
from engine.program.graph import Node, Value

__all__ = ["FUNCTIONS"]

_CONTRACTING = {op: rule for file in (contraction, products) for rule in file.RULES for op in rule.ops}


def _contracted(node: Node) -> tuple[Value, int] | None:
    """Return the value that an op contracts with a weight, and the dimension; None if it does not contract."""
    rule = _CONTRACTING.get(node.op)
    layer = None if rule is None or rule.contraction is None else rule.contraction(node)
    return None if layer is None else (layer.input, layer.input_dim)


_KEEPS = "to float half double bfloat16 type type_as contiguous clone detach cpu cuda requires_grad_".split()
_KEEPS_ZERO = """
    dropout dropout_ feature_dropout relu relu_ abs neg sqrt tanh sin square sign mul mul_ div div_ true_divide
    nan_to_num checkpoint gelu silu
""".split()
_CHANGES = (
    "clamp clamp_ add add_ sub sub_ sigmoid exp log pow minimum maximum softplus masked_fill masked_fill_".split()
)
_NORMS = [op for file in (norm, span) for rule in file.RULES if rule.normalises for op in rule.ops]

_RESIZING = frozenset("center_crop interpolate resize upsample upsample_bilinear upsample_nearest".split())
_MOVING = [op for file in (spatial, slicing) for rule in file.RULES for op in rule.ops]


def _moves(call: ast.Call) -> bool:
    """Whether a call resizes a picture, or pads at most its last two dimensions with zeros, or with its own numbers.

    Example:
        >>> texts = "F.interpolate(x, size)", "F.pad(x, [0, a, 0, b])", "F.pad(x, (0, 0, a))", "TF.pad(x, [1, 1], 5)"
        >>> [_moves(ast.parse(text, mode="eval").body) for text in texts]
        [True, True, False, False]
    """
    name = getattr(call.func, "attr", "")
    if name in _RESIZING or name != "pad":
        return name in _RESIZING
    rest, keywords = call.args[1:], {k.arg: k.value for k in call.keywords}
    amounts = rest[0] if rest else keywords.get("pad")
    is_short = isinstance(amounts, (ast.List, ast.Tuple)) and len(amounts.elts) in (2, 4)
    plain = is_short and not any(isinstance(n, ast.Starred) for n in amounts.elts)  # type: ignore[union-attr]
    modes = [isinstance(item, ast.Constant) and isinstance(item.value, str) for item in rest[1:]]  # or fills
    return plain and modes in ([], [True]) and keywords.keys() <= {"pad", "mode"}


FUNCTIONS = Functions(
    keeps=frozenset(_KEEPS),
    keeps_zero=frozenset(_KEEPS_ZERO),
    changes=frozenset(_CHANGES),
    sizing=frozenset("expand reshape split unflatten view".split()),
    selecting=frozenset("gather index_select narrow select take_along_dim".split()),
    spreading=frozenset("gather take_along_dim".split()),
    filling=OF_ONE_NUMBER,
    contracted=_contracted,
    copying=frozenset({"clone", "contiguous"}),
    aligned=frozenset([*_KEEPS, *_KEEPS_ZERO, *_CHANGES, *_NORMS]),
    moving=frozenset(_MOVING),
    moves=_moves,
    broadcasting=frozenset({"where"}),
    reducing=frozenset("all amax amin any item max mean min norm numel std sum var".split()),
    neutral_flags=frozenset({"enable_gqa", "is_causal"}),
)
"""`chunk`, `repeat` and `tensor_split` take numbers of parts or copies, not sizes."""

"""What functions and methods of torch do, by the names that code calls them by, for code that did not run."""

from __future__ import annotations

from engine.ops.filled import OF_ONE_NUMBER
from engine.source.entrywise import Functions

__all__ = ["FUNCTIONS"]

FUNCTIONS = Functions(
    keeps=frozenset(
        "to float half double bfloat16 type type_as contiguous clone detach cpu cuda requires_grad_".split()
    ),
    keeps_zero=frozenset(
        "dropout dropout_ feature_dropout relu relu_ abs neg sqrt tanh sin square sign mul mul_ div div_ true_divide "
        "nan_to_num checkpoint gelu silu".split()
    ),
    changes=frozenset(
        "clamp clamp_ add add_ sub sub_ sigmoid exp log pow minimum maximum softplus masked_fill masked_fill_".split()
    ),
    sizing=frozenset("expand reshape split unflatten view".split()),
    selecting=frozenset("gather index_select narrow select take_along_dim".split()),
    filling=OF_ONE_NUMBER,
)
"""`chunk`, `repeat` and `tensor_split` take numbers of parts or copies, not sizes."""

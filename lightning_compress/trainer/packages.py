"""Base classes that work with both `pytorch_lightning` and `lightning.pytorch`, whichever are installed.

The two packages contain separate copies of the same classes. A subclass of both copies is accepted by both Trainers.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

TREES = tuple(
    (tree, fabric)
    for top, tree, fabric in (
        ("pytorch_lightning", "pytorch_lightning", "lightning_fabric"),
        ("lightning", "lightning.pytorch", "lightning.fabric"),
    )
    if importlib.util.find_spec(top) is not None
)


def classes(module: str, name: str) -> tuple[type, ...]:
    """Return the class ``name`` of each installed package.

    Args:
        module: module path that starts with ``tree`` or ``fabric``, such as ``"tree.callbacks"`` or
            ``"fabric.utilities.exceptions"``.
        name: name of the class in that module.

    Returns:
        One class per package, without duplicates.

    Example:
        >>> [c.__name__ for c in classes("tree.callbacks", "Callback")][0]
        'Callback'
    """
    part, _, rest = module.partition(".")
    roots = [tree if part == "tree" else fabric for tree, fabric in TREES]
    modules = [importlib.import_module(f"{root}.{rest}" if rest else root) for root in roots]
    return tuple(dict.fromkeys(getattr(module, name) for module in modules))


def joined(name: str, bases: tuple[type, ...]) -> Any:
    """Create a class that inherits from all ``bases``.

    Example:
        >>> joined("Both", (ValueError, KeyError)).__mro__[1:3] == (ValueError, KeyError)
        True
    """
    return type(name, bases, {"__module__": __name__})


if TYPE_CHECKING:
    from lightning_fabric.utilities.exceptions import MisconfigurationException
    from pytorch_lightning import Callback
    from pytorch_lightning.utilities.seed import isolate_rng
else:
    Callback = joined("Callback", classes("tree.callbacks", "Callback"))
    MisconfigurationException = joined(
        "MisconfigurationException", classes("fabric.utilities.exceptions", "MisconfigurationException")
    )
    isolate_rng = classes("tree.utilities.seed", "isolate_rng")[0]

LIGHTNING_MODULES = classes("tree", "LightningModule")
DATA_MODULES = classes("tree", "LightningDataModule")
COMBINED_LOADERS: tuple[Any, ...] = classes("tree.utilities.combined_loader", "CombinedLoader")
LOOPS = classes("tree.loops.loop", "_Loop")
DUMMY_LOGGER: Any = classes("tree.loggers.logger", "DummyLogger")[0]
takes_argument: Any = classes("tree.utilities.signature_utils", "is_param_in_hook_signature")[0]

__all__ = [
    "COMBINED_LOADERS",
    "DATA_MODULES",
    "DUMMY_LOGGER",
    "LIGHTNING_MODULES",
    "LOOPS",
    "Callback",
    "MisconfigurationException",
    "classes",
    "isolate_rng",
    "joined",
    "method_of",
    "overrides",
    "takes_argument",
]


def method_of(owner: Any, name: str) -> Any:
    """Return the method that an object itself, or else its class, has under a name; None if neither has one.

    Args:
        owner: a LightningModule, a callback or a data module.
        name: name of the method; a module's ``__getattr__`` is not called.

    Example:
        >>> from pytorch_lightning import Callback
        >>> method_of(Callback(), "on_fit_end") is Callback.on_fit_end, method_of(Callback(), "on_no_end")
        (True, None)
    """
    return vars(owner).get(name) or getattr(type(owner), name, None)


def overrides(pl_module: Any, name: str) -> bool:
    """Whether a LightningModule overrides the method of this name, in its class or as an attribute.

    Example:
        >>> from pytorch_lightning import LightningModule
        >>> overrides(LightningModule(), "training_step")
        False
    """
    own = method_of(pl_module, name)
    return own is not None and all(own is not getattr(base, name, None) for base in LIGHTNING_MODULES)

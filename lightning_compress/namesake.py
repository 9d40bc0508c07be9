"""Detection of a user's file named `engine`, before anything is imported from it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

__all__ = ["check_engine"]


def check_engine() -> None:
    """Raise an error if `engine` is not the package that was installed along; nothing is imported for this.

    Raises:
        ImportError: naming the file, and what to do.
    """
    loaded = sys.modules.get("engine")
    spec = importlib.util.find_spec("engine") if loaded is None else loaded.__spec__
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    if any(Path(folder, "compaction", "plan.py").is_file() for folder in folders):
        return
    file = getattr(loaded, "__file__", None) if spec is None else spec.origin or folders[:1]
    where = "there is none" if file is None and loaded is None else f"Python finds {file or 'another module'} instead"
    raise ImportError(
        f"lightning_compress needs the package `engine` that is installed along, and {where}: rename your file, "
        "or install lightning-compress again."
    )


check_engine()

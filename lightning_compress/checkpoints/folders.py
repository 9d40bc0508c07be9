"""Checkpoint folders: weights sharded by `torch.distributed.checkpoint`, and everything else in ``meta.pt``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.files import read_archive, read_folder_index

__all__ = ["read_folder"]

# Names of the weights, as `FSDPStrategy` and `ModelParallelStrategy` store them.
_WEIGHTS = ("model", "state_dict")


def read_folder(folder: Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a folder that Lightning's `FSDPStrategy` or `ModelParallelStrategy` wrote, with whole weights.

    Args:
        folder: the folder.
        map_location: as in ``torch.load``.

    Raises:
        CheckpointError: if it is not such a folder, or damaged.
    """
    if not (folder / "meta.pt").is_file():
        raise CheckpointError(f"{folder} is not a folder of a sharded checkpoint: it has no `.metadata` and `meta.pt`.")
    index = read_folder_index(folder)
    key = next((key for key in _WEIGHTS if key in index.keys()), None)
    weights = None if key is None else index.state(key, map_location)
    if not isinstance(weights, dict):
        raise CheckpointError(
            f"{folder} holds no weights of a LightningModule under `model` or `state_dict`, but "
            f"{', '.join(repr(key)[:100] for key in index.keys()[:4])}. Save it with a Trainer."
        )
    return {**read_archive(folder / "meta.pt", map_location), "state_dict": weights}

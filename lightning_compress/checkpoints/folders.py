"""Checkpoints that are folders: weights sharded by `torch.distributed.checkpoint`, and the rest in ``meta.pt``."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from engine.errors import CheckpointError
from engine.files import read_archive

__all__ = ["read_folder"]


def read_folder(folder: Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a folder that Lightning's `FSDPStrategy` or `ModelParallelStrategy` wrote, with whole weights.

    Args:
        folder: the folder; its index is a pickle: only from people whom you trust.
        map_location: as in ``torch.load``.

    Raises:
        CheckpointError: where it is not such a folder.
    """
    if not (folder / ".metadata").is_file() or not (folder / "meta.pt").is_file():
        raise CheckpointError(f"{folder} is not a folder of a sharded checkpoint: it has no `.metadata` and `meta.pt`.")
    with tempfile.TemporaryDirectory() as whole:
        dcp_to_torch_save(folder, Path(whole, "whole.pt"))
        content = torch.load(Path(whole, "whole.pt"), map_location=map_location, weights_only=True)
    # `FSDPStrategy` keeps the weights under the one name, `ModelParallelStrategy` under the other.
    weights = next((content[key] for key in ("model", "state_dict") if isinstance(content.get(key), Mapping)), None)
    if weights is None:
        raise CheckpointError(
            f"{folder} holds no weights of a Lightning module under `model` or `state_dict`, but: "
            f"{', '.join(map(repr, list(content)[:4]))}. Save it with a Trainer."
        )
    return {**read_archive(folder / "meta.pt", map_location), "state_dict": weights}

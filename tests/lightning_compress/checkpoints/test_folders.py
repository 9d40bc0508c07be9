"""Folders of shards; real ones are read in test_offline.py and test_sharded.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import CheckpointError
from lightning_compress.checkpoints.folders import read_folder


def test_other_folders_are_refused(tmp_path: Path) -> None:
    """By what is missing."""
    with pytest.raises(CheckpointError, match="no `.metadata` and `meta.pt`"):
        read_folder(tmp_path)

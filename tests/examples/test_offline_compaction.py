"""Compaction of a file, on a few digits."""

from __future__ import annotations

from pathlib import Path

import offline_compaction

from tests.examples import small


def test_a_masked_file_becomes_a_small_one(tmp_path: Path) -> None:
    """Half of the channels gone, the same images right."""
    found = small.run(offline_compaction, tmp_path)
    assert found["parameters"][1] < 0.35 * found["parameters"][0]
    assert found["bytes on disk"][1] < 0.2 * found["bytes on disk"][0]
    assert found["right test images"][0] == found["right test images"][1] and found["difference"] <= 1e-5

"""ModelPruning, on a few digits."""

from __future__ import annotations

from pathlib import Path

import model_pruning

from tests.examples import small


def test_masks_of_model_pruning_are_repaired_and_compacted(tmp_path: Path) -> None:
    """Half of each layer's channels leaves about a quarter; exact; loads again."""
    found = small.run(model_pruning, tmp_path)
    assert found["parameters"][1] < 0.3 * found["parameters"][0] and found["MACs"][1] < 0.3 * found["MACs"][0]
    assert found["error of the compaction"] <= 1e-9 and found["error of the reloaded"] == 0

"""Compaction in the middle of a fit, on a few digits."""

from __future__ import annotations

from pathlib import Path

import compact_while_training

from tests.examples import small


def test_the_network_gets_smaller_while_it_trains(tmp_path: Path) -> None:
    """Epoch by epoch, down to the size of the checkpoint."""
    found = small.run(compact_while_training, tmp_path, epochs=4)
    sizes = found["parameters by epoch"]
    assert len(sizes) == 4 and sizes == tuple(sorted(sizes, reverse=True))
    assert sizes[0] == found["parameters"][0] and sizes[-1] == found["parameters"][1] < 0.3 * sizes[0]
    assert found["error of the last compaction"] <= 1e-4 and found["error of the reloaded"] == 0

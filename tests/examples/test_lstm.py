"""The recurrent network, on a few digits."""

from __future__ import annotations

from pathlib import Path

import lstm

from tests.examples import small


def test_hidden_units_go(tmp_path: Path) -> None:
    """Half of them, in both layers, exactly; the checkpoint loads again."""
    found = small.run(lstm, tmp_path)
    assert found["hidden units"] == (64, 32)
    assert found["MACs"][1] < 0.4 * found["MACs"][0] and found["parameters"][1] < 0.4 * found["parameters"][0]
    assert found["error of the compaction"] <= 1e-9 and found["error of the reloaded"] == 0

"""The LSTM, on a few digits."""

from __future__ import annotations

from pathlib import Path

import lstm_sequences

from tests.examples import small


def test_hidden_units_go(tmp_path: Path) -> None:
    """Half of them, in both layers; exact; loads again."""
    found = small.run(lstm_sequences, tmp_path)
    assert found["hidden units"] == (48, 24)
    assert found["MACs"][1] < 0.4 * found["MACs"][0] and found["parameters"][1] < 0.4 * found["parameters"][0]
    assert found["error of the compaction"] <= 1e-9 and found["error of the reloaded"] == 0

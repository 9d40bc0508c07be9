"""The vision transformer, on a few digits."""

from __future__ import annotations

from pathlib import Path

import vit

from tests.examples import small


def test_heads_and_neurons_go_and_the_stream_stays(tmp_path: Path) -> None:
    """Half of the heads, 60 % of the neurons, exactly; the checkpoint loads again."""
    found = small.run(vit, tmp_path)
    assert found["heads of a block"] == (4, 2)
    assert found["neurons of a block"] == (128, 52)
    assert found["width of the token stream"] == (64, 64)
    assert found["MACs"][1] < 0.5 * found["MACs"][0]
    assert found["error of the compaction"] <= 1e-9 and found["error of the reloaded"] == 0

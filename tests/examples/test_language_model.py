"""The small Llama, on a little text."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

import language_model

from tests.examples import small


def test_half_goes_and_transformers_loads_the_rest(tmp_path: Path) -> None:
    """Heads, neurons and stream; a fresh process gets the same perplexity."""
    found = small.run(language_model, tmp_path, limit=64)
    assert "hidden_size=48" in found["configuration"] and "num_attention_heads=4" in found["configuration"]
    assert found["parameters"][1] < 0.3 * found["parameters"][0] and found["error of what was saved"] <= 1e-6
    assert found["perplexity of what was loaded"] == pytest.approx(found["perplexity"][1], rel=1e-4)

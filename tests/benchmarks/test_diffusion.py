"""Classes of diffusers, compacted and saved."""

from __future__ import annotations

import pytest

pytest.importorskip("diffusers")

from benchmarks.diffusion import CONFIGS, built, check, inputs, line


@pytest.mark.slow
def test_small_classes_run() -> None:
    """On the inputs of the survey."""
    for name in CONFIGS:
        built(name)(**inputs(name))


@pytest.mark.slow
def test_a_class_comes_back_or_has_a_reason() -> None:
    """The compacted network is verified in any case."""
    row = check("FluxTransformer2DModel")
    assert row["certificate"].verified and row["certificate"].exact
    assert "has shape" in row["reason"] and "| yes |" in line(row)

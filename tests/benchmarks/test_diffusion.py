"""Classes of diffusers, compacted and saved."""

from __future__ import annotations

import pytest

pytest.importorskip("diffusers")

from benchmarks.diffusion import CONFIGS, built, check, inputs, line, reasons


@pytest.mark.slow
def test_small_classes_run() -> None:
    """On the inputs of the survey."""
    for name in CONFIGS:
        built(name)(**inputs(name))


@pytest.mark.slow
def test_a_class_comes_back_or_has_a_reason() -> None:
    """The compacted network is verified in any case; what cannot be saved is named."""
    row = check("FluxTransformer2DModel")
    assert row["certificate"].verified and row["certificate"].exact and "| yes |" in line(row)
    for saved in row["saved"].values():
        assert saved["obstacles"] or saved["config"]
        assert saved.get("error", 0) <= 1e-6
    assert reasons(row).count("no field gives") == sum("no field" in o.reason for o in row["saved"][True]["obstacles"])

"""Every benchmark can be imported, wherever it is started from."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

SCRIPTS = sorted(path.stem for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py"))
EXTRA = {"torch_pruning", "timm", "transformers", "diffusers"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_imports(name: str) -> None:
    """A name that moved elsewhere is noticed here, and not by whoever runs the benchmark next."""
    try:
        importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        pytest.skip(f"{error.name} is not installed")


def test_the_masks_of_a_network_in_their_smallest_form() -> None:
    """One small network, masked by groups, goes through the benchmark of masks as all others do."""
    masks = importlib.import_module("benchmarks.breadth_masks")
    row = masks.check("squeezenet1_0", "groups")
    assert row["error"] <= masks.TOLERANCE

"""Amounts by measurement, on a few digits."""

from __future__ import annotations

from pathlib import Path

import pytest
import sensitivity_driven
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.examples import small


def test_what_layers_bear_is_measured_and_pruned(tmp_path: Path) -> None:
    """Each layer has a measured amount, coupled ones the same; the heat map is in TensorBoard."""
    pytest.importorskip("matplotlib")
    found = small.run(sensitivity_driven, tmp_path, limit=320, epochs=3)
    amounts = {name: value for name, value in found.items() if name.startswith("bears in ")}
    assert len(amounts) == 11 and set(amounts.values()) <= {0.0, 0.25, 0.5, 0.75} and any(amounts.values())
    assert amounts["bears in net.stage2.0.expand.0"] == amounts["bears in net.stage2.0.depthwise.0"]
    assert found["parameters"][1] < found["parameters"][0]
    images = [EventAccumulator(str(path)).Reload().Tags()["images"] for path in tmp_path.rglob("version_0")]
    assert images == [["sensitivity/heatmap", "sensitivity/curves"]]

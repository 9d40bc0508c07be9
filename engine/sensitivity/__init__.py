"""Sensitivity analysis: which layers tolerate pruning."""

from engine.sensitivity.activity import ActivityMeter
from engine.sensitivity.importance import cut, fpgm, l1, l2, masked, unit_rows, unit_sums

__all__ = [
    "ActivityMeter",
    "cut",
    "fpgm",
    "l1",
    "l2",
    "masked",
    "unit_rows",
    "unit_sums",
]

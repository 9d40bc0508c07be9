"""Compensation of masked channels by a least-squares fit of their consumers."""

from engine.compensation.batches import as_arguments, samples_in
from engine.compensation.report import CompensationReport

__all__ = ["CompensationReport", "as_arguments", "samples_in"]

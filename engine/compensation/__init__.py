"""Least squares into the readers of masked channels."""

from engine.compensation.batches import as_arguments
from engine.compensation.report import CompensationReport

__all__ = ["CompensationReport", "as_arguments"]

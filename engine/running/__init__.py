"""Runs of a model without side effects, on tensors without data."""

from engine.running.evaluation import evaluating
from engine.running.inputs import NEEDS_DATA, call_model, resolve_inputs
from engine.running.process import seeded

__all__ = ["NEEDS_DATA", "call_model", "evaluating", "resolve_inputs", "seeded"]

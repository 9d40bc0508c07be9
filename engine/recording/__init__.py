"""Recording of a model: runs without side effects, on tensors without data."""

from engine.recording.evaluation import evaluating
from engine.recording.inputs import NEEDS_DATA, call_model, resolve_inputs
from engine.recording.process import seeded

__all__ = ["NEEDS_DATA", "call_model", "evaluating", "resolve_inputs", "seeded"]

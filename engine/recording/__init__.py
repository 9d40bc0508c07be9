"""Running a model so that it leaves no trace, on tensors without data, and writing down what it does."""

from engine.recording.evaluation import evaluating
from engine.recording.inputs import call_model, resolve_inputs
from engine.recording.process import seeded

__all__ = ["call_model", "evaluating", "resolve_inputs", "seeded"]

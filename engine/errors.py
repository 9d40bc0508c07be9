"""Errors raised by the engine.

::

    EngineError                   base of everything raised on purpose
    ├── InputError                a bad argument (also a ValueError)
    │   ├── MaskError             masks that do not fit the model
    │   └── CheckpointError       a checkpoint that cannot be used
    ├── TraceError                the model could not be recorded
    │   └── StaleGraphError       a graph of a model that has changed since
    ├── RuleError                 two rules for one op, or a rule that contradicts itself
    ├── PlanError                 a plan that does not fit the model it is applied to
    └── VerificationError         the compacted model does not compute what the masked one does

Every message names the culprit (layer, op, shape, argument) and says what to do.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "EngineError",
    "InputError",
    "MaskError",
    "PlanError",
    "RuleError",
    "StaleGraphError",
    "TraceError",
    "VerificationError",
]


class EngineError(Exception):
    """Base of all errors that the engine raises on purpose."""


class InputError(EngineError, ValueError):
    """An argument that cannot be used."""


class MaskError(InputError):
    """Masks for parameters that the model does not have, or that are not 0/1 tensors of the right shape."""


class CheckpointError(InputError):
    """A checkpoint that is damaged, belongs to another model, or has a newer format."""


class TraceError(EngineError):
    """The forward pass could not be recorded."""


class StaleGraphError(TraceError):
    """The graph was recorded from a model whose parameters have other shapes now."""


class RuleError(EngineError):
    """Two rules claim the same op, or a rule returned an impossible result."""


class PlanError(EngineError):
    """A plan that does not fit the model it is applied to."""


class VerificationError(EngineError):
    """The compacted model differs from the masked one; the model was left unchanged."""

"""The recorded program as plain data, on which all analyses build."""

from engine.program.arrays import compact, support
from engine.program.defaults import own_defaults
from engine.program.dtensors import (
    gathered_from,
    has_shards,
    local,
    owners,
    parts,
    placeholders,
    precision,
    resharded,
    spread,
    whole,
)
from engine.program.sharded import why_sharded
from engine.program.stored import copied, distinct_modules, stored_tensor, stored_tensors
from engine.program.trees import map_tensors, tensors_in

__all__ = [
    "compact",
    "copied",
    "distinct_modules",
    "gathered_from",
    "has_shards",
    "local",
    "map_tensors",
    "own_defaults",
    "owners",
    "parts",
    "placeholders",
    "precision",
    "resharded",
    "spread",
    "stored_tensor",
    "stored_tensors",
    "support",
    "tensors_in",
    "whole",
    "why_sharded",
]

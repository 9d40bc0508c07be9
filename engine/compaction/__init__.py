"""Compaction plans, and their all-or-nothing application to a model."""

from engine.compaction.compact import renew
from engine.compaction.follow import adapt, entries, reshape
from engine.compaction.format import KEY
from engine.compaction.history import entries_of, is_compacted
from engine.compaction.optimizers import check_entrywise, is_entrywise
from engine.compaction.parts import store_certificate
from engine.compaction.reading import check_plans
from engine.compaction.sharded import ShardedCompaction, restore_sharded

__all__ = [
    "KEY",
    "ShardedCompaction",
    "adapt",
    "check_entrywise",
    "check_plans",
    "entries",
    "entries_of",
    "is_compacted",
    "is_entrywise",
    "renew",
    "reshape",
    "restore_sharded",
    "store_certificate",
]

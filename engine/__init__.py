"""Structured pruning that computes the same function: trace, dependency groups, mask repair, counting, compaction."""

from engine import errors
from engine.checking.check import check_rule
from engine.compaction.follow import compactable
from engine.compaction.plan import Plan
from engine.compaction.slices import Slice
from engine.compensation.compensate import compensate
from engine.compensation.losses import reconstruction_losses
from engine.compensation.norms import recalibrate_norms
from engine.cost.count import count_flops_params
from engine.cost.latency import LatencyTable, paying_widths
from engine.dependency import ChannelDependency, GroupDependency, InputChannelDependency, not_safe_to_prune
from engine.files.checkpoint import load_compacted_state, save_safetensors
from engine.files.shards import compact_shards, load_shards
from engine.groups import Group, Member, dependency_groups, group_masks
from engine.masks import ZEROS, read_masks
from engine.ops import HEAD_DIMENSIONS, RULES, set_attention
from engine.program.entries import Entry
from engine.program.graph import Graph, Node, Value
from engine.repair import fix_mask_conflict
from engine.rule import Rare, Registry, Rule, Sample
from engine.sensitivity.analysis import SensitivityAnalysis
from engine.sensitivity.table import SensitivityTable
from engine.speedup import ModelSpeedup
from engine.tracer import trace
from engine.verification.certificate import Certificate
from engine.version import __version__ as __version__

__all__ = [
    "HEAD_DIMENSIONS",
    "RULES",
    "ZEROS",
    "Certificate",
    "ChannelDependency",
    "Entry",
    "Graph",
    "Group",
    "GroupDependency",
    "InputChannelDependency",
    "LatencyTable",
    "Member",
    "ModelSpeedup",
    "Node",
    "Plan",
    "Rare",
    "Registry",
    "Rule",
    "Sample",
    "SensitivityAnalysis",
    "SensitivityTable",
    "Slice",
    "Value",
    "check_rule",
    "compact_shards",
    "compactable",
    "compensate",
    "count_flops_params",
    "dependency_groups",
    "errors",
    "fix_mask_conflict",
    "group_masks",
    "load_compacted_state",
    "load_shards",
    "not_safe_to_prune",
    "paying_widths",
    "read_masks",
    "recalibrate_norms",
    "reconstruction_losses",
    "save_safetensors",
    "set_attention",
    "trace",
]

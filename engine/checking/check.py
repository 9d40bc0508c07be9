"""Check a rule on its samples: each call by brute force, and whole networks under every kind of mask."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.checking.freed import Freed, freed
from engine.checking.isolated import Call, calls_of, same_memory
from engine.checking.validation import check_call
from engine.errors import RuleError, VerificationError
from engine.groups import Group, dependency_groups, group_masks
from engine.ops import RULES
from engine.program.defaults import own_defaults
from engine.program.graph import Graph
from engine.removal.propagate import Structure
from engine.removal.structure import structure_of
from engine.rule import Registry, Rule, Sample
from engine.speedup import ModelSpeedup
from engine.tracer import trace

__all__ = ["RuleReport", "check_rule"]

Masks = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class RuleReport:
    """Result of checking a rule.

    Attributes:
        rows: (sample, kind of masks, parameters before, parameters after, relative error) for each check of a network.
        frozen: sample -> reasons why groups are frozen, except for outputs of the model.
        freed: dimensions that the op would allow to be cut, but the rule freezes.
        calls: number of calls checked by brute force.
        missing: ops of the rule that no sample calls.
    """

    rows: tuple[tuple[str, str, int, int, float], ...]
    frozen: dict[str, list[str]]
    freed: tuple[Freed, ...] = ()
    calls: int = 0
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"  {s} ({k}): {before} -> {after} parameters, error {e:.0e}" for s, k, before, after, e in self.rows]
        reasons = [
            f"  {sample}: {reason}" for sample, sample_reasons in self.frozen.items() for reason in sample_reasons
        ]
        removable = [f"  {freed}" for freed in self.freed]
        uncalled = [f"  {op}" for op in self.missing]
        sections = [(f"Checked ({self.calls} calls by brute force):", lines), ("Frozen:", reasons)]
        sections += [("Removable, but frozen by the rule:", removable), ("Not called by any sample:", uncalled)]
        return "\n".join("\n".join([title, *rest]) for title, rest in sections if rest)


@own_defaults()
def check_rule(rule: Rule, samples: Iterable[Sample] = (), rules: Registry = RULES, seed: int = 0) -> RuleReport:
    """Compare a rule with its ops, by brute force on single calls and on whole networks, in float64.

    Each call of the rule's ops in the samples is extracted and run again: with slots cut along every choice of
    dimensions (labels), with constant entries (constants), with unused entries changed (use). Index subsets are
    exhaustive for small dimensions; for larger ones they are blocks and random subsets. Cuts that the op allows
    although the rule freezes them are reported.

    Whole samples are then compacted, and the masked and compacted networks compared. Biases and affine parameters are
    random, so that a dropped constant cannot go unnoticed. Masks cover single entries, whole units chosen independently
    for each layer, and whole dependency groups.

    Args:
        rule: the rule; it need not be registered.
        samples: additional samples; those of the rule are always run.
        rules: rules for all other ops.
        seed: seed of weights and masks.

    Returns:
        What was removed, what is frozen and why, and what could be removed in addition.

    Raises:
        RuleError: if there are no samples, or the rule is wrong on one, naming the sample, and the arguments of the
            call or the first layer that differs.

    Example:
        >>> report = check_rule(RULES["glu"], RULES["mul"].samples())
        >>> all(error < 1e-9 for *_, error in report.rows)
        True
        >>> report.calls > 0, report.freed
        (True, ())

    The brute-force approach follows ``torch.distributed.tensor._ops.strategy_validation``.
    """
    all_samples = [*rule.samples(), *samples]
    if not all_samples:
        raise RuleError(f"The rule of {', '.join(rule.ops)} has no samples; pass `samples=[Sample(...)]`.")
    registry = Registry(r for r in rules.distinct() if not set(r.ops) & set(rule.ops)) + [rule]
    rows: list[tuple[str, str, int, int, float]] = []
    frozen: dict[str, list[str]] = {}
    could: dict[Freed, None] = {}
    called: list[str] = []
    for sample in all_samples:
        model, example = _built(sample, seed)
        graph = trace(model, example)
        for call in calls_of(model, example, rule.ops, graph):
            could.update(dict.fromkeys(_tried(sample, call, registry, seed)))
            called.append(call.node.op)
        groups = dependency_groups(model, example, graph=graph, rules=registry)
        reasons = {g.reason for g in groups if g.reason and "output of the model" not in g.reason}
        if reasons:
            frozen[sample.name] = sorted(reasons)
        for kind, make in _KINDS.items():
            masks = make(model, groups, structure_of(graph, registry), torch.Generator().manual_seed(seed))
            rows.append((sample.name, kind, *_compared(sample, model, graph, masks, registry)))
    missing = tuple(op for op in rule.ops if op not in called)
    return RuleReport(tuple(rows), frozen, tuple(could), len(called), missing)


def _tried(sample: Sample, call: Call, rules: Registry, seed: int) -> list[Freed]:
    generator = torch.Generator().manual_seed(seed)
    with same_memory():
        try:
            check_call(call, rules, generator)
        except RuleError as error:
            raise RuleError(f"On the sample {sample.name!r}: {error}") from error
        return list(freed(call, rules, generator))


def _built(sample: Sample, seed: int) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, example = sample.make(), torch.randn(sample.shape)
        model(example)  # initialises lazy layers
        model = model.double().eval()
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if tensor.is_floating_point():
                    tensor.uniform_(0.5, 1.5) if name.endswith("running_var") else tensor.normal_(0, 0.5)
    return model, example.double()


def _maskable(model: nn.Module, structure: Structure) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters except those in which no slice may be zero."""
    directions = {index for index, _ in structure.unmasked}
    left = {name for name, value in structure.graph.stored.items() if value.index in directions}
    return [(name, parameter) for name, parameter in model.named_parameters() if name not in left]


def _entries(model: nn.Module, groups: list[Group], structure: Structure, generator: torch.Generator) -> Masks:
    masks: Masks = {}
    for name, parameter in _maskable(model, structure):
        module, _, key = name.rpartition(".")
        masks.setdefault(module, {})[key] = (torch.rand(parameter.shape, generator=generator) < 0.4).double()
    return masks


def _units(model: nn.Module, groups: list[Group], structure: Structure, generator: torch.Generator) -> Masks:
    masks: Masks = {}
    for name, parameter in _maskable(model, structure):
        module, _, key = name.rpartition(".")
        if parameter.ndim > 1:
            kept = torch.rand(len(parameter), generator=generator) < 0.5
            shape = [-1] + [1] * (parameter.ndim - 1)
            masks.setdefault(module, {})[key] = kept.double().view(shape).expand(parameter.shape)
    return masks


def _groups(model: nn.Module, groups: list[Group], structure: Structure, generator: torch.Generator) -> Masks:
    free = [group for group in groups if group.reason is None]
    return group_masks(free, {group.name: torch.rand(group.size, generator=generator) < 0.5 for group in free})


_KINDS: dict[str, Callable[[nn.Module, list[Group], Structure, torch.Generator], Masks]] = {
    "single entries": _entries,
    "units of each layer": _units,
    "whole groups": _groups,
}


def _compared(sample: Sample, model: nn.Module, graph: Graph, masks: Masks, rules: Registry) -> tuple[int, int, float]:
    small = copy.deepcopy(model)
    speedup = ModelSpeedup(small, graph.args, masks, confidence=3, graph=graph, rules=rules)
    try:
        small = speedup.speedup_model()
    except VerificationError as error:
        raise RuleError(f"The rules are wrong on the sample {sample.name!r}: {error}") from error
    sizes = [sum(p.numel() for p in m.parameters()) for m in (model, small)]
    return sizes[0], sizes[1], speedup.certificate.max_error if speedup.certificate.verified else 0.0

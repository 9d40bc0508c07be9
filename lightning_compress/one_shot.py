"""One-shot pruning and compaction, without a Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import engine
from engine.bounds import check_kinds
from engine.compensation import as_arguments, samples_in
from engine.program import copied, own_defaults, stored_tensor, tensors_in
from lightning_compress.selection import amounts as selection
from lightning_compress.selection import criteria, scoring, targets
from lightning_compress.selection.evidence import Evidence, squared_output_changes
from lightning_compress.selection.selector import ScopeSpec, Selector
from lightning_compress.trainer.packages import MisconfigurationException

_FROM_DATA = frozenset({"reconstruction", "squared_change"})


@own_defaults()
def prune(
    model: nn.Module,
    example_input: Any,
    amount: float | Mapping[str, float] = 0.5,
    *,
    target: str = "macs",
    criterion: criteria.CriterionSpec = "l2",
    data: Iterable[Any] | None = None,
    scope: ScopeSpec = "global",
    layers: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    max_amount: float | Mapping[str, float] = 0.9,
    round_to: int = 1,
    minimum: int = 1,
    samples: int = 1024,
    ridge: float = 1e-3,
    confidence: int = 8,
    compensate: bool = True,
    uniform: bool = False,
    plain_norms: bool | str = False,
    constants: str | Sequence[str] | None = None,
) -> nn.Module:
    """Prune a copy of a network: mask, repair, compensate, compact and verify it.

    Args:
        model: the network, which is not changed.
        example_input: a tensor, a tuple of positional arguments, or a mapping of keyword arguments, batch first.
        amount: fraction of the target to remove, in [0, 1]; for channels also fractions by layer name pattern.
        target: what ``amount`` is a fraction of: ``"macs"``, ``"params"``, ``"channels"`` or ``"latency"``.
        criterion: scores channels, as in `ChannelPruning`. Criteria that need statistics of training are rejected,
            except for ``"fisher"``, which is computed from the outputs on the data here. ``"fisher"`` and
            ``"reconstruction"`` need data.
        data: unlabelled batches for compensation, as for `engine.compensate`; None skips compensation.
        compensate: whether to use the data for compensation, and not only for the criterion.
        scope: where channels are ranked against each other, as in `ChannelPruning`.
        layers: name patterns of the layers to prune; by default all.
        exclude: name patterns of layers that are not pruned; neither are layers coupled to them.
        max_amount: maximum fraction of its channels that a group may lose, or fractions by layer name pattern.
        round_to: the remaining width is a multiple of this.
        minimum: minimum remaining width.
        samples: number of samples for compensation.
        ridge: ridge penalty of compensation, see `engine.compensate`.
        uniform: whether groups of the same structure and size keep the same number of units, for configurations with
            one number for all layers; see `save_pretrained`.
        plain_norms: whether norms that lose channels become ordinary norms, for a plain configuration: ``"exact"``, RMS
            norms; True, layer norms too, which is not exact. See `engine.ModelSpeedup`.
        confidence: number of random samples to verify with; 0 relies on the rules.
        constants: names of arguments, attributes and buffers that keep their value, or patterns of them, as for
            `engine.trace`.

    Returns:
        The small network, in the mode of the model, with ``.plan``, ``.certificate`` and ``.report`` (errors of
        compensation by group; empty without data).

    Raises:
        MisconfigurationException: naming an invalid argument, or the lowest cost that can be reached.
        EngineError: if the network cannot be traced, the batches do not fit it, or verification fails.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
        >>> small = prune(net, torch.zeros(1, 4), 0.5, data=[torch.randn(256, 4)])
        >>> small[0].out_features, small.certificate.verified, list(small.report)
        (32, True, ['0'])
    """
    check_kinds(prune, locals())
    score = scoring.resolve(criterion)
    needed = criteria.needs(score)
    if needed - _FROM_DATA:
        raise MisconfigurationException(
            f"The criterion {criterion!r} needs statistics of training. Use `ChannelPruning` in a fit, or a criterion "
            "that needs only weights ('l1', 'l2', 'fpgm', 'bn_scale', 'lamp') or data ('reconstruction', 'fisher')."
        )
    if needed and data is None:
        raise MisconfigurationException(f"The criterion {criterion!r} needs batches: pass `data=`.")
    only, never = selection.as_patterns(layers), selection.as_patterns(exclude, "exclude")
    selector = Selector(amount, scope, target, None, max_amount, round_to, minimum, only, never, None, uniform)
    small = copied(model)
    graph = engine.trace(small, example_input, constants=selection.as_patterns(constants, "constants") or None)
    subject = targets.Subject(small, example_input, graph, engine.dependency_groups(small, example_input, graph=graph))
    batches = None if data is None else _enough(data, samples)
    gathered = _gathered(subject, needed, batches or [], samples, ridge)
    chosen = _masks(subject, selector, score, gathered)
    masks = engine.fix_mask_conflict(chosen, small, example_input, graph=graph)
    report: Mapping[str, Any] = {}
    if batches is not None and compensate:
        report = engine.compensate(small, example_input, masks, batches, samples=samples, ridge=ridge, graph=graph)
        _zero(small, masks)
        engine.recalibrate_norms(small, batches, keep_outputs=True)  # further training starts from these outputs
    speedup = engine.ModelSpeedup(
        small, example_input, masks, confidence=confidence, graph=graph, plain_norms=plain_norms
    )
    speedup.speedup_model()
    for name, value in (("plan", speedup.plan), ("certificate", speedup.certificate), ("report", report)):
        setattr(small, name, value)
    return small


def _enough(data: Iterable[Any], samples: int) -> list[Any]:
    """Return enough batches for the number of samples; the data may only be read once."""
    batches: list[Any] = []
    count = 0
    for batch in data:
        batches.append(batch)
        count += samples_in(tensors_in(batch))
        if count >= samples:
            break
    return batches


@torch.no_grad()
def _zero(model: nn.Module, masks: Mapping[str, Mapping[str, Tensor]]) -> None:
    for module, own in masks.items():
        for name, mask in own.items():
            stored_tensor(model.get_submodule(module), name).masked_fill_(mask == 0, 0)


def _gathered(
    subject: targets.Subject, needed: Iterable[str], batches: list[Any], samples: int, ridge: float
) -> dict[str, dict[str, Tensor]]:
    gathered: dict[str, dict[str, Tensor]] = {}
    model, graph, groups = subject.model, subject.graph, subject.groups
    if "reconstruction" in needed:
        gathered["reconstruction"] = engine.reconstruction_losses(
            model, subject.example, groups, batches, samples=samples, ridge=ridge, graph=graph
        )
    if "squared_change" in needed:
        gathered["squared_change"] = squared_output_changes(groups, model, as_arguments(batches, graph, samples))
    return gathered


def _masks(
    subject: targets.Subject, selector: Selector, score: criteria.Criterion, gathered: dict[str, dict[str, Tensor]]
) -> dict[str, dict[str, Tensor]]:
    chosen = selector.amounts(subject.groups)
    evidence = Evidence(subject.model.get_parameter, gathered=gathered)
    scores = {g.name: scoring.score(score, g, evidence) for g in subject.groups if g.name in chosen}
    by_group = {name: units for name, units in scores.items() if units is not None}
    if chosen and not by_group:
        raise MisconfigurationException(f"The criterion cannot score any layer: {', '.join(chosen)}.")
    reference = 0.0 if selector.target == "channels" else targets.reference(subject, selector.target)
    selector.check_reachable(subject, reference)
    keep = selector.choose(subject, by_group, {}, 1.0, reference, {})
    return engine.group_masks(subject.groups, keep)

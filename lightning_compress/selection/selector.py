"""Selection of the units to prune, by scope, target and limits."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from engine import Graph, Group, dependency_groups
from lightning_compress.selection import amounts as selection
from lightning_compress.selection import targets
from lightning_compress.selection.ladders import (
    SCOPES,
    Descent,
    Ladder,
    Limits,
    Scope,
    bundled,
    check_limits,
    ladder,
    pools,
)
from lightning_compress.trainer.imports import imported
from lightning_compress.trainer.packages import MisconfigurationException

if TYPE_CHECKING:
    from collections.abc import Sequence

Amount = float | Mapping[str, float]
ScopeSpec = str | Callable[[Group], Hashable]

_DECLARE = " An argument that you never pass, and that would run other code, can be declared: `constants='its name'`."


@dataclass(frozen=True)
class Selector:
    """Settings of the selection. The arguments are those of `ChannelPruning`.

    Attributes:
        amount: fraction of the target to remove, in [0, 1]; for channels also fractions by pattern.
        scope: groups among which units compete.
        target: what the amount is a fraction of.
        budget: remaining amount of the target in its own unit, instead of ``amount``.
        max_amount: maximum fraction of its units that a group may lose, or fractions by pattern.
        round_to: widths are multiples of this.
        minimum: minimum remaining width.
        layers: name patterns of the layers to prune.
        exclude: name patterns of layers that are not pruned.
        widths: allowed widths by group name; groups without an entry may have any.
        uniform: whether groups of the same structure and size keep the same number of units.
        checks: whether patterns have to match layers that can be pruned. A model that became smaller may have lost the
            channels of all of them.
        prunable: names of the groups that were to be pruned when the fit started.

    Raises:
        MisconfigurationException: naming an invalid argument.
    """

    amount: Amount = 0.5
    scope: ScopeSpec = "group"
    target: str = "channels"
    budget: float | None = None
    max_amount: Amount = 1.0
    round_to: int = 1
    minimum: int = 1
    layers: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    widths: Mapping[str, Sequence[int]] | None = None
    uniform: bool = False
    checks: bool = True
    prunable: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        selection.check_amount(self.amount)
        selection.check_amount(self.max_amount, "max_amount")
        targets.check_target(self.target, self.amount, self.budget)
        check_limits(self.round_to, self.minimum, self.widths)
        _ = self.key

    @property
    def key(self) -> Scope:
        """The scope as a function of a group; groups of the same key compete."""
        if callable(self.scope):
            return self.scope
        scope: Scope | None = SCOPES.get(self.scope)
        return scope or imported(self.scope, "scope", SCOPES)

    def checking(self, checks: bool, prunable: Iterable[str] = ()) -> Selector:
        """Return the same settings with or without checks, and with the names of the groups that are to be pruned."""
        return replace(self, checks=checks, prunable=frozenset(prunable))

    def groups(self, model: nn.Module, example: Any, graph: Graph) -> list[Group]:
        """Return the dependency groups of a model; those that only steps read are frozen unless a pattern names them.

        Args:
            model: the model.
            example: its example input.
            graph: of the model and its steps.
        """
        groups = dependency_groups(model, example, graph=graph)
        return selection.keep_what_steps_read_alone(groups, graph, self.layers, self.amount)

    @property
    def prunes(self) -> bool:
        """Whether the settings ask to remove anything."""
        amounts = self.amount.values() if isinstance(self.amount, Mapping) else [self.amount]
        return self.budget is not None or any(amounts)

    def amounts(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the fraction of each group to prune; 1 unless the target is channels.

        Raises:
            MisconfigurationException: if a pattern matches nothing, or nothing can be pruned.
        """
        amount = self.amount if self.target == "channels" else 1.0
        fractions = selection.amounts(groups, amount, self.layers, self.exclude, self.checks)
        return {name: value for name, value in fractions.items() if value and self.prunes}

    def final(self, reference: float) -> float:
        """Return the final value of the target, in its unit."""
        assert not isinstance(self.amount, Mapping)
        return (1.0 - self.amount) * reference if self.budget is None else self.budget

    def check_reachable(self, subject: targets.Subject, reference: float) -> None:
        """Check that a target of parameters or multiply-accumulates can be reached.

        Raises:
            MisconfigurationException: with the lowest value that can be reached.
        """
        if self.target not in ("macs", "params") or not self.prunes:
            return
        self._chosen(subject)
        descent = self._descent(self._ladders(subject, None, {}, {}))
        lowest, wanted = subject.counted(self.target, descent.keep(len(descent))), self.final(reference)
        if lowest > wanted:
            whole = selection.layers_that_stay(subject.groups)
            raise MisconfigurationException(
                f"The target of {wanted:,.0f} {targets.UNITS[self.target]} cannot be reached: at least {lowest:,.0f} "
                f"of {reference:,.0f} remain. Prune more layers, or relax what limits it: {self._limits()}."
                f"{whole}{_DECLARE if 'did not run' in whole else ''}"
            )

    def _chosen(self, subject: targets.Subject) -> list[Group]:
        amounts = self.amounts(subject.groups)
        chosen = [group for group in subject.groups if group.name in amounts]
        if self.checks and self.prunes and not chosen:
            patterns = {"amount": self.amount, "layers": self.layers, "exclude": self.exclude}
            settings = ", ".join(f"{name}={value!r}" for name, value in patterns.items() if value)
            raise MisconfigurationException(
                f"With {settings}, no layer remains to prune. Choose other patterns, or remove the callback."
            )
        return chosen

    def _limits(self) -> str:
        usual = {"layers": (), "exclude": (), "round_to": 1, "minimum": 1, "widths": None, "uniform": False}
        unusual = [f"{name}={getattr(self, name)!r}" for name, value in usual.items() if getattr(self, name) != value]
        return ", ".join([f"max_amount={self.max_amount!r}", *unusual])

    def check_effective(self, subject: targets.Subject, fraction: float, reference: float) -> None:
        """Check that the settings mask at least one channel, whatever the scores are.

        Args:
            subject: the model.
            fraction: final fraction of the schedule, in [0, 1].
            reference: cost of the unpruned model; unused if the target is channels.

        Raises:
            MisconfigurationException: naming the settings, if they do not.
        """
        chosen = self._chosen(subject)
        if not chosen or not fraction or self._has_effect(subject, chosen, fraction, reference):
            return
        sizes = sorted({group.size for group in chosen})
        units = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}"
        options: dict[str, object] = {"amount": self.amount, "budget": self.budget, "max_amount": self.max_amount}
        options |= {"round_to": self.round_to, "minimum": self.minimum, "widths": self.widths and dict(self.widths)}
        usual = {"budget": None, "max_amount": 1.0, "round_to": 1, "minimum": 1, "widths": None}
        settings = ", ".join(f"{name}={value!r}" for name, value in options.items() if value != usual.get(name, ...))
        raise MisconfigurationException(
            f"With {settings}, no channel is ever masked: the groups have {units} units. Relax the "
            "settings, or remove the callback."
        )

    def _has_effect(self, subject: targets.Subject, chosen: Sequence[Group], fraction: float, reference: float) -> bool:
        """Whether any channel is masked if all are equally important."""
        if self.target != "channels":
            has_events = len(self._descent(self._ladders(subject, None, {}, {}))) > 0
            return has_events and (self.target == "latency" or self.final(reference) < reference)
        scores = {group.name: torch.zeros(group.size) for group in chosen}
        keep = self.choose(subject, scores, {}, fraction, reference, {})
        return not all(kept.all() for kept in keep.values())

    def choose(
        self,
        subject: targets.Subject,
        scores: Mapping[str, Tensor],
        previous: Mapping[str, Tensor],
        fraction: float,
        reference: float,
        dense: Mapping[str, int],
    ) -> dict[str, Tensor]:
        """Choose the units to keep.

        Args:
            subject: the model.
            scores: scores by group name; groups without scores are not pruned.
            previous: units that are not masked, by group name.
            fraction: current fraction of the schedule, in [0, 1].
            reference: cost of the unpruned model; unused if the target is channels.
            dense: number of units of each group in the unpruned model.

        Returns:
            Bool of shape ``(size,)`` by group name.
        """
        selection.warn_of_frozen(group for group in subject.groups if group.name in self.prunable)
        ladders = self._ladders(subject, scores, previous, dense)
        if self.target == "channels":
            parts = pools(ladders, self.amounts(subject.groups), self.key)
            keep = targets.hit_channels(parts, fraction)
        else:
            budget = reference - fraction * (reference - self.final(reference))
            descent = self._descent(ladders)
            if self.target == "latency":
                keep = targets.hit_latency(subject, descent, budget, reference)
            else:
                keep = targets.hit_count(subject, descent, self.target, budget)
        return {name: kept & previous[name].cpu() if name in previous else kept for name, kept in keep.items()}

    def _descent(self, ladders: Sequence[Ladder]) -> Descent:
        return Descent([pool for _, pool in pools(ladders, {one.group.name: 1.0 for one in ladders}, self.key)])

    def _ladders(
        self,
        subject: targets.Subject,
        scores: Mapping[str, Tensor] | None,
        previous: Mapping[str, Tensor],
        dense: Mapping[str, int],
    ) -> list[Ladder]:
        groups, ladders = subject.groups, []
        chosen = self.amounts(groups)
        most = self.max_amount if isinstance(self.max_amount, Mapping) else {"*": self.max_amount}
        if self.checks and isinstance(self.max_amount, Mapping):
            selection.check_patterns(groups, most)
        wanted = {name: frozenset(allowed) for name, allowed in (self.widths or {}).items()}
        widths = {**subject.widths, **{name: subject.widths.get(name, own) & own for name, own in wanted.items()}}
        unknown = widths.keys() - {group.name for group in groups}
        if self.checks and unknown:
            group_names = ", ".join(group.name for group in groups)
            raise MisconfigurationException(
                f"`widths` names groups that the model does not have: {sorted(unknown)}. It has {group_names}."
            )
        for group in groups:
            own = torch.zeros(group.size) if scores is None else scores.get(group.name)
            if group.name in chosen and own is not None:
                limit = selection.smallest_amount(group, most)
                most_of_it = 1.0 if limit is None else limit
                limits = Limits(self.round_to, self.minimum, most_of_it, widths.get(group.name))
                ladders.append(ladder(group, own, previous.get(group.name), limits, dense.get(group.name)))
        return bundled(ladders) if self.uniform else ladders

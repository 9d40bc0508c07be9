"""Which units go at which fraction of the way: scope, target and limits put together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine import Group
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


@dataclass(frozen=True)
class Selector:
    """What is to go in the end.

    Attributes:
        amount: fraction of the target that goes, in [0, 1], by pattern for channels.
        scope: among which groups units compete.
        target: what the amount is a fraction of.
        budget: what is to be left of the target, in its own unit, in place of the amount.
        max_amount: fraction of its units that a group may lose at most, or fractions by pattern.
        round_to: widths are multiples of it.
        minimum: width that stays at least.
        layers: name patterns of the layers to prune.
        exclude: name patterns of the layers to leave alone.
        widths: by group name, the widths that may stay, where not all may.
        uniform: whether groups of the same structure and size keep the same number of units.

    Raises:
        MisconfigurationException: names the argument that is wrong.
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

    def __post_init__(self) -> None:
        selection.check_amount(self.amount)
        selection.check_amount(self.max_amount, "max_amount")
        targets.check_target(self.target, self.amount, self.budget)
        check_limits(self.round_to, self.minimum, self.widths)
        _ = self.key

    @property
    def key(self) -> Scope:
        """The scope as a function: groups of the same key compete."""
        if callable(self.scope):
            return self.scope
        scope: Scope | None = SCOPES.get(self.scope)
        return scope or imported(self.scope, "scope", SCOPES)

    @property
    def prunes(self) -> bool:
        """Whether anything is to go at all."""
        amounts = self.amount.values() if isinstance(self.amount, Mapping) else [self.amount]
        return self.budget is not None or any(amounts)

    def amounts(self, groups: Sequence[Group]) -> dict[str, float]:
        """Fractions by name of the groups to prune, of 1 where the target is not channels.

        Raises:
            MisconfigurationException: if a pattern matches nothing, or nothing can be pruned.
        """
        amount = self.amount if self.target == "channels" else 1.0
        fractions = selection.amounts(groups, amount, self.layers, self.exclude)
        return {name: value for name, value in fractions.items() if value and self.prunes}

    def final(self, reference: float) -> float:
        """What is to be left of the target, in its unit."""
        assert not isinstance(self.amount, Mapping)
        return (1.0 - self.amount) * reference if self.budget is None else self.budget

    def check_reachable(self, subject: targets.Subject, reference: float) -> None:
        """Refuse a budget of parameters or multiply-accumulates that stays out of reach with all that may go gone.

        Raises:
            MisconfigurationException: with the lowest number that can be reached.
        """
        if self.target not in ("macs", "params") or not self.prunes:
            return
        descent = self._descent(self._ladders(subject, None, {}, {}))
        lowest, wanted = subject.counted(self.target, descent.keep(len(descent))), self.final(reference)
        if lowest > wanted:
            raise MisconfigurationException(
                f"The target of {wanted:,.0f} {targets.UNITS[self.target]} cannot be reached: of {reference:,.0f}, "
                f"{lowest:,.0f} are left when all goes that may. Prune more layers, or raise `max_amount`."
            )

    def check_effective(self, subject: targets.Subject, fraction: float, reference: float) -> None:
        """Refuse settings under which nothing goes, whatever the scores are.

        Args:
            subject: the model.
            fraction: how far the schedule goes, in [0, 1].
            reference: what the unpruned model costs; unused where the target is channels.

        Raises:
            MisconfigurationException: naming the settings.
        """
        amounts = self.amounts(subject.groups)
        chosen = [group for group in subject.groups if group.name in amounts]
        if self.prunes and not chosen:
            patterns = {"amount": self.amount, "layers": self.layers, "exclude": self.exclude}
            settings = ", ".join(f"{name}={value!r}" for name, value in patterns.items() if value)
            raise MisconfigurationException(
                f"Under {settings} no layer is left whose channels may be masked. Choose other patterns, or leave the "
                "callback out."
            )
        if not chosen or not fraction or self._lets_go(subject, chosen, fraction, reference):
            return
        sizes = [group.size for group in chosen]
        options: dict[str, object] = {"amount": self.amount, "budget": self.budget, "max_amount": self.max_amount}
        options |= {"round_to": self.round_to, "minimum": self.minimum, "widths": self.widths and dict(self.widths)}
        usual = {"budget": None, "max_amount": 1.0, "round_to": 1, "minimum": 1, "widths": None}
        settings = ", ".join(f"{name}={value!r}" for name, value in options.items() if value != usual.get(name, ...))
        raise MisconfigurationException(
            f"Under {settings} no channel is ever masked: the groups have {min(sizes)} to {max(sizes)} units. Choose "
            "settings that let some go, or leave the callback out."
        )

    def _lets_go(self, subject: targets.Subject, chosen: Sequence[Group], fraction: float, reference: float) -> bool:
        """Whether a channel goes in the end, if all are equally important."""
        if self.target != "channels":
            at_all = len(self._descent(self._ladders(subject, None, {}, {}))) > 0
            return at_all and (self.target == "latency" or self.final(reference) < reference)
        scores = {group.name: torch.zeros(group.size) for group in chosen}
        keep = self.choose(subject, scores, {}, fraction, reference, {})
        return not all(stays.all() for stays in keep.values())

    def choose(
        self,
        subject: targets.Subject,
        scores: Mapping[str, Tensor],
        previous: Mapping[str, Tensor],
        fraction: float,
        reference: float,
        dense: Mapping[str, int],
    ) -> dict[str, Tensor]:
        """Which units stay.

        Args:
            subject: the model.
            scores: by group name; groups without scores stay whole.
            previous: which units are not masked yet, by group name.
            fraction: how far the schedule is, in [0, 1].
            reference: what the unpruned model costs; unused where the target is channels.
            dense: units of each group before anything was removed.

        Returns:
            Bool of shape ``(size,)`` by group name.
        """
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
        return {name: stays & previous[name].cpu() if name in previous else stays for name, stays in keep.items()}

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
        selection.check_patterns(groups, most if isinstance(self.max_amount, Mapping) else ())
        wanted = {name: frozenset(allowed) for name, allowed in (self.widths or {}).items()}
        widths = {**subject.widths, **{name: subject.widths.get(name, own) & own for name, own in wanted.items()}}
        unknown = widths.keys() - {group.name for group in groups}
        if unknown:
            group_names = ", ".join(group.name for group in groups)
            raise MisconfigurationException(
                f"`widths` names no group of the model: {sorted(unknown)}; it has {group_names}."
            )
        for group in groups:
            own = torch.zeros(group.size) if scores is None else scores.get(group.name)
            if group.name in chosen and own is not None:
                limit = selection.smallest_amount(group, most)
                most_of_it = 1.0 if limit is None else limit
                limits = Limits(self.round_to, self.minimum, most_of_it, widths.get(group.name))
                ladders.append(ladder(group, own, previous.get(group.name), limits, dense.get(group.name)))
        return bundled(ladders) if self.uniform else ladders

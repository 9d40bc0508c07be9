"""The plan of a compaction: immutable, printable and serialisable.

It lists which parts of parameters to keep, what to fold where, and which attributes change; `engine.compaction.compact`
applies it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from engine import html
from engine.compaction.compact import Compaction, OptimizerLike
from engine.compaction.folds import Fold
from engine.compaction.format import latest, stored, stored_fields, upgraded
from engine.compaction.numbers import check_numbers
from engine.compaction.slices import Packed, Slice, Unpacked
from engine.errors import PlanError
from engine.program.defaults import own_defaults
from engine.program.garbage import uncollected
from engine.program.stored import settled
from engine.surgery.exchange import Exchange, Replace
from engine.surgery.kinds import exchanges_from, joined, printed, state_of

__all__ = ["Plan"]

_Kind = TypeVar("_Kind", bound=Exchange)


@dataclass(frozen=True, eq=False)
class Plan:
    """Instructions for narrowing a model.

    Applied to the masked model, it computes ``slice(parameter * mask) + fold`` for each parameter and buffer involved.

    Attributes:
        slices: parameter or buffer by canonical name -> the part to keep.
        masks: 0/1 masks (bool) of parameters with masked entries in the kept part, in the new shape or of size 1 along
            dimensions that they do not depend on.
        folds: constants of removed channels and their targets, in the new shape.
        attributes: module name -> integer attributes to set.
        exchanges: changes of modules beyond their tensors and integers, in order: see `engine.surgery`.
        notes: remarks, such as what could not be removed.

    Raises:
        PlanError: by `apply` and `from_state_dict`, if something does not fit or is damaged.

    Example:
        >>> import engine
        >>> net = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> mask = torch.tensor([1, 0, 1, 0])
        >>> speedup = engine.ModelSpeedup(net, torch.rand(2, 1), {"0": {"weight": mask.view(4, 1), "bias": mask}})
        >>> _ = speedup.speedup_model()
        >>> print(speedup.plan)
        Plan:
          0.weight  [4, 1] -> [2, 1]
          0.bias    [4] -> [2]
          2.weight  [2, 4] -> [2, 2]
    """

    slices: Mapping[str, Slice] = stored(
        dict,
        save=lambda slices, packed: {name: cut.state_dict(packed) for name, cut in slices.items()},
        load=lambda state, unpacked: {str(name): Slice.from_state_dict(cut, unpacked) for name, cut in state.items()},
        since=1,
    )
    masks: Mapping[str, Tensor] = stored(
        dict,
        save=lambda masks, _: dict(masks),
        load=lambda state, _: {str(name): _bool(mask) for name, mask in state.items()},
        since=1,
    )
    folds: tuple[Fold, ...] = stored(
        tuple,
        save=lambda folds, _: [fold.state_dict() for fold in folds],
        load=lambda state, _: tuple(Fold.from_state_dict(fold) for fold in state),
        since=1,
    )
    attributes: Mapping[str, Mapping[str, int]] = stored(
        dict,
        save=lambda attributes, _: {module: dict(values) for module, values in attributes.items()},
        load=lambda state, _: {
            str(module): {str(name): int(value) for name, value in values.items()} for module, values in state.items()
        },
        since=1,
    )
    exchanges: tuple[Exchange, ...] = stored(
        tuple,
        save=lambda exchanges, _: [state_of(exchange) for exchange in exchanges],
        load=lambda state, _: exchanges_from(state),
        since=2,
    )
    notes: tuple[str, ...] = stored(
        tuple,
        save=lambda notes, _: list(notes),
        load=lambda state, _: tuple(str(note) for note in state),
        since=1,
    )

    @property
    def is_empty(self) -> bool:
        """Whether nothing is narrowed, folded or exchanged."""
        return not self.slices and not self.folds and not self.exchanges

    def of(self, kind: type[_Kind]) -> tuple[_Kind, ...]:
        """Return the exchanges of one kind.

        Args:
            kind: a class of exchanges, one of ``engine.surgery.kinds``.
        """
        return tuple(exchange for exchange in self.exchanges if isinstance(exchange, kind))

    def structure(self) -> Plan:
        """Return the plan without values: what a model of the same class needs to load the narrowed weights."""
        return replace(self, masks={}, folds=(), exchanges=tuple(exchange.structure() for exchange in self.exchanges))

    def then(self, later: Plan) -> Plan:
        """Return the structure of a plan that is equivalent to this one followed by a later one.

        Args:
            later: plan of a further compaction, made for the model that this plan narrows.

        Raises:
            PlanError: if the later plan was made for other shapes.

        Example:
            >>> first = Plan({"weight": Slice.along(0, torch.tensor([0, 2, 3]), (4, 5))})
            >>> second = Plan({"weight": Slice.along(1, torch.tensor([1]), (3, 5))})
            >>> first.then(second).slices["weight"].shape
            (3, 1)
        """
        first, last = self.structure(), later.structure()
        slices = dict(first.slices)
        for name, cut in last.slices.items():
            slices[name] = slices[name].then(cut) if name in slices else cut
        names = dict.fromkeys((*first.attributes, *last.attributes))
        return Plan(
            slices=slices,
            attributes={name: {**first.attributes.get(name, {}), **last.attributes.get(name, {})} for name in names},
            exchanges=joined(first.exchanges, last.exchanges),
            notes=tuple(dict.fromkeys((*first.notes, *last.notes))),
        )

    def within(self, prefix: str) -> Plan:
        """Return the part of the plan that concerns a submodule, with names relative to it.

        Args:
            prefix: path of the submodule, with a trailing dot.
        """

        def part(table: Mapping[str, Any]) -> dict[str, Any]:
            return {name.removeprefix(prefix): entry for name, entry in table.items() if name.startswith(prefix)}

        def inside(module: str) -> bool:
            return f"{module}.".startswith(prefix)

        def name(module: str) -> str:
            return f"{module}.".removeprefix(prefix).removesuffix(".")

        return replace(
            self,
            slices=part(self.slices),
            masks=part(self.masks),
            folds=tuple(replace(f, name=f.name.removeprefix(prefix)) for f in self.folds if f.name.startswith(prefix)),
            attributes={name(module): values for module, values in self.attributes.items() if inside(module)},
            exchanges=tuple(e.renamed(name(e.module)) for e in self.exchanges if inside(e.module)),
        )

    @own_defaults()
    def apply(
        self, model: nn.Module, optimizer: OptimizerLike = None, customized_replace_func: Replace | None = None
    ) -> nn.Module:
        """Compact a model in place; all or nothing.

        Args:
            model: the model that the plan was made for, or another instance of its class. Its module and parameter
                objects stay the same, so that references in optimizers and hooks stay valid.
            optimizer: an optimizer, or several, whose state is narrowed as well.
            customized_replace_func: the functions passed to `ModelSpeedup`, if it replaced modules. Not needed for
                modules that have been replaced by one of another class, or with other shapes, already.

        Returns:
            The model.

        Raises:
            PlanError: if a parameter is missing or has another shape, or the function for a replaced module is missing;
                nothing is changed in that case.

        Example:
            >>> net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
            >>> keep = Slice.along(0, torch.tensor([0, 2]), (4, 1, 1, 1))
            >>> plan = Plan({"0.weight": keep, "0.bias": Slice.along(0, torch.tensor([0, 2]), (4,)),
            ...              "2.weight": Slice.along(1, torch.tensor([0, 2]), (2, 4, 1, 1))},
            ...             attributes={"0": {"out_channels": 2}, "2": {"in_channels": 2}})
            >>> plan.apply(net)[0]
            Conv2d(1, 2, kernel_size=(1, 1), stride=(1, 1))
        """
        self.prepare(model, optimizer, customized_replace_func).commit()
        return model

    @uncollected()
    def prepare(
        self, model: nn.Module, optimizer: OptimizerLike = None, customized_replace_func: Replace | None = None
    ) -> Compaction:
        """Return the change that `apply` makes, checked but not yet applied; it can be rolled back afterwards.

        Args:
            model: see `apply`.
            optimizer: see `apply`.
            customized_replace_func: see `apply`.

        Raises:
            PlanError: if something does not fit.
        """
        with settled(model):
            change = Compaction(model, optimizer, customized_replace_func)
            change.add_tensors(self.slices, self.masks, self.folds)
            check_numbers(model, self.slices, self.attributes, self.exchanges)
            change.add_attributes(self.attributes)
        change.add_exchanges(self.exchanges)
        if not self.is_empty:
            change.add_history(self.structure().state_dict())
        return change

    def state_dict(self) -> dict[str, Any]:
        """Return the plan as primitives and tensors, readable by ``torch.load(..., weights_only=True)``."""
        packed = Packed()
        values = {name: own.save(getattr(self, name), packed) for name, own in stored_fields(self).items()}
        return {"format": latest(self), **values}

    @classmethod
    @own_defaults()
    def from_state_dict(cls, state: Mapping[str, Any], unpacked: Unpacked | None = None) -> Plan:
        """Load a state written by `state_dict`.

        Args:
            state: primitives and tensors.
            unpacked: index sets shared with other plans from the same file.

        Raises:
            PlanError: for a newer format, or if something is missing or has the wrong type.
        """
        state = upgraded(state, cls)
        unpacked = Unpacked() if unpacked is None else unpacked
        try:
            return cls(**{name: own.load(state[name], unpacked) for name, own in stored_fields(cls).items()})
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise PlanError(f"The plan is damaged ({type(error).__name__}: {error}).") from error

    def __str__(self) -> str:
        if self.is_empty:
            return "Plan: nothing to remove."
        width = max(len(name) for name in self.slices) if self.slices else 0
        rows = [f"  {name:<{width}}  {list(cut.before)} -> {list(cut.shape)}" for name, cut in self.slices.items()]
        folds = [f"  {fold.name} absorbs the constants of removed channels" for fold in self.folds]
        notes = [f"  {note}" for note in self.notes]
        sections = [("Plan:", rows), ("Folded:", folds), *printed(self.exchanges), ("Notes:", notes)]
        return "\n".join("\n".join([title, *lines]) for title, lines in sections if lines)

    def _repr_html_(self) -> str:
        rows = [(name, list(cut.before), list(cut.shape)) for name, cut in self.slices.items()]
        folds = [f"{fold.name} absorbs the constants of removed channels" for fold in self.folds]
        changes = [f"{title} {line.strip()}" for title, lines in printed(self.exchanges) for line in lines]
        title = "Plan: nothing to remove." if self.is_empty else "Plan"
        return html.table(title, ("tensor", "before", "after"), rows, [*folds, *changes, *self.notes])


def _bool(mask: Any) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError("a mask of the plan is not a bool tensor")
    return mask

"""The plan of a compaction: immutable, printable and serialisable.

It lists which parts of parameters to keep, what to fold where, and which attributes change; `engine.compaction.compact`
applies it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.compaction.compact import Compaction, OptimizerLike
from engine.compaction.folds import Fold
from engine.compaction.reading import check_unique
from engine.compaction.replace import Replace, Replacement
from engine.compaction.slices import Packed, Slice, Unpacked
from engine.errors import PlanError
from engine.ops.spread import Spread
from engine.ops.wide import Widening, chained
from engine.program.garbage import uncollected
from engine.source.pins import Pin, merged

__all__ = ["FORMAT", "Plan"]

FORMAT = 1


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
        headwise: attention modules to exchange for a form without fixed sizes.
        widened: norms that lose channels.
        spread: layers that lose channels which their consumers keep.
        pins: size arguments to set in the forward of single modules.
        replaced: modules that a user's function narrows. The function itself is not part of the plan.
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

    slices: Mapping[str, Slice] = field(default_factory=dict)
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    folds: tuple[Fold, ...] = ()
    attributes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    headwise: tuple[str, ...] = ()
    widened: tuple[Widening, ...] = ()
    spread: tuple[Spread, ...] = ()
    pins: tuple[Pin, ...] = ()
    replaced: tuple[Replacement, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is narrowed and nothing is folded."""
        return not self.slices and not self.folds and not self.replaced

    def structure(self) -> Plan:
        """Return the plan without values: what a model of the same class needs to load the narrowed weights."""
        replaced = tuple(replace(module, weights={}) for module in self.replaced)
        return replace(self, masks={}, folds=(), replaced=replaced)

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
        replaced_names = {module.module for module in first.replaced}
        return Plan(
            slices=slices,
            attributes={name: {**first.attributes.get(name, {}), **last.attributes.get(name, {})} for name in names},
            headwise=tuple(dict.fromkeys((*first.headwise, *last.headwise))),
            widened=chained(first.widened, last.widened),
            spread=(*first.spread, *last.spread),
            pins=merged(first.pins, last.pins),
            replaced=(*first.replaced, *(module for module in last.replaced if module.module not in replaced_names)),
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
            headwise=tuple(name(module) for module in self.headwise if inside(module)),
            widened=tuple(replace(norm, module=name(norm.module)) for norm in self.widened if inside(norm.module)),
            spread=tuple(replace(layer, module=name(layer.module)) for layer in self.spread if inside(layer.module)),
            pins=tuple(replace(pin, module=name(pin.module)) for pin in self.pins if inside(pin.module)),
            replaced=tuple(replace(m, module=name(m.module)) for m in self.replaced if inside(m.module)),
        )

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
        change = Compaction(model, optimizer)
        change.add_tensors(self.slices, self.masks, self.folds)
        change.add_attributes(self.attributes)
        change.add_classes(self.pins, self.widened, self.headwise)
        change.add_spread(self.spread)
        change.add_replacements(self.replaced, customized_replace_func or {})
        if not self.is_empty:
            change.add_history(self.structure().state_dict())
        return change

    def state_dict(self) -> dict[str, Any]:
        """Return the plan as primitives and tensors, readable by ``torch.load(..., weights_only=True)``."""
        packed = Packed()
        return {
            "format": FORMAT,
            "slices": {name: cut.state_dict(packed) for name, cut in self.slices.items()},
            "masks": dict(self.masks),
            "folds": [fold.state_dict() for fold in self.folds],
            "attributes": {module: dict(values) for module, values in self.attributes.items()},
            "headwise": list(self.headwise),
            "widened": [norm.state_dict() for norm in self.widened],
            "spread": [layer.state_dict() for layer in self.spread],
            "pins": [pin.state_dict() for pin in self.pins],
            "replaced": [module.state_dict() for module in self.replaced],
            "notes": list(self.notes),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], unpacked: Unpacked | None = None) -> Plan:
        """Load a state written by `state_dict`.

        Args:
            state: primitives and tensors.
            unpacked: index sets shared with other plans from the same file.

        Raises:
            PlanError: for a newer format, or if something is missing or has the wrong type.
        """
        version = state.get("format") if isinstance(state, Mapping) else None
        if not isinstance(version, int) or version < 1:
            raise PlanError("This is no compaction plan: it has no format number.")
        if version > FORMAT:
            raise PlanError(f"The plan has format {version}; this version reads up to {FORMAT}. Update the package.")
        unpacked = Unpacked() if unpacked is None else unpacked
        try:
            plan = cls(
                slices={str(name): Slice.from_state_dict(cut, unpacked) for name, cut in state["slices"].items()},
                masks={str(name): _bool(mask) for name, mask in state["masks"].items()},
                folds=tuple(Fold.from_state_dict(fold) for fold in state["folds"]),
                attributes={
                    str(module): {str(k): int(v) for k, v in values.items()}
                    for module, values in state["attributes"].items()
                },
                headwise=tuple(str(name) for name in state["headwise"]),
                widened=tuple(Widening.from_state_dict(norm) for norm in state["widened"]),
                spread=tuple(Spread.from_state_dict(layer) for layer in state.get("spread", ())),
                pins=tuple(Pin.from_state_dict(pin) for pin in state["pins"]),
                replaced=tuple(Replacement.from_state_dict(module) for module in state["replaced"]),
                notes=tuple(str(note) for note in state["notes"]),
            )
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise PlanError(f"The plan is damaged ({type(error).__name__}: {error}).") from error
        check_unique("spread", (layer.module for layer in plan.spread))
        check_unique("narrowed", (norm.module for norm in plan.widened))
        check_unique("given another form", plan.headwise)
        check_unique("replaced", (module.module for module in plan.replaced))
        return plan

    def __str__(self) -> str:
        if self.is_empty:
            return "Plan: nothing to remove."
        width = max(len(name) for name in self.slices) if self.slices else 0
        rows = [f"  {name:<{width}}  {list(cut.before)} -> {list(cut.shape)}" for name, cut in self.slices.items()]
        folds = [f"  {fold.name} takes up the constants of removed channels" for fold in self.folds]
        pins = [f"  {pin.function} of {pin.module!r} is given the size {pin.value}" for pin in self.pins]
        notes = [f"  {note}" for note in self.notes]
        norms = [f"  {norm.module} keeps the statistics of {norm.size} channels" for norm in self.widened]
        layers = [f"  the output of {layer.module} to {len(layer.table)} channels" for layer in self.spread]
        modules = [f"  {module.module} ({module.kind}), by a function of the user" for module in self.replaced]
        sections = [("Plan:", rows), ("Folded:", folds), ("Norms:", norms), ("Spread:", layers), ("Pinned:", pins)]
        sections += [("Replaced:", modules), ("Notes:", notes)]
        return "\n".join("\n".join([title, *lines]) for title, lines in sections if lines)


def _bool(mask: Any) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError("a mask of the plan is not a bool tensor")
    return mask

"""Forecast of whether a package could load a pruned network, and which groups prevent it.

Nothing is predicted by rules: a copy of the network is compacted, and `save_pretrained`'s search looks for a
configuration of the result. If there is none, the groups behind tensors that no field describes are excluded, and the
rest is tried again, until the remaining groups can be saved.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import engine
from engine.errors import EngineError, InputError
from engine.running import call_model, resolve_inputs
from engine.verification import Rescaled, rescaled_norms
from lightning_compress.stock.agreement import evaluating
from lightning_compress.stock.constructors import constructor_of
from lightning_compress.stock.describe import Misfit, Search
from lightning_compress.stock.fields import Shape, Values, changed_dims, generic, shown
from lightning_compress.stock.formats import Form, format_of
from lightning_compress.stock.inputs import sensible_inputs
from lightning_compress.stock.pretrained import best_fit, search_for

__all__ = ["Forecast", "Obstacle", "Part", "forecast", "part_of"]


@dataclass(frozen=True)
class _Place:
    """A parameter or module that no configuration describes.

    Attributes:
        name: its name.
        reason: why.
        dims: the affected dimensions of the parameter; None: all.
        kind: key that equivalent places in other layers share.
    """

    name: str
    reason: str
    dims: frozenset[int] | None = None
    kind: object = None


@dataclass(frozen=True)
class Obstacle:
    """Groups that cannot be pruned, for one reason.

    Attributes:
        groups: their names.
        reason: what no configuration can describe.
    """

    groups: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Forecast:
    """Forecast of `save_pretrained` after removing a fraction of each group.

    Attributes:
        amount: fraction of each group that is removed.
        plain_norms: whether norms become ordinary ones, as with ``plain_norms=True``; else the result is exact.
        obstacles: groups that cannot be pruned; empty if all can.
        config: the fields that change; None if nothing can be removed.
        params: number of remaining parameters.
    """

    amount: float
    plain_norms: bool
    obstacles: tuple[Obstacle, ...]
    config: Mapping[str, int | float] | None
    params: int

    @property
    def is_loadable(self) -> bool:
        """Whether all groups can be pruned."""
        return not self.obstacles and self.config is not None


@dataclass(frozen=True)
class Part:
    """The part of a network that a package loads.

    Attributes:
        name: path inside the network; ``""`` is the network itself.
        form: how its class is built.
        example: its example input.
        looks: cached sizes by configuration.
    """

    name: str
    form: Form
    example: Any
    looks: dict[Any, Any] = field(default_factory=dict)

    def full(self, name: str) -> str:
        """Return the full name in the network of a module or parameter of the part."""
        return f"{self.name}.{name}".strip(".")


def part_of(network: nn.Module, example: Any) -> Part | None:
    """Return the outermost part of a network that a package builds from a configuration or from arguments.

    None if there is no such part.

    Args:
        network: a model, or a module that contains one.
        example: its example input.

    Example:
        >>> part_of(nn.Linear(1, 1), torch.zeros(1, 1)) is None
        True
    """
    for name, module in network.named_modules():
        try:
            form = format_of(module)
        except InputError:
            continue
        passed = _passed(network, module, example)
        return Part(name, form, sensible_inputs(module, form.config) if passed is None else passed)
    constructor = constructor_of(network)
    return None if constructor is None else Part("", constructor, example)


def _passed(network: nn.Module, part: nn.Module, example: Any) -> Any:
    """Return the arguments of a network's first call of a part, as a mapping; None if it does not call it."""
    calls: list[Mapping[str, Any]] = []
    names = list(inspect.signature(part.forward).parameters)

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append({**dict(zip(names, args, strict=False)), **kwargs})

    if network is part:
        return example
    handle = part.register_forward_pre_hook(note, with_kwargs=True)
    args, kwargs = resolve_inputs(example)
    try:
        with evaluating(network), torch.no_grad():
            call_model(network, args, kwargs)
    finally:
        handle.remove()
    return calls[0] if calls else None


@dataclass(frozen=True)
class _Trial:
    """Result of a trial compaction: the fields that change, or tensors that no configuration describes."""

    params: int
    config: Mapping[str, int | float] | None = None
    places: tuple[_Place, ...] = ()
    reason: str = ""

    @property
    def names(self) -> set[str]:
        """Names of the tensors that no configuration describes."""
        return {place.name for place in self.places}


@dataclass(frozen=True)
class _Network:
    """A network whose copies are compacted."""

    model: nn.Module
    graph: engine.Graph
    groups: Sequence[engine.Group]
    keep: Mapping[str, Tensor]
    part: Part
    plain_norms: bool

    def trial(self, whole: frozenset[str]) -> _Trial:
        """Compact a copy, except for the groups ``whole``, and search its configuration."""
        keep = {name: units for name, units in self.keep.items() if name not in whole}
        small, inputs = copy.deepcopy(self.model), self.graph.kwargs or self.graph.args
        masks = engine.group_masks(self.groups, keep)
        speedup = engine.ModelSpeedup(
            small, inputs, masks, confidence=0, graph=self.graph, plain_norms=self.plain_norms
        )
        speedup.speedup_model()
        small = small.get_submodule(self.part.name)
        params = sum(parameter.numel() for parameter in small.parameters())
        with evaluating(small):
            norms = rescaled_norms(small)
            return _blocking_norms(norms, params) or _searched(small, norms, self.part, params)

    def obstacles(self, trial: _Trial, whole: frozenset[str]) -> list[Obstacle]:
        """Return the groups behind the places of a failed trial: those with parameters there.

        If there are none, as for norms without weights, return a group without which the trial succeeds.
        """
        groups = [group for group in self.groups if group.name in self.keep and group.name not in whole]
        by_kind: dict[object, list[tuple[str, _Place]]] = {}
        for group in groups:
            place = next((place for place in trial.places if _concerns(group, self.part.full(place.name), place)), None)
            if place is not None:
                by_kind.setdefault(place.kind, []).append((group.name, place))
        if by_kind:
            return [Obstacle(tuple(name for name, _ in own), own[0][1].reason) for own in by_kind.values()]
        reason = trial.places[0].reason if trial.places else trial.reason
        for group in sorted(groups, key=lambda group: -len(group.members)):
            other = self.trial(whole | {group.name})
            if other.config is not None or trial.places and not other.names & trial.names:
                return [Obstacle((group.name,), reason)]
        return [Obstacle(tuple(group.name for group in groups), reason)]


def _concerns(group: engine.Group, name: str, place: _Place) -> bool:
    members = [member for member in group.members if f"{member.parameter}.".startswith(f"{name}.")]
    return any(place.dims is None or any(member.units.shape[dim] > 1 for dim in place.dims) for member in members)


def _blocking_norms(norms: Mapping[str, Rescaled], params: int) -> _Trial | None:
    wide = {name: norm for name, norm in norms.items() if not norm.is_plain}
    if not wide:
        return None
    kinds = ", ".join(dict.fromkeys(norm.kind for norm in wide.values()))
    name, norm = next(iter(wide.items()))
    rest = f" and {len(wide) - 1} more" if len(wide) > 1 else ""
    remaining = f"of which {norm.kept} remain" if norm.kept else "of which some are removed"
    reason = f"{kinds} {name!r}{rest} would keep the statistics of {norm.size} channels {remaining}"
    return _Trial(params, places=tuple(_Place(name, reason) for name in wide))


def _searched(small: nn.Module, norms: Mapping[str, Rescaled], part: Part, params: int) -> _Trial:
    search = search_for(small, part.form, norms, part.looks)
    candidates = search.solve()
    look = search.look(candidates[0])
    if look is None or search.target.misfits(look):
        return _Trial(params, places=tuple(_unfit(search, candidates[0])), reason="no configuration has these layers")
    try:
        fit, values = best_fit(small, part.form, norms, search, candidates, part.example, math.inf)
    except EngineError as error:
        return _Trial(params, reason=str(error).partition(". ")[0])
    if fit.shared:
        name = next(iter(fit.shared))
        reason = f"one field is the eps of {name!r} and of norms that lose channels (outputs differ by {fit.error:.0e})"
        return _Trial(params, places=tuple(_Place(norm, reason) for norm in norms), reason=reason)
    return _Trial(params, {shown(path): value for path, value in values.items()})


def _unfit(search: Search, values: Values) -> Iterator[_Place]:
    """Yield the tensors whose shapes differ under the nearest configuration.

    If that would narrow a tensor that is not pruned, yield the tensors that depend on the same fields instead.
    """
    base, look = search.look({}), search.look(values)
    if base is None or look is None:
        return
    misfits, shapes = search.target.misfits(look), search.target.shapes
    whole = next((misfit for misfit in misfits if misfit[1] == base.shapes.get(misfit[0])), None)
    if whole is None:
        for name, wanted, shape in misfits:
            reason = f"no field gives {name!r} the shape {_listed(wanted)}; the nearest configuration: {_listed(shape)}"
            yield _Place(name, reason, changed_dims(wanted, shape), (generic(name), wanted, shape))
        return
    name, _, shape = whole
    fields = _behind(search, values, whole) or values
    changed = search.look(fields) or look
    listed = ", ".join(f"{shown(path)}={value:g}" for path, value in fields.items())
    reason = f"{listed} would make {name!r} {_listed(shape)}, which stays {_listed(whole[1])}"
    for other, old in base.shapes.items():
        both = changed_dims(old, changed.shapes.get(other)), changed_dims(old, shapes.get(other))
        if both[0] and both[1] and both[0] & both[1]:
            yield _Place(other, reason, both[0] & both[1])


def _behind(search: Search, values: Values, misfit: Misfit) -> Values:
    """Return the fields that alone change the shape of a tensor."""
    name, wanted, _ = misfit
    alone = {path: search.look({path: value}) for path, value in values.items()}
    return {path: values[path] for path, look in alone.items() if look and look.shapes.get(name) != wanted}


def _listed(shape: Shape | None) -> str:
    return "of nothing" if shape is None else str(list(shape))  # the tensor does not exist


def forecast(
    model: nn.Module,
    graph: engine.Graph,
    groups: Sequence[engine.Group],
    keep: Mapping[str, Tensor],
    part: Part,
    *,
    amount: float,
    plain_norms: bool,
) -> Forecast:
    """Forecast whether a pruned network could be saved for the package that it comes from.

    Args:
        model: the network, which is not changed.
        graph: its graph.
        groups: groups of the same graph.
        keep: remaining units of each group, bool ``(size,)`` by name.
        part: the part to save.
        amount: fraction of each group that is removed, for the forecast's record.
        plain_norms: whether norms become ordinary ones.
    """
    network = _Network(model, graph, groups, keep, part, plain_norms)
    whole: frozenset[str] = frozenset()
    obstacles: list[Obstacle] = []
    while True:
        trial = network.trial(whole)
        if trial.config is not None or whole >= set(keep):
            config = trial.config if not whole >= set(keep) else None
            return Forecast(amount, plain_norms, tuple(obstacles), config, trial.params)
        blocking = network.obstacles(trial, whole)
        obstacles += blocking
        whole |= {name for obstacle in blocking for name in obstacle.groups}

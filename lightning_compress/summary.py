"""Summary of what pruning can achieve, before training: groups, frozen channels with reasons, predicted costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import engine
from engine.bounds import check_kinds, is_number
from engine.cost import Predictor
from engine.errors import InputError
from engine.program import own_defaults
from engine.progress import notice
from lightning_compress.report.content import Section, change, human
from lightning_compress.report.templating import render
from lightning_compress.report.text import plain_section
from lightning_compress.selection.amounts import as_patterns
from lightning_compress.selection.ladders import ladder
from lightning_compress.stock.forecast import Forecast, Part, forecast, part_of
from lightning_compress.trainer.packages import LIGHTNING_MODULES, MisconfigurationException
from lightning_compress.trainer.target import find_model, from_shape, to_device

__all__ = ["Frozen", "Prediction", "Summary", "summarize"]

_SHOWN = 15  # maximum number of groups and reasons to print


@dataclass(frozen=True)
class Frozen:
    """Channels that cannot be removed, for one reason.

    Attributes:
        reason: why, with the source line if there is one.
        layers: layers that produce them.
        channels: number of channels.
        macs: multiply-accumulates per sample of these layers.
        params: number of parameters of these layers.
    """

    reason: str
    layers: tuple[str, ...]
    channels: int
    macs: int
    params: int


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of a model after removing a fraction of each group.

    Attributes:
        amount: fraction of each group that is removed.
        macs: multiply-accumulates per sample.
        params: number of parameters.
    """

    amount: float
    macs: int
    params: int


@dataclass(frozen=True, repr=False)
class Summary:
    """Summary of what pruning can achieve for a model.

    Attributes:
        model: name of its class.
        macs: multiply-accumulates per sample.
        params: number of parameters.
        groups: ``(name, layers, channels)`` of each prunable group, by first use.
        frozen: channels that cannot be removed, by reason, the most expensive first.
        predictions: predicted costs by the fraction of each group that is removed.
        notes: further notes, such as whether a configuration could describe the small model.
        stock: forecasts of `save_pretrained` by the fraction removed: first the exact one and, if some groups cannot
            be pruned then, the one with ordinary norms. Empty unless requested.
    """

    model: str
    macs: int
    params: int
    groups: tuple[tuple[str, tuple[str, ...], int], ...]
    frozen: tuple[Frozen, ...]
    predictions: tuple[Prediction, ...]
    notes: tuple[str, ...] = ()
    stock: tuple[Forecast, ...] = ()

    def __str__(self) -> str:
        return "\n\n".join([self._title(), *map(plain_section, self._sections()), *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return render("summary.html", title=self._title(), sections=self._sections(), notes=self.notes)

    def _title(self) -> str:
        channels = sum(size for _, _, size in self.groups)
        frozen = sum(entry.channels for entry in self.frozen)
        return (
            f"{self.model}: {human(self.macs)} MACs per sample, {human(self.params)} parameters; "
            f"{channels:,} prunable channels in {len(self.groups)} groups, {frozen:,} frozen"
        )

    def _sections(self) -> list[Section]:
        sections = (self._predicted(), self._prunable(), self._reasons(), self._loadable(), self._obstacles())
        return [section for section in sections if section.rows]

    def _predicted(self) -> Section:
        rows = tuple(
            (
                f"{p.amount:.0%}",
                human(p.macs),
                change(self.macs, p.macs),
                human(p.params),
                change(self.params, p.params),
            )
            for p in self.predictions
        )
        heads = ("removed", "MACs", "change", "parameters", "change")
        lead = "Predicted cost after removing a fraction of each group."
        return Section("Predicted", lead, heads, rows if self.groups else (), numbers=True)

    def _prunable(self) -> Section:
        rows = tuple((name, str(size), ", ".join(layers)) for name, layers, size in self.groups[:_SHOWN])
        more = _more(len(self.groups), "groups")
        lead = f"The layers of a group produce the same channels, and lose the same ones.{more}"
        return Section("Groups", lead, ("group", "channels", "layers"), rows)

    def _reasons(self) -> Section:
        rows = tuple(
            (
                f"{entry.macs / max(self.macs, 1):.0%}",
                f"{entry.params / max(self.params, 1):.0%}",
                str(entry.channels),
                _listed(entry.layers),
                entry.reason,
            )
            for entry in self.frozen[:_SHOWN]
        )
        more = _more(len(self.frozen), "frozen")
        lead = f"Channels that cannot be removed, by the cost of the layers that produce them.{more}"
        return Section("Frozen, and why", lead, ("MACs", "parameters", "channels", "layers", "reason"), rows)

    def _loadable(self) -> Section:
        rows = tuple(
            (f"{one.amount:.0%}", _norms(one), _verdict(one), human(one.params), _fields(one)) for one in self.stock
        )
        lead = "Dry run of `save_pretrained` after pruning with `uniform=True`."
        return Section(
            "Loadable by its package", lead, ("removed", "norms", "loadable", "parameters", "fields that change"), rows
        )

    def _obstacles(self) -> Section:
        rows = tuple(
            (f"{one.amount:.0%}", _norms(one), _listed(obstacle.groups), obstacle.reason)
            for one in self.stock
            for obstacle in one.obstacles
        )
        lead = "No configuration describes these groups after pruning: exclude them (`exclude=`), or change the cause."
        return Section("In the way", lead, ("removed", "norms", "groups", "why"), rows)


def _norms(one: Forecast) -> str:
    return "plain_norms=True" if one.plain_norms else "exact"


def _verdict(one: Forecast) -> str:
    if one.is_loadable:
        return "yes"
    count = sum(len(obstacle.groups) for obstacle in one.obstacles)
    return "no" if one.config is None else f"without {count} group{'s' * (count > 1)}"


def _fields(one: Forecast) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in (one.config or {}).items())


@own_defaults()
def summarize(
    model: nn.Module,
    example_input: Any = None,
    *,
    amounts: Sequence[float] = (0.25, 0.5, 0.75),
    path: str | None = None,
    stock: bool = False,
    constants: str | Sequence[str] | None = None,
) -> Summary:
    """Summarise what pruning can achieve for a model, before training.

    Args:
        model: a network or a LightningModule, which is not changed; it may be on ``meta``.
        example_input: a tensor, a tuple of positional arguments, a mapping of keyword arguments, or a shape; None: the
            ``example_input_array`` of a LightningModule.
        amounts: fractions of each group for which to predict the costs.
        path: path of the model inside ``model``; None: of a LightningModule as for the callbacks, otherwise all of it.
        stock: whether to test on copies if `save_pretrained` could save the pruned model (transformers, diffusers), or
            constructor arguments describe it (timm, torchvision), and which groups prevent it. Takes seconds to
            minutes.
        constants: names of arguments, attributes and buffers that keep their value, or patterns of them, as for
            `engine.trace`.

    Returns:
        A summary that prints as text, and as tables in notebooks.

    Raises:
        MisconfigurationException: without an example input, or for an amount outside [0, 1].
        TraceError: if the model rejects the example input.
        InputError: with ``stock``, for a model on ``meta`` or without a configuration.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3))
        >>> summary = summarize(net, (1, 3, 16, 16))
        >>> print(summary)
        Sequential: 140 k MACs per sample, 954 parameters; 16 prunable channels in 2 groups, 2 frozen
        <BLANKLINE>
        Predicted
        =========
        Predicted cost after removing a fraction of each group.
        removed    MACs   change  parameters   change
        25%      89.2 k  −36.1 %         608  −36.3 %
        50%      49.1 k  −64.8 %         334  −65.0 %
        75%      19.4 k  −86.1 %         132  −86.2 %
        <BLANKLINE>
        Groups
        ======
        The layers of a group produce the same channels, and lose the same ones.
        group  channels  layers
        0      8         0
        2      8         2
        <BLANKLINE>
        Frozen, and why
        ===============
        Channels that cannot be removed, by the cost of the layers that produce them.
        MACs  parameters  channels  layers  reason
        10%   15%         2         4       is an output of the model
    """
    check_kinds(summarize, locals())
    amounts = list(amounts)
    for amount in amounts:
        if not is_number(amount) or not 0 <= amount <= 1:
            raise MisconfigurationException(f"`amounts` must be fractions in [0, 1], got {amount!r}.")
    network, example = _network(model, example_input, path)
    with notice(f"Analysing {type(network).__name__}"):
        return _summary(network, example, amounts, stock, as_patterns(constants, "constants") or None)


def _network(model: nn.Module, example_input: Any, path: str | None) -> tuple[nn.Module, Any]:
    network, example = model, example_input
    if path is not None or isinstance(model, LIGHTNING_MODULES):
        network = find_model(model, path)[1]  # type: ignore[arg-type]
    if isinstance(model, LIGHTNING_MODULES) and example is None:
        example = model.example_input_array
    if example is None:
        raise MisconfigurationException(
            f"There is no example input: `{type(model).__name__}` has no `example_input_array`. Pass one or its shape, "
            "as in `example_input=torch.ones(1, 3, 32, 32)`."
        )
    device = next((parameter.device for parameter in network.parameters()), torch.device("cpu"))
    return network, to_device(from_shape(example), device)


def _summary(
    network: nn.Module, example: Any, amounts: Iterable[float], stock: bool, constants: Sequence[str] | None
) -> Summary:
    part = _part(network, example) if stock else None
    graph = engine.trace(network, example, constants=constants)
    groups = engine.dependency_groups(network, example, graph=graph)
    macs, params, table = engine.count_flops_params(network, example, verbose=False, masks={}, graph=graph)
    kept = {float(amount): _keep(groups, amount) for amount in amounts}
    predict = Predictor(network, graph, groups)
    return Summary(
        type(network).__name__,
        int(macs),
        int(params),
        tuple((group.name, group.layers, group.size) for group in groups if group.reason is None),
        _frozen([group for group in groups if group.reason is not None], network, table),
        tuple(Prediction(amount, *predict(keep)) for amount, keep in kept.items()),
        () if stock else _notes(network),
        () if part is None else tuple(_forecasts(network, graph, groups, kept, part)),
    )


def _part(network: nn.Module, example: Any) -> Part:
    """Return the part of the network that its package would load.

    Raises:
        InputError: if there is no such part, or it has no data.
    """
    if any(parameter.is_meta for parameter in network.parameters()):
        raise InputError("`stock=True` compacts and runs copies of the model, so it cannot be on the meta device.")
    part = part_of(network, example)
    if part is None:
        raise InputError(
            f"{type(network).__name__} contains no model with a configuration and `from_pretrained`, and no package "
            "builds it from arguments. `save_stock` writes the pruned network as a Python file, whatever its sizes."
        )
    return part


def _forecasts(
    network: nn.Module,
    graph: engine.Graph,
    groups: Sequence[engine.Group],
    kept: Mapping[float, Mapping[str, Tensor]],
    part: Part,
) -> Iterable[Forecast]:
    for amount, keep in kept.items():
        own = {name: units for name, units in keep.items() if not units.all()}
        for plain in (False, True):
            one = forecast(network, graph, groups, own, part, amount=amount, plain_norms=plain)
            yield one
            if one.is_loadable or not own:
                break


def _frozen(groups: Sequence[engine.Group], network: nn.Module, table: Mapping[str, Any]) -> tuple[Frozen, ...]:
    by_reason: dict[str, list[engine.Group]] = {}
    for group in groups:
        by_reason.setdefault(group.reason or "", []).append(group)
    entries = []
    for reason, own in by_reason.items():
        layers = tuple(dict.fromkeys(layer for group in own for layer in group.layers))
        macs = sum(sum(table[layer]["flops"]) for layer in layers if layer in table)
        modules = [network.get_submodule(layer) for layer in layers]
        params = sum(p.numel() for module in modules for p in module.parameters(recurse=False))
        entries.append(Frozen(reason, layers, sum(group.size for group in own), int(macs), params))
    return tuple(sorted(entries, key=lambda entry: (-entry.macs, -entry.params)))


def _keep(groups: Sequence[engine.Group], amount: float) -> dict[str, Tensor]:
    """Return the remaining units of each group after removing a fraction."""
    ladders = (ladder(group, torch.arange(float(group.size))) for group in groups if group.reason is None)
    return {one.group.name: one.keep(one.stop_at(amount)) for one in ladders}


def _notes(network: nn.Module) -> tuple[str, ...]:
    config = getattr(network, "config", None)
    origin = type(network).__module__.partition(".")[0]
    if config is None or origin not in ("transformers", "diffusers"):
        return ()
    kind = type(config).__name__ if origin == "transformers" else "config"
    return (
        f"Whether a {kind} can describe the small model depends on the remaining widths, because it has one number "
        "for all blocks. `stock=True` (`--stock`) tests it. The compacted checkpoint holds the plan and always loads.",
    )


def _listed(layers: Sequence[str]) -> str:
    rest = f" and {len(layers) - 3} more" if len(layers) > 4 else ""
    return ", ".join(layers if not rest else layers[:3]) + rest


def _more(count: int, attribute: str) -> str:
    return f" The first {_SHOWN} of {count}; all are in `.{attribute}`." if count > _SHOWN else ""

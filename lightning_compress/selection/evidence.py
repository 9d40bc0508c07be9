"""Inputs of criteria: the model's parameters, its masks, and statistics collected during training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import engine
from engine.program import stored_tensor, tensors_in
from engine.running import call_model, evaluating
from engine.sensitivity import ActivityMeter, unit_sums
from lightning_compress.selection.active import Active
from lightning_compress.trainer.strategy import parallel
from lightning_compress.trainer.target import to_device

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

Gathered = dict[str, dict[str, Tensor]]

# Decay of earlier statistics at each update.
DECAY = 0.95


@dataclass(frozen=True, eq=False)
class Evidence:
    """Inputs of a criterion beside the group.

    Attributes:
        parameter: returns a parameter by its full name.
        kept: units that are not masked, bool ``(size,)`` by group name; all if missing.
        gathered: statistics of shape ``(size,)`` by kind and group name: ``"loss_change"``, ``"squared_change"``,
            ``"active"``, ``"magnitude"`` and ``"reconstruction"``.
        reads: entries of a weight that read an unmasked channel, by the weight's full name; all if missing.
        present: units of the unpruned model that a group still has, bool of its original size by group name; all if
            missing.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> Evidence(layer.get_parameter)("weight") is layer.weight
        True
    """

    parameter: Callable[[str], Tensor]
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    gathered: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    reads: Mapping[str, Tensor] = field(default_factory=dict)
    present: Mapping[str, Tensor] = field(default_factory=dict)

    def __call__(self, name: str) -> Tensor:
        """Return a parameter by its full name, with inactive entries and their gradients set to zero."""
        parameter, reads = self.parameter(name), self.reads.get(name)
        if reads is None:
            return parameter
        values = parameter.detach() * reads.to(parameter.device)
        values.grad = None if parameter.grad is None else parameter.grad * reads.to(parameter.device)
        return values

    def statistic(self, kind: str, group: engine.Group) -> Tensor | None:
        """Return a statistic of a group; None if there is none, or only of a different number of channels."""
        statistic = self.gathered.get(kind, {}).get(group.name)
        return statistic if statistic is not None and len(statistic) == group.size else None


def loss_changes(
    groups: Iterable[engine.Group],
    model: nn.Module,
    parameters: Iterable[nn.Parameter] | None = None,
    active: Active | None = None,
) -> dict[str, Tensor]:
    r"""Estimate to first order the loss change of zeroing each unit, :math:`(\sum_{p \in u} g_p \, w_p)^2`.

    The sum runs over all parameters of the unit, including the norm's scale and shift: in front of a batch norm, the
    sum over the weights alone vanishes, because the loss does not depend on their scale.

    Args:
        groups: dependency groups.
        model: the model with weights and gradients.
        parameters: the parameters whose gradients are up to date; all by default.
        active: active units and weights; all by default.

    Returns:
        Shape ``(size,)`` by group name; groups without a gradient are omitted.

    Molchanov et al., "Importance Estimation for Neural Network Pruning", 2019.
    """
    sums = _sums_of_products(groups, model, parameters, active)
    return {name: total.square().double() for name, total in sums.items()}


def squared_changes(
    groups: Iterable[engine.Group],
    model: nn.Module,
    parameters: Iterable[nn.Parameter] | None = None,
    active: Active | None = None,
) -> dict[str, Tensor]:
    r"""Sum the squared products of weights and gradients of each unit, :math:`\sum_{p \in u} (g_p \, w_p)^2`.

    Args:
        groups: dependency groups.
        model: the model with weights and gradients.
        parameters: the parameters whose gradients are up to date; all by default.
        active: active units and weights; all by default.

    Returns:
        Shape ``(size,)`` by group name; groups without a gradient are omitted.
    """
    sums = _sums_of_products(groups, model, parameters, active, power=2)
    return {name: total.double() for name, total in sums.items()}


def squared_output_changes(
    groups: Sequence[engine.Group], model: nn.Module, inputs: Iterable[tuple[tuple[Any, ...], Mapping[str, Any]]]
) -> dict[str, Tensor]:
    """Compute `squared_changes` without a loss, for the sum of the outputs with random signs in eval mode.

    The expectation over the signs is the diagonal of the Fisher information of outputs with Gaussian noise.

    Args:
        groups: dependency groups.
        model: the model, whose gradients are restored afterwards.
        inputs: positional and keyword arguments of each call.

    Returns:
        Shape ``(size,)`` by group name.
    """
    generator = torch.Generator().manual_seed(0)
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    total: dict[str, Tensor] = {}
    with torch.enable_grad(), evaluating(model):
        before = [(p.grad, p.requires_grad) for p in parameters]
        try:
            for args, kwargs in inputs:
                for parameter in parameters:
                    parameter.requires_grad_(True).grad = None
                results = tensors_in(call_model(model, args, kwargs, batch=True))
                outputs = [t for t in results if t.is_floating_point() and t.requires_grad]
                signs = [torch.randint(2, t.shape, generator=generator).to(t) * 2 - 1 for t in outputs]
                torch.stack([(t * sign).sum() for t, sign in zip(outputs, signs, strict=True)]).sum().backward()
                for name, change in squared_changes(groups, model).items():
                    total[name] = total[name] + change if name in total else change
        finally:
            for parameter, (gradient, requires) in zip(parameters, before, strict=True):
                parameter.grad = gradient
                parameter.requires_grad_(requires)
    return total


def _sums_of_products(
    groups: Iterable[engine.Group],
    model: nn.Module,
    parameters: Iterable[nn.Parameter] | None,
    active: Active | None,
    power: int = 1,
) -> dict[str, Tensor]:
    current, active = None if parameters is None else set(map(id, parameters)), active or Active()
    sums = {}
    for group in groups:
        parts = [p for member in group.members for p in _products(group, member, model, current, active, power)]
        if parts:
            sums[group.name] = torch.stack(parts).sum(0)
    return sums


def _products(
    group: engine.Group,
    member: engine.Member,
    model: nn.Module,
    parameter_ids: set[int] | None,
    active: Active,
    power: int,
) -> Iterator[Tensor]:
    weight = stored_tensor(model, member.parameter)
    if member.role != "in" and weight.grad is not None and (parameter_ids is None or id(weight) in parameter_ids):
        products = active.part(member.parameter, weight.detach().float() * weight.grad.float())
        yield unit_sums(products**power if power > 1 else products, member.units, group.size)


_CHANGES = {"loss_change": loss_changes, "squared_change": squared_changes}


class Gatherer:
    """Collector of statistics of training steps, called by a callback's hooks.

    Args:
        kinds: ``"loss_change"`` and ``"squared_change"`` (of gradients), ``"activity"`` (of activations); may be empty.
        every: interval in batches; each epoch starts with its first batch.
    """

    def __init__(self, kinds: Iterable[str], every: int) -> None:
        self.kinds, self.every = frozenset(kinds), every
        self.gathered: Gathered = {}
        self.active = Active()
        self._meter: ActivityMeter | None = None
        self._groups: Sequence[engine.Group] = ()
        self._inputs: tuple[Any, Any] | None = None
        self._module: LightningModule | None = None
        self._hook: Any = None
        self._batch_due = self._step_due = False

    def watch(self, model: nn.Module, graph: engine.Graph, groups: Sequence[engine.Group]) -> None:
        """Start collecting statistics of a model, until `close`."""
        meter = ActivityMeter(graph, groups) if "activity" in self.kinds else None
        self._stop()
        self._groups, self._meter = groups, meter
        if meter is not None:
            self._hook = model.register_forward_pre_hook(self._remember, with_kwargs=True)

    def close(self) -> None:
        """Stop collecting; the statistics remain available."""
        self._stop()
        self._module = None

    def _stop(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._meter = self._inputs = None
        self._groups = ()

    def __getstate__(self) -> dict[str, Any]:
        # Strategies that spawn processes pickle the callbacks.
        return {**self.__dict__, "_hook": None, "_meter": None, "_inputs": None, "_module": None, "_groups": ()}

    @property
    def watching(self) -> bool:
        """Whether statistics of a model are being collected."""
        return bool(self._groups)

    def _remember(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        # Callbacks also call the model around the step, for example to record it on tensors without data.
        in_step = self._module is not None and self._module._current_fx_name == "training_step"
        if self._batch_due and in_step and torch.is_grad_enabled():
            self._inputs = args, kwargs

    def on_batch_start(self, trainer: Trainer, batch_idx: int) -> None:
        """Determine from the batch index, without state, whether to use this batch and its optimizer step."""
        span, self._module = trainer.accumulate_grad_batches, trainer.lightning_module
        self._batch_due = batch_idx % self.every == 0
        self._step_due = batch_idx // self.every != (batch_idx - span) // self.every

    def on_step(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Collect statistics of gradients before the optimizer's step, unscaled and reduced over the ranks."""
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        for kind in _CHANGES.keys() & self.kinds if self._step_due else ():
            self._add(kind, _CHANGES[kind](self._groups, model, trained, self.active))

    def on_batch_end(self, trainer: Trainer, model: nn.Module) -> None:
        """Collect statistics of the activations of the last batch, on all ranks together."""
        if self._meter is None or self._inputs is None:
            return
        (args, kwargs), self._inputs = self._inputs, None
        with trainer.precision_plugin.forward_context():
            activity = self._meter(model, args, kwargs)
        names = list(activity.count)
        sums = [
            torch.stack([part[n] for part in (activity.count, activity.positive, activity.magnitude)]) for n in names
        ]
        sums = _reduced(trainer, sums) if sums else sums
        self._add("active", {n: total[1] / total[0] for n, total in zip(names, sums, strict=True)})
        self._add("magnitude", {n: total[2] / total[0] for n, total in zip(names, sums, strict=True)})

    def _add(self, kind: str, statistics: Mapping[str, Tensor]) -> None:
        gathered = self.gathered.setdefault(kind, {})
        for name, value in statistics.items():
            before = gathered.get(name)
            fits = before is not None and len(before) == len(value)
            gathered[name] = value + DECAY * before.to(value.device) if fits and before is not None else value

    def cut(self, kept: Mapping[str, Tensor]) -> None:
        """Keep the statistics of the units that remain after a compaction; call `watch` again afterwards."""
        gathered: Gathered = {}
        for kind, statistics in self.gathered.items():
            fits = {name: value for name, value in statistics.items() if len(kept.get(name, value)) == len(value)}
            gathered[kind] = {n: v[kept[n].to(v.device)] if n in kept else v for n, v in fits.items()}
        self.gathered = gathered

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the statistics before `cut` and the model's groups before `watch`."""
        before = {name: value for name, value in vars(self).items() if name != "_hook"}  # the hook is on the same model

        def restore() -> None:
            vars(self).update(before)

        return restore

    def state_dict(self) -> Gathered:
        """Return the statistics on the CPU."""
        state: Gathered = to_device(self.gathered, "cpu")
        return state

    def load_state_dict(self, state: Gathered) -> None:
        """Load the statistics of another run."""
        self.gathered = {kind: dict(statistics) for kind, statistics in state.items()}


def _reduced(trainer: Trainer, sums: list[Tensor]) -> list[Tensor]:
    flat = parallel(trainer).summed(torch.cat([s.flatten() for s in sums]))
    parts = flat.split([s.numel() for s in sums])
    return [part.view_as(total) for part, total in zip(parts, sums, strict=True)]


def unscored_layers(names: Sequence[str], gathers: bool) -> str:
    """Return the error message for a criterion that cannot score any layer.

    Args:
        names: the layers.
        gathers: whether the criterion needs statistics of training.

    Example:
        >>> unscored_layers(["fc"], gathers=False)
        'The criterion cannot score any layer (fc). Choose another criterion, or other layers.'
    """
    what = f"The criterion cannot score any layer ({', '.join(names[:4])}{', …' if len(names) > 4 else ''})."
    if not gathers:
        return f"{what} Choose another criterion, or other layers."
    return (
        f"{what} It needs statistics collected during training, but there are none: start pruning later, and call the "
        "model itself with gradients in `training_step`."
    )

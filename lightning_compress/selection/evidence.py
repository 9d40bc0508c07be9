"""What criteria see of a model: its parameters, what is masked already, and what was gathered while it trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import engine
from engine.program import tensors_in
from engine.recording import evaluating
from engine.sensitivity import ActivityMeter, unit_sums
from lightning_compress.selection.alive import Living
from lightning_compress.trainer.strategy import parallel
from lightning_compress.trainer.target import to_device

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

Gathered = dict[str, dict[str, Tensor]]

# What was gathered longer ago counts less: by this factor each time.
DECAY = 0.95


@dataclass(frozen=True, eq=False)
class Evidence:
    """What a criterion is given beside the group.

    Attributes:
        parameter: gives a parameter by its full name.
        kept: which units of a group are not masked yet, bool ``(size,)`` by group name; all where it is missing.
        gathered: statistics of shape ``(size,)`` by kind and group name: ``"loss_change"``, ``"squared_change"``,
            ``"active"``, ``"magnitude"`` and ``"reconstruction"``.
        reads: which entries of a weight do not read masked channels only, by its full name; all where it is missing.
        present: which units of the unpruned model a group still has, bool of its first size by group name; all where it
            is missing.

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
        """A parameter by its full name; entries that read masked channels only are zero, and so is their gradient."""
        parameter, live = self.parameter(name), self.reads.get(name)
        if live is None:
            return parameter
        values = parameter.detach() * live.to(parameter.device)
        values.grad = None if parameter.grad is None else parameter.grad * live.to(parameter.device)
        return values

    def statistic(self, kind: str, group: engine.Group) -> Tensor | None:
        """What was gathered of a group, or None: nothing, or of other channels than it has now."""
        statistic = self.gathered.get(kind, {}).get(group.name)
        return statistic if statistic is not None and len(statistic) == group.size else None


def loss_changes(
    groups: Iterable[engine.Group],
    model: nn.Module,
    parameters: Iterable[nn.Parameter] | None = None,
    alive: Living | None = None,
) -> dict[str, Tensor]:
    r"""First-order estimate of what zeroing each unit does to the loss, :math:`(\sum_{p \in u} g_p \, w_p)^2`.

    The sum runs over all that zeroing the unit sets to zero, the norm's scale and shift included: in front of a batch
    norm the weights alone sum to nothing, as the loss does not depend on their scale.

    Args:
        groups: dependency groups.
        model: gives weights and gradients.
        parameters: the parameters whose gradients are up to date; all by default.
        alive: what is not masked; all by default.

    Returns:
        Shape ``(size,)`` by group name; groups without a gradient are left out.

    Molchanov et al., "Importance Estimation for Neural Network Pruning", 2019.
    """
    parameter_ids, alive = None if parameters is None else set(map(id, parameters)), alive or Living()
    changes = {}
    for group in groups:
        sums = [part for member in group.members for part in _products(group, member, model, parameter_ids, alive)]
        if sums:
            changes[group.name] = torch.stack(sums).sum(0).square().double()
    return changes


def squared_changes(
    groups: Iterable[engine.Group],
    model: nn.Module,
    parameters: Iterable[nn.Parameter] | None = None,
    alive: Living | None = None,
) -> dict[str, Tensor]:
    r"""Squared gradients times squared weights, :math:`\sum_{p \in u} (g_p \, w_p)^2`, over all that goes with a unit.

    Args:
        groups: dependency groups.
        model: gives weights and gradients.
        parameters: the parameters whose gradients are up to date; all by default.
        alive: what is not masked; all by default.

    Returns:
        Shape ``(size,)`` by group name; groups without a gradient are left out.
    """
    current, alive = None if parameters is None else set(map(id, parameters)), alive or Living()
    changes = {}
    for group in groups:
        sums = [s for member in group.members for s in _products(group, member, model, current, alive, power=2)]
        if sums:
            changes[group.name] = torch.stack(sums).sum(0).double()
    return changes


def squared_output_changes(
    groups: Sequence[engine.Group], model: nn.Module, inputs: Iterable[tuple[tuple[Any, ...], Mapping[str, Any]]]
) -> dict[str, Tensor]:
    """`squared_changes` without a loss: of the outputs, each weighed by a random sign, in eval mode.

    Their mean over signs is the diagonal of the Fisher information of outputs with Gaussian noise.

    Args:
        groups: dependency groups.
        model: its gradients are as before afterwards.
        inputs: positional and keyword arguments.

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
                outputs = [t for t in tensors_in(model(*args, **kwargs)) if t.is_floating_point() and t.requires_grad]
                signs = [torch.randint(2, t.shape, generator=generator).to(t) * 2 - 1 for t in outputs]
                torch.stack([(t * sign).sum() for t, sign in zip(outputs, signs, strict=True)]).sum().backward()
                for name, change in squared_changes(groups, model).items():
                    total[name] = total[name] + change if name in total else change
        finally:
            for parameter, (gradient, requires) in zip(parameters, before, strict=True):
                parameter.grad = gradient
                parameter.requires_grad_(requires)
    return total


def _products(
    group: engine.Group,
    member: engine.Member,
    model: nn.Module,
    parameter_ids: set[int] | None,
    alive: Living,
    power: int = 1,
) -> Iterator[Tensor]:
    weight = model.get_parameter(member.parameter)
    if member.role != "in" and weight.grad is not None and (parameter_ids is None or id(weight) in parameter_ids):
        products = alive.part(member.parameter, weight.detach().float() * weight.grad.float())
        yield unit_sums(products**power if power > 1 else products, member.units, group.size)


class Gatherer:
    """Statistics over the steps of a training, as a callback's hooks hand them in; their sums are its state.

    Args:
        kinds: ``"loss_change"`` and ``"squared_change"`` (of gradients), ``"activity"`` (of what the layers read); none
            gathers nothing.
        every: batches from one look to the next; the first of each epoch is looked at.
    """

    def __init__(self, kinds: Iterable[str], every: int) -> None:
        self.kinds, self.every = frozenset(kinds), every
        self.gathered: Gathered = {}
        self.alive = Living()
        self._meter: ActivityMeter | None = None
        self._groups: Sequence[engine.Group] = ()
        self._inputs: tuple[Any, Any] | None = None
        self._hook: Any = None
        self._batch_due = self._step_due = False

    def watch(self, model: nn.Module, graph: engine.Graph, groups: Sequence[engine.Group]) -> None:
        """Look at a model from now on, until `close`."""
        self.close()
        self._groups = groups
        if "activity" in self.kinds:
            self._meter = ActivityMeter(graph, groups)
            self._hook = model.register_forward_pre_hook(self._remember, with_kwargs=True)

    def close(self) -> None:
        """Look no more; what was gathered stays."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._meter = self._inputs = None
        self._groups = ()

    def __getstate__(self) -> dict[str, Any]:
        # Strategies that spawn processes pickle the callbacks.
        return {**self.__dict__, "_hook": None, "_meter": None, "_inputs": None, "_groups": ()}

    @property
    def watching(self) -> bool:
        """Whether there is a model to look at."""
        return bool(self._groups)

    def _remember(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if self._batch_due and torch.is_grad_enabled():  # a training step's, not the validation's
            self._inputs = args, kwargs

    def on_batch_start(self, trainer: Trainer, batch_idx: int) -> None:
        """Whether to look at this batch, and at the step that it takes, follows from its number: no state."""
        span = trainer.accumulate_grad_batches
        self._batch_due = batch_idx % self.every == 0
        self._step_due = batch_idx // self.every != (batch_idx - span) // self.every

    def on_step(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Look at the gradients, unscaled and reduced over the ranks as they are before the optimizer's step."""
        if self._step_due and "loss_change" in self.kinds:
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            self._add("loss_change", loss_changes(self._groups, model, trained, self.alive))
        if self._step_due and "squared_change" in self.kinds:
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            self._add("squared_change", squared_changes(self._groups, model, trained, self.alive))

    def on_batch_end(self, trainer: Trainer, model: nn.Module) -> None:
        """Look at what the layers read of the last batch, on all ranks together."""
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
        """Keep the statistics of the units that a compaction leaves; the model has to be watched again."""
        for kind, statistics in self.gathered.items():
            fits = {name: value for name, value in statistics.items() if len(kept.get(name, value)) == len(value)}
            self.gathered[kind] = {n: v[kept[n].to(v.device)] if n in kept else v for n, v in fits.items()}

    def state_dict(self) -> Gathered:
        """What was gathered, on the CPU."""
        state: Gathered = to_device(self.gathered, "cpu")
        return state

    def load_state_dict(self, state: Gathered) -> None:
        """Go on with what another run gathered."""
        self.gathered = {kind: dict(statistics) for kind, statistics in state.items()}


def _reduced(trainer: Trainer, sums: list[Tensor]) -> list[Tensor]:
    flat = parallel(trainer).summed(torch.cat([s.flatten() for s in sums]))
    parts = flat.split([s.numel() for s in sums])
    return [part.view_as(total) for part, total in zip(parts, sums, strict=True)]


def unscored_layers(names: Sequence[str], gathers: bool) -> str:
    """What to say where a criterion has no score for any layer.

    Args:
        names: the layers.
        gathers: whether it needs statistics of the training.

    Example:
        >>> unscored_layers(["fc"], gathers=False)
        'The criterion has no score for any layer (fc). Choose another criterion, or other layers.'
    """
    what = f"The criterion has no score for any layer ({', '.join(names[:4])}{', …' if len(names) > 4 else ''})."
    if not gathers:
        return f"{what} Choose another criterion, or other layers."
    return (
        f"{what} It needs statistics gathered during training, and there are none: let pruning start later, and let "
        "`training_step` call the model itself, with gradients."
    )

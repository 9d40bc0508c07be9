r"""Loss that remains when other units compensate for a removed unit (optimal brain surgeon, on Gram matrices).

The output of a layer is :math:`\varphi W`. Without the columns B of a unit, and with the best weights for the others,
its squared error is, with :math:`G = \varphi^\top \varphi + \lambda I`,

.. math:: \operatorname{tr} W_B^\top \, ((G^{-1})_{BB})^{-1} \, W_B
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.analysis.use import Use
from engine.bounds import check_kinds, check_number
from engine.compaction.build import canonical_tensors
from engine.compensation.batches import drawn_rows, inputs_of, samples_in
from engine.compensation.interpreter import Run, check_program, first_path
from engine.compensation.readers import Sum, obstacle, slope_of, sum_of
from engine.compensation.weights import Weights
from engine.groups import Group, units_at
from engine.ops.columns import columns, columns_at
from engine.program.defaults import own_defaults
from engine.program.graph import Graph
from engine.removal.keep import Consumer, consumers
from engine.removal.structure import structure_of
from engine.running.evaluation import evaluating
from engine.running.inputs import check_model
from engine.running.tensor_backup import unwritten
from engine.surgery.kinds.norms import WideNorm, wide_norms
from engine.tracer import trace

__all__ = ["reconstruction_losses"]

_LEAST_RIDGE = 1e-9  # relative to the mean diagonal; below it the inverse is rounding
_TINY = 1e-300


@own_defaults()
def reconstruction_losses(
    model: nn.Module,
    dummy_input: Any,
    groups: Sequence[Group],
    batches: Iterable[Any],
    *,
    samples: int = 1024,
    ridge: float = 1e-3,
    graph: Graph | None = None,
) -> dict[str, Tensor]:
    """Estimate the loss that remains when the other units of a group compensate for each unit.

    The loss is the squared error of the output of each layer that reads the unit, relative to the variance of the
    output, or of the sum that it is added to; summed over layers.

    Args:
        model: the model, which is not changed.
        dummy_input: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        groups: dependency groups of the model.
        batches: unlabelled inputs, as for `compensate`.
        samples: maximum number of samples.
        ridge: as for `compensate`.
        graph: a graph of this model, to save a trace.

    Returns:
        Shape ``(size,)`` by group name; groups without a suitable consumer are omitted.

    Raises:
        InputError: as for `compensate`.

    Example:
        >>> import engine
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        >>> _ = net[1].weight.data.copy_(torch.tensor([[1.0, 0.0, 1.0]]))
        >>> groups = engine.dependency_groups(net, torch.zeros(1, 2))
        >>> losses = reconstruction_losses(net, torch.zeros(1, 2), groups, [torch.randn(64, 2)])
        >>> losses["0"].argmin()
        tensor(1)

    Source: Hassibi and Stork, Second Order Derivatives for Network Pruning, NeurIPS 1992.
    """
    check_kinds(reconstruction_losses, locals())
    check_model(model)
    check_number("samples", samples, 2, whole=True)
    check_number("ridge", ridge, 0)
    graph = trace(model, dummy_input) if graph is None else graph
    graph.check_fresh(model)
    inputs = inputs_of(batches, graph, samples)
    stored = {name: t.detach() for name, t in canonical_tensors(model, graph).items()}
    with torch.no_grad(), evaluating(model), unwritten(model):
        check_program(model, graph, Weights(stored), inputs[0])
        losses: dict[str, Tensor] = {}
        for name, loss in _Losses(graph, stored, inputs, groups, ridge, wide_norms(model)).run():
            losses[name] = losses[name] + loss if name in losses else loss
    return losses


class _Losses:
    """A run of the model that computes the losses at each consumer."""

    def __init__(
        self,
        graph: Graph,
        stored: Mapping[str, Tensor],
        inputs: list[list[Tensor]],
        groups: Sequence[Group],
        ridge: float,
        norms: Mapping[str, WideNorm],
    ) -> None:
        self._norms = norms
        self._graph, self._stored, self._inputs, self._ridge = graph, stored, inputs, ridge
        self._groups = groups
        self._sums: dict[tuple[int, int], Sum | None] = {}
        self._units: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._consumers: dict[int, list[Consumer]] = {}
        for consumer in self._readers():
            self._consumers.setdefault(consumer.node.index, []).append(consumer)

    def _readers(self) -> Iterator[Consumer]:
        structure = structure_of(self._graph)
        constants = Constants(self._graph, structure.rules, self._stored, {})
        users = structure.graph.users()
        for consumer in consumers(structure, constants, Use(structure, constants)):
            units = units_at(consumer.slots, self._groups)
            if consumer.node.path == "eval" and units and obstacle(consumer, self._graph) is None:
                self._units[_key(consumer)] = units
                self._sums[_key(consumer)] = sum_of(self._graph, consumer, users, self._stored)
                yield consumer

    def run(self) -> Iterator[tuple[str, Tensor]]:
        """Yield losses by group name, for each consumer."""
        ends = {at.node.index for at in self._sums.values() if at is not None}
        held = {self._graph.nodes[index].output.index: 1 for index in ends}
        runs = [Run(self._graph, self._stored, tensors, held, self._norms) for tensors in self._inputs]
        waiting: dict[int, list[tuple[int, dict[str, Tensor]]]] = {}
        last = max([*ends, *self._consumers], default=-1)
        for node in first_path(self._graph):
            if node.index > last:
                return
            for consumer in self._consumers.get(node.index, ()):
                losses, scale = self._losses(consumer, runs)
                at, dim = self._sums[_key(consumer)], consumer.contraction.output_dim
                if at is None:
                    yield from ((name, loss / max(scale, _TINY)) for name, loss in losses.items())
                else:
                    waiting.setdefault(at.node.index, []).append((dim, losses))
            for run in runs:
                run.step(node)
            for dim, losses in waiting.pop(node.index, ()):
                scale = _variance([run[node.output] for run in runs], dim)
                yield from ((name, loss / max(scale, _TINY)) for name, loss in losses.items())
            for run in runs if node.index in ends else ():
                run.release(node.output)

    def _losses(self, consumer: Consumer, runs: list[Run]) -> tuple[dict[str, Tensor], float]:
        """Return the mean squared error per output position without each unit, and the variance of the output."""
        c, key = consumer.contraction, _key(consumer)
        sizes = [samples_in(tensors) for tensors in self._inputs]
        phi = torch.cat([self._rows(consumer, run, sizes, number) for number, run in enumerate(runs)]).double()
        mean = phi.mean(0)
        slope, _ = slope_of(self._sums[key], consumer.node.output, c.output_dim, self._stored)
        weight = c.canonical(self._stored[c.weight.name or ""].double())
        weight = weight * slope.to(weight).expand(c.groups * c.outputs).view(c.groups, -1, 1, 1)
        sizes_of = {group.name: group.size for group in self._groups}
        losses = {name: torch.zeros(sizes_of[name], dtype=torch.float64) for name in self._units[key]}
        scale = 0.0
        for g in range(c.groups):
            centred = phi[:, g] - mean[g]
            variance = centred.T @ centred / len(phi)
            scale += float((weight[g].flatten(1) @ variance * weight[g].flatten(1)).sum())
            gram = variance if consumer.sink is not None else phi[:, g].T @ phi[:, g] / len(phi)
            penalty = max(self._ridge, _LEAST_RIDGE) * float(gram.diagonal().mean()) + _TINY
            inverse = torch.linalg.inv(gram + torch.eye(len(gram), dtype=gram.dtype, device=gram.device) * penalty)
            for name, units in self._units[key].items():
                _add(losses[name], inverse, weight[g], units.view(c.groups, c.inputs)[g])
        return losses, scale

    def _rows(self, consumer: Consumer, run: Run, sizes: Sequence[int], number: int) -> Tensor:
        c, node = consumer.contraction, consumer.node
        arguments = run.arguments(node)
        if c.inner:
            rows = columns(node, c, arguments).flatten(0, -3)
            return rows[drawn_rows(node, c, len(rows), sizes, number)]
        out = node.target(**arguments)
        places = drawn_rows(node, c, out.numel() // out.size(c.output_dim), sizes, number)
        return columns_at(node, c, arguments, places)


def _key(consumer: Consumer) -> tuple[int, int]:
    return consumer.node.index, consumer.contraction.weight.index


def _add(losses: Tensor, inverse: Tensor, weight: Tensor, units: Tensor) -> None:
    """Add the loss of each unit at a consumer: ``weight`` is (outputs, inputs, kernel), ``units`` (inputs,)."""
    kernel = weight.shape[2]
    flat = weight.flatten(1)
    counts = units[units >= 0].bincount(minlength=len(losses))
    for count in counts.unique().tolist():
        chosen = (counts == count).nonzero()[:, 0]
        if not count or not len(chosen):
            continue
        order = units.argsort(stable=True)
        inputs = order[torch.isin(units[order], chosen)].view(len(chosen), count)
        columns = (inputs[:, :, None] * kernel + torch.arange(kernel)).flatten(1).to(flat.device)
        part = flat[:, columns].permute(1, 2, 0)
        blocks = inverse[columns[:, :, None], columns[:, None, :]]
        losses[chosen] += (part * torch.linalg.solve(blocks, part)).sum((1, 2)).cpu()


def _variance(values: Sequence[Tensor], dim: int) -> float:
    """Return the sum over channels of the variance of the outputs."""
    rows = torch.cat([value.movedim(dim, -1).flatten(0, -2) for value in values])
    return float(rows.double().var(0, correction=0).sum())

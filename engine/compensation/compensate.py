"""Compensation: least-squares fits of the weights that read masked channels, in data-flow order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.analysis.use import Use
from engine.bounds import check_kinds, check_number
from engine.compaction.build import canonical_tensors
from engine.compensation.batches import drawn_rows, inputs_of, samples_in
from engine.compensation.fit import Correction, correction, squared_error
from engine.compensation.interpreter import Run, advance, check_program, first_path
from engine.compensation.readers import Reader, obstacle, slope_of, sum_of
from engine.compensation.report import Compensated, CompensationReport
from engine.compensation.weights import Alone, Processes, Weights
from engine.errors import EngineError, InputError
from engine.groups import groups_of
from engine.masks import Masks, canonical_masks, load_masks
from engine.ops.columns import columns, columns_at
from engine.program.defaults import own_defaults
from engine.program.dtensors import has_shards, local, placeholders, resharded
from engine.program.graph import Graph, Node
from engine.program.trees import tensors_in
from engine.removal.keep import consumers
from engine.removal.propagate import Structure
from engine.removal.structure import structure_of
from engine.running.inputs import check_model
from engine.running.tensor_backup import unwritten
from engine.surgery.kinds.norms import wide_norms
from engine.tracer import trace

__all__ = ["compensate"]

_HELD_OUT, _NOTHING = 4, 1e-24  # one sample in so many; the fraction of the squared target that is rounding
_NOT_BETTER = "its error on held-out samples did not fall"
_WORSE = "with all layers fitted, the error of the model's outputs on held-out samples rose"


@own_defaults()
def compensate(
    model: nn.Module,
    dummy_input: Any,
    masks: Masks,
    batches: Iterable[Any],
    *,
    samples: int = 1024,
    ridge: float = 1e-3,
    graph: Graph | None = None,
    processes: Processes | None = None,
) -> CompensationReport:
    r"""Fit the weights that read masked channels so that the masked model stays close to the dense one.

    Each reader of masked channels, in data-flow order, gets the weights that minimise

    .. math:: \| T - \varphi(x) W - b \|^2 + \lambda \| W - W_0 \|^2

    where :math:`x` is its input in the masked model with all earlier layers fitted, and :math:`T` its output in the
    dense model. If its output is added to another branch, as in a residual block, :math:`T` is the dense sum minus the
    current other summand, so that a block compensates for errors of earlier blocks. A quarter of the samples is held
    out: a reader whose error does not fall there keeps its weights, and all readers do if the error of the model's
    outputs rises compared to masking alone.

    Args:
        model: the model, in which masked parameters count as zero in eval mode. Weights and biases (or running means
            of norms after layers without a bias) change in place, all or none of them.
        dummy_input: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        masks: ``{module: {parameter: 0/1 tensor}}``, or the path of such a file.
        batches: unlabelled inputs like ``dummy_input``, or pairs of inputs and targets if the model takes one input.
        samples: maximum number of samples (entries along the first dimension of the batches).
        ridge: weight of the penalty, relative to the mean square of the inputs.
        graph: a graph of this model, to save a trace; ignored if parameters are sharded.
        processes: processes that fit the model together, each on its own batches; every process has to call this, and
            all get the same weights. Required if parameters are sharded, of which one at a time is gathered.

    Returns:
        The squared errors by group, before and after, relative to the squared targets, on the held-out samples.

    Raises:
        InputError: if there are too few samples, a batch does not match ``dummy_input`` or is not finite, or the least
            squares have no unique solution; the model is then unchanged.
        MaskError, TraceError: as for `fix_mask_conflict`.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> mask = torch.ones(8, 4)
        >>> mask[:4] = 0
        >>> masks = {"0": {"weight": mask, "bias": mask[:, 0]}}
        >>> report = compensate(net, torch.zeros(1, 4), masks, [torch.randn(256, 4)])
        >>> report["0"].layers, report["0"].after < report["0"].before
        (('2',), True)

    Source: He et al., Channel Pruning for Accelerating Very Deep Neural Networks, ICCV 2017 (arXiv 1707.06168).
    """
    check_kinds(compensate, locals())
    if processes is None:
        check_model(model)
    check_number("samples", samples, 2, whole=True)
    check_number("ridge", ridge, 0)
    graph = _program(model, dummy_input, graph)
    canonical = canonical_masks(load_masks(masks), model)
    if graph.decided:
        raise InputError(
            f"{type(model).__name__} has data-dependent control flow, so its recorded program is not valid for other "
            "data."
        )
    processes = Alone() if processes is None else processes
    inputs = processes.together(lambda: inputs_of(batches, graph, samples))
    untouched = nullcontext() if has_shards(model) else unwritten(model)
    with torch.no_grad(), processes.running(model), untouched:
        fitting = _Fitting(model, graph, canonical, inputs, ridge, processes)
        try:
            check_program(model, graph, fitting.dense, inputs[0])
            resharded(model)
            fitting.run()
            fitting.withdraw_unless_better()
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if isinstance(error, EngineError) or _is_out_of_memory(error):
                raise
            shapes = ", ".join(str(tuple(t.shape)) for t in inputs[0])
            raise InputError(f"The program does not run on batches of {shapes}: {error}") from error
    fitting.commit()
    return fitting.report


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)  # the CPU has no class for it


def _program(model: nn.Module, dummy_input: Any, graph: Graph | None) -> Graph:
    if has_shards(model):  # a graph recorded without data lacks the constants that the code computes
        device = next((tensor.device for tensor in tensors_in(dummy_input)), None)
        with placeholders(model, device=device):
            return trace(model, dummy_input)
    graph = trace(model, dummy_input) if graph is None else graph
    graph.check_fresh(model)
    return graph


class _Fitting:
    """The dense run, the masked run, and the fitted weights."""

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        masks: Mapping[str, Tensor],
        inputs: list[list[Tensor]],
        ridge: float,
        processes: Processes,
    ) -> None:
        self._model, self._graph, self._inputs, self._ridge = model, graph, inputs, ridge
        self._masks, self._processes = masks, processes
        stored = canonical_tensors(model, graph)
        self._changed: dict[str, Tensor] = {}
        self.dense, self._alone = Weights(stored), Weights(stored, masks)
        self._fitted, self._masked = Weights(stored, None, self._changed), Weights(stored, masks, self._changed)
        self._skipped: dict[str, dict[str, str]] = {}
        self._rows: list[tuple[Reader, float, float, float, bool]] = []
        self._withdrawn = False
        self._nodes = first_path(graph)
        self._readers = {reader.key: reader for reader in self._find_readers()}
        self._targets: dict[tuple[int, int], list[Tensor]] = {key: [] for key in self._readers}
        self._places: dict[tuple[int, int], list[Tensor]] = {key: [] for key in self._readers}

    # ------------------------------------------------------------------ which layers

    def _find_readers(self) -> Iterator[Reader]:
        structure = structure_of(self._graph)
        constants = Constants(self._graph, structure.rules, self._masked.outline(), self._masks)
        group_of = _group_names(structure)
        users = structure.graph.users()
        for consumer in consumers(structure, constants, Use(structure, constants)):
            if consumer.node.path != "eval":
                continue
            live = consumer.constants.isnan()
            group = group_of(consumer.slots[~live])
            if group is None or live.all() or not live.any():
                continue
            c = consumer.contraction
            why = obstacle(consumer, self._graph)
            if why is not None:
                self._skipped.setdefault(group, {})[consumer.node.module] = why
                continue
            at = sum_of(self._graph, consumer, users, self._masked)
            yield Reader(group, consumer, live.view(c.groups, c.inputs), at)

    # ------------------------------------------------------------------ the runs

    def run(self) -> None:
        """Run the dense model for the targets, then the masked model, fitting each reader before it runs."""
        if not self._readers:
            return
        self._run_dense()
        runs = self._runs(self._masked, self._inputs)
        last, by_node = max(self._readers)[0], self._by_node(lambda reader: reader.node)
        for node in self._nodes[: next(n for n, node in enumerate(self._nodes) if node.index == last) + 1]:
            for reader in by_node.get(node.index, ()):
                with self._masked.at(node):
                    self._fit(reader, runs)
            advance(runs, [node], self._masked)

    def _runs(
        self, stored: Weights, inputs: Sequence[list[Tensor]], held: Mapping[int, int] | None = None
    ) -> list[Run]:
        norms = wide_norms(self._model)
        return [Run(self._graph, stored, tensors, held, norms) for tensors in inputs]

    def _run_dense(self) -> None:
        ends = self._by_node(lambda reader: reader.node if reader.sum is None else reader.sum.node)
        held = {node.output.index: 1 for node in self._nodes if node.index in ends}
        runs = self._runs(self.dense, self._inputs, held)
        waiting = len(self._readers)
        for node in self._nodes:
            with self.dense.at(node):
                for number, run in enumerate(runs):
                    self._step(number, run, node, ends.get(node.index, ()))
            waiting -= len(ends.get(node.index, ()))
            if not waiting:
                return

    def _step(self, number: int, run: Run, node: Node, readers: Sequence[Reader]) -> None:
        """Run a node of the dense model, and keep the targets of readers that end there."""
        sizes = [samples_in(batch) for batch in self._inputs]
        inside = {r.key: self._inner_output(r, run) for r in readers if r.contraction.inner}
        run.step(node)
        for reader in readers:
            rows = inside[reader.key] if reader.key in inside else _rows(run[node.output], reader)
            places = drawn_rows(reader.node, reader.contraction, len(rows), sizes, number)
            self._places[reader.key].append(places)
            self._targets[reader.key].append(rows[places])
        if readers:
            run.release(node.output)

    def _by_node(self, place: Callable[[Reader], Node]) -> dict[int, list[Reader]]:
        readers: dict[int, list[Reader]] = {}
        for reader in self._readers.values():
            readers.setdefault(place(reader).index, []).append(reader)
        return readers

    def _inner_output(self, reader: Reader, run: Run) -> Tensor:
        """Compute a contraction inside a larger op, such as that of the input in the gates of a recurrent layer."""
        c = reader.contraction
        rows = columns(reader.node, c, run.arguments(reader.node)).flatten(0, -3)
        bias = None if c.bias is None else run[c.bias]
        weight = c.canonical(self.dense[c.weight.name or ""]).flatten(2)
        out = torch.einsum("rgk,gok->rgo", rows, weight).flatten(1)
        return out if bias is None else out + bias

    # ------------------------------------------------------------------ one layer

    def _fit(self, reader: Reader, runs: list[Run]) -> None:
        c = reader.contraction
        weight = c.canonical(self._masked[c.weight.name or ""].double()).flatten(2)
        phi, residual, target = self._system(reader, runs, weight)
        held = self._held_out(reader)
        support, summed = self._support(reader), self._processes.summed
        scale, before = summed(torch.stack([side[held].square().sum() for side in (target, residual)])).tolist()
        if before <= _NOTHING * max(scale, 1e-300):
            return
        shifts = reader.consumer.sink is not None
        changes = [
            correction(
                phi[~held, g], residual[~held, g], support[g], self._ridge, shifts, reader.node.module, self._processes
            )
            for g in range(c.groups)
        ]
        errors = [squared_error(phi[held, g], residual[held, g], change) for g, change in enumerate(changes)]
        after = float(summed(torch.tensor(errors, dtype=torch.float64, device=phi.device).sum()))
        self._rows.append((reader, before, after, scale, after < before))
        if after < before:
            self._change(reader, changes)
        self._targets.pop(reader.key), self._places.pop(reader.key)

    def _system(self, reader: Reader, runs: list[Run], weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the inputs of the weight, the residual and the target, float64, (rows, groups, ...)."""
        c, key = reader.contraction, reader.key
        slope, shift = (t.to(weight) for t in slope_of(reader.sum, reader.node.output, c.output_dim, self._masked))
        ahead: Sequence[Run] = runs
        if reader.sum is not None:
            # in copies of the runs, because layers of the other branch may be fitted later themselves
            ahead = [copy.copy(run) for run in runs]
            advance(ahead, reader.sum.before, self._masked)
        parts: list[tuple[Tensor, Tensor]] = []
        for run, other, places, target in zip(runs, ahead, self._places[key], self._targets[key], strict=True):
            phi = columns_at(reader.node, c, run.arguments(reader.node), places)
            target = target.double()
            if reader.sum is not None:
                target = (target - _rows(other[reader.sum.other], reader)[places].double() - shift) / slope
            parts.append((phi.double(), target))
        phi, target = (torch.cat(column) for column in zip(*parts, strict=True))
        target = target.unflatten(1, (c.groups, c.outputs))
        now = torch.einsum("rgk,gok->rgo", phi, weight)
        if c.bias is not None:
            now += runs[0][c.bias].double().view(c.groups, c.outputs)
        residual = torch.where(target.isfinite(), target - now, 0.0)
        return phi, residual, target.nan_to_num(0.0, 0.0, 0.0)

    def _held_out(self, reader: Reader) -> Tensor:
        """Return a mask of the rows of held-out samples; the rows of a sample are adjacent."""
        sizes = [samples_in(tensors) for tensors in self._inputs]
        each = [len(places) // size for places, size in zip(self._places[reader.key], sizes, strict=True)]
        samples = [torch.arange(size).repeat_interleave(n) for size, n in zip(sizes, each, strict=True)]
        return torch.cat(samples) % _HELD_OUT == 0

    def _support(self, reader: Reader) -> Tensor:
        """Return a mask of the entries of the weight that may change: unmasked ones that read varying inputs."""
        c = reader.contraction
        name = c.weight.name or ""
        shape = c.weight.shape
        mask = self._masks[name].expand(shape) if name in self._masks else torch.ones(shape, dtype=torch.bool)
        return (c.canonical(mask.bool().cpu()) & reader.live[:, None, :, None].cpu()).flatten(2)

    def _change(self, reader: Reader, changes: list[Correction]) -> None:
        c = reader.contraction
        name = c.weight.name or ""
        step = torch.stack([change.weight for change in changes]).view(c.groups, c.outputs, c.inputs, -1)
        if c.transposed:
            step = step.transpose(1, 2)
        weight = self._fitted[name]
        self._fitted.put(name, (weight.double() + step.reshape(weight.shape)).to(weight.dtype))
        sink = reader.consumer.sink
        if sink is not None and sink.name is not None:
            shift = torch.cat([change.shift for change in changes])
            alive = self._masks[sink.name].to(shift.device) if sink.name in self._masks else 1.0
            value = self._fitted[sink.name]
            sign = 1.0 if sink is c.bias else -1.0
            self._fitted.put(sink.name, (value.double() + sign * shift * alive).to(value.dtype))

    # ------------------------------------------------------------------ the result

    def withdraw_unless_better(self) -> None:
        """Discard all changes if they increase the error of the model's outputs on the held-out samples."""
        if not self._changed:
            return
        dense, alone, fitted = (self._outputs(stored) for stored in (self.dense, self._alone, self._masked))
        sums = [
            sum(((one - other).square().nansum() for one, other in zip(dense, outputs, strict=True)), torch.zeros(()))
            for outputs in (alone, fitted)
        ]
        before, after = self._processes.summed(torch.stack(sums)).tolist()
        if not after <= before:
            self._changed.clear()
            self._withdrawn = True

    def _outputs(self, stored: Weights) -> list[Tensor]:
        """Return the outputs of the program on the held-out samples, float64."""
        runs = self._runs(stored, [[t[::_HELD_OUT] if t.ndim else t for t in tensors] for tensors in self._inputs])
        advance(runs, self._nodes, stored)
        values = [run[value] for run in runs for value in self._graph.outputs if value in run]
        return [value.double() for value in values if value.is_floating_point()]

    def commit(self) -> None:
        """Write the new weights into the model."""
        own = canonical_tensors(self._model, self._graph)
        with torch.no_grad():
            for name, value in self._changed.items():
                local(own[name]).copy_(local(value))

    @property
    def report(self) -> CompensationReport:
        """The errors by group."""
        report, why = CompensationReport(), _WORSE if self._withdrawn else _NOT_BETTER
        for group in dict.fromkeys([*(row[0].group for row in self._rows), *self._skipped]):
            rows = [row for row in self._rows if row[0].group == group]
            chosen = [row for row in rows if row[4] and not self._withdrawn]
            scale = sum(row[3] for row in rows) or 1.0
            report[group] = Compensated(
                before=sum(row[1] for row in rows) / scale,
                after=sum(row[2] if row in chosen else row[1] for row in rows) / scale,
                layers=tuple(row[0].node.module for row in chosen),
                skipped={
                    **self._skipped.get(group, {}),
                    **{row[0].node.module: why for row in rows if row not in chosen},
                },
            )
        return report


def _group_names(structure: Structure) -> Any:
    names: dict[int, str] = {}
    for group in groups_of(structure, ()):
        names.update(dict.fromkeys(group.slots.tolist(), group.name))
    roots = structure.roots

    def name(slots: Tensor) -> str | None:
        return next((names[slot] for slot in roots[slots].tolist() if slot in names), None)

    return name


def _rows(tensor: Tensor, reader: Reader) -> Tensor:
    """Return a row for each position of an output, samples first."""
    return tensor.movedim(reader.contraction.output_dim, -1).flatten(0, -2)

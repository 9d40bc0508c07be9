"""Count multiply-accumulates and parameters, before and after compaction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine.bounds import calling, check_kinds, check_number, is_number
from engine.compaction.build import Analysis, analyse
from engine.errors import InputError
from engine.masks import ZEROS, canonical_masks, load_masks, read_masks
from engine.ops import rules_of
from engine.program.defaults import callers_defaults, own_defaults
from engine.program.graph import Graph, Node, Value
from engine.program.stored import copied
from engine.program.trees import map_tensors, tensors_in
from engine.removal.shrink import Shrunk
from engine.rule import Registry
from engine.running.evaluation import evaluating
from engine.running.inputs import check_model
from engine.tracer import trace

__all__ = ["Counter", "count_flops_params"]

Results = dict[str, dict[str, list[Any]]]
CustomOp = Callable[[nn.Module, tuple[Any, ...], Any], Any]
_COLUMNS = ("flops", "params", "weight_size", "input_size", "output_size", "module_type")


@own_defaults()
def count_flops_params(
    model: nn.Module,
    x: Any,
    custom_ops: Mapping[type[nn.Module], CustomOp] | None = None,
    verbose: bool = True,
    mode: str = "default",
    *,
    masks: Any = None,
    batch_dim: int | None = 0,
    graph: Graph | None = None,
    rules: Registry | None = None,
) -> tuple[int, int, Results]:
    """Count the multiply-accumulates and parameters of a model, optionally as after compacting it under masks.

    One multiply-accumulate counts as one FLOP, without biases, as in NNI and fvcore; a counter that counts both
    operations returns twice as much. Functional calls count as well, for the module that makes them.

    Args:
        model: it is only read.
        x: shape of one input (random numbers in the dtype and on the device of the first floating-point parameter), a
            tensor, a tuple of tensors, or a mapping of keyword arguments. Tensors are moved to the model's device.
        custom_ops: module type -> function of (module, tuple of inputs, output) that counts a call of such a module (or
            of a subclass), including everything inside it: returns an integer, or a dict with ``"flops"`` and, if it
            differs from the module's own number, ``"params"``. Both are used as returned, per sample.
        verbose: print a table.
        mode: ``"default"`` counts contractions (convolution, linear …); ``"full"`` also counts one or two operations
            per output element of other ops.
        masks: masks (or a file of these) under which to count the compacted model; ``engine.ZEROS`` for whatever is
            zero in the weights. None: the masks of `torch.nn.utils.prune`, if the model has any.
        batch_dim: the total is divided by the first input's size along this dimension; None returns the total.
        graph: a graph of this model, to avoid recording it again.
        rules: op rules; None uses the model's defaults, see `engine.set_attention`.

    Returns:
        ``(flops, params, results)``; ``results`` maps layer names to lists with one entry per call: ``flops`` and
        ``params`` (plain integers), ``weight_size``, ``input_size``, ``output_size``, ``module_type``; with masks also
        ``masked_flops``, NNI's number, which only accounts for masked outputs.

    Raises:
        InputError: for an unknown mode, an invalid shape, or a custom op that does not return a count.
        MaskError: for masks that do not fit the model.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 5, 1), nn.ReLU(), nn.Conv2d(5, 5, 1))
        >>> flops, params, results = count_flops_params(net, (1, 3, 2, 2), verbose=False)
        >>> flops, params, results["0"]["flops"], results["2"]["params"]
        (160, 50, [60], [30])

    NNI: ``nni.compression.pytorch.utils.counter.count_flops_params``.
    """
    if mode not in ("default", "full"):
        raise InputError(f"`mode` is 'default' or 'full'; got {mode!r}.")
    check_kinds(count_flops_params, locals())
    if batch_dim is not None:
        check_number("batch_dim", batch_dim, 0, whole=True)
    _check_custom(custom_ops or {})
    check_model(model)
    graph = trace(model, _inputs(model, x)) if graph is None else graph
    graph.check_fresh(model)
    if batch_dim and graph.inputs and graph.inputs[0].ndim <= batch_dim:
        raise InputError(f"`batch_dim` is {batch_dim}, but the first input has the shape {graph.inputs[0].shape}.")
    rules = rules_of(graph) if rules is None else rules
    analysis = _analysis(model, graph, rules, masks)
    if analysis is not None:  # it may have recorded a new graph
        graph = analysis.structure.graph
    custom = _Custom(model, graph, analysis, custom_ops or {})
    counter = Counter(graph, rules, None if analysis is None else analysis.kept.shrunk, mode, batch_dim)
    results = counter.results(custom, (name for name, _ in model.named_parameters()))
    total = sum(sum(row["flops"]) for row in results.values())
    params = counter.parameters(model) + custom.extra_params
    if verbose:
        print(_table(total, params, results))
    return total, params, results


def _inputs(model: nn.Module, x: Any) -> Any:
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(0))
    if isinstance(x, (tuple, list)) and x and all(is_number(n, whole=True) for n in x):
        if min(x) < 0:
            raise InputError(f"`x` is the shape of an input, with sizes from 0 on; got {tuple(x)}.")
        return torch.rand(tuple(map(int, x)), dtype=like.dtype, device=like.device)
    return map_tensors(x, lambda tensor: tensor.to(like.device))


def _analysis(model: nn.Module, graph: Graph, rules: Registry, masks: Any) -> Analysis | None:
    masks = read_masks(model) or None if masks is None else masks
    if masks is None:
        return None
    zeros = isinstance(masks, str) and masks == ZEROS
    return analyse(model, graph, rules, None if zeros else canonical_masks(load_masks(masks), model))


def _check_custom(custom_ops: Any) -> None:
    fits = isinstance(custom_ops, Mapping) and all(isinstance(kind, type) for kind in custom_ops)
    if not fits or not all(map(callable, custom_ops.values())):
        raise InputError("`custom_ops` maps types of modules to functions of (module, inputs, output) that count.")


class _Custom:
    """Counts of the user's functions, as rows of the results by module.

    The modules are observed in a real run; with masks, in a run of a compacted copy of the model.
    """

    def __init__(
        self, model: nn.Module, graph: Graph, analysis: Analysis | None, ops: Mapping[type[nn.Module], CustomOp]
    ) -> None:
        self.rows: Results = {}
        self.extra_params = 0
        self._columns = (*_COLUMNS, *(() if analysis is None else ("masked_flops",)))
        if ops:
            model = model if analysis is None else analysis.plan.apply(copied(model))
            self._run(model, graph, ops)

    def owner(self, module: str) -> str | None:
        """Return the outermost module around (or at) a module that a user's function counts."""
        parts = module.split(".")
        around = ["", *(".".join(parts[:n]) for n in range(1, len(parts) + 1))]
        return next((name for name in around if name in self.rows), None)

    def _run(self, model: nn.Module, graph: Graph, ops: Mapping[type[nn.Module], CustomOp]) -> None:
        hooks = []
        for name, module in model.named_modules():
            op = next((ops[kind] for kind in type(module).__mro__ if kind in ops), None)
            if op is not None and self.owner(name) is None:  # nested ones are part of the outer count
                self.rows[name] = {column: [] for column in self._columns}
                hooks.append(module.register_forward_hook(partial(self._count, name, op), with_kwargs=True))
        try:
            with evaluating(model), torch.no_grad(), callers_defaults():
                model(*graph.args, **graph.kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        self.rows = {name: row for name, row in self.rows.items() if row["flops"]}

    def _count(
        self, name: str, op: CustomOp, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        inputs, row = (*args, *kwargs.values()), self.rows[name]
        with calling(f"The custom op of {type(module).__name__} for {name!r}"):
            raw_count = op(module, inputs, output)
        counted = raw_count if isinstance(raw_count, Mapping) else {"flops": raw_count}
        own = sum(p.numel() for p in module.parameters())
        weight = getattr(module, "weight", None)
        row["flops"].append(_integer(counted.get("flops"), module, name))
        row["params"].append(_integer(counted.get("params", own), module, name))
        row["weight_size"].append(tuple(weight.shape) if isinstance(weight, Tensor) else ())
        row["input_size"].append(next((tuple(t.shape) for t in tensors_in(inputs)), ()))
        row["output_size"].append(next((tuple(t.shape) for t in tensors_in(output)), ()))
        row["module_type"].append(type(module).__name__)
        if "masked_flops" in row:
            row["masked_flops"].append(row["flops"][-1])
        if len(row["flops"]) == 1:
            self.extra_params += row["params"][0] - own


def _integer(count: Any, module: nn.Module, name: str) -> int:
    try:
        return int(count)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"The custom op of {type(module).__name__} returns no count for {name!r} ({count!r}); it has to return an "
            "integer, or a dict with 'flops'."
        ) from error


@dataclass(frozen=True, eq=False)
class Counter:
    """Counts the nodes of a graph, with recorded shapes or with those after a removal."""

    graph: Graph
    rules: Registry
    shrunk: Shrunk | None
    mode: str
    batch_dim: int | None

    def shape(self, value: Value) -> tuple[int, ...]:
        """Return the shape of a value to count with."""
        return value.shape if self.shrunk is None else self.shrunk.shape(value)

    def parameters(self, model: nn.Module) -> int:
        """Return the number of the model's parameters."""
        total = 0
        for name, parameter in model.named_parameters():
            value = self.graph.stored.get(name)
            total += parameter.numel() if value is None else math.prod(self.shape(value))
        return total

    def total(self) -> int:
        """Return the multiply-accumulates of the evaluation path."""
        return sum(self._per_sample(self._flops(node)) for node in self.graph.nodes if node.path == "eval")

    def results(self, custom: _Custom, parameters: Iterable[str]) -> Results:
        """Return the table, by first use; modules counted by the user's functions are included."""
        names = set(parameters)
        rows: Results = {}
        for node in self.graph.nodes:
            owner = custom.owner(node.module)
            flops = self._flops(node)
            if owner is not None:
                rows.setdefault(owner, custom.rows[owner])
            elif node.path == "eval" and (flops or self.rules.contractions(node)):
                self._add(rows.setdefault(node.module, {column: [] for column in _COLUMNS}), node, flops, names)
        return {**rows, **custom.rows}

    def _flops(self, node: Node) -> int:
        rule = self.rules.of(node)
        flops = rule.macs(node, self.shape)
        each = rule.elementwise if node.op in self.rules else 1  # at least one per element for an unknown op
        if self.mode == "full" and each and node.outputs:
            flops += each * math.prod(self.shape(node.output))
        return flops

    def _per_sample(self, flops: int) -> int:
        if self.batch_dim is None or not self.graph.inputs or self.graph.inputs[0].ndim <= self.batch_dim:
            return flops
        return flops // max(self.graph.inputs[0].shape[self.batch_dim], 1)

    def _add(self, row: dict[str, list[Any]], node: Node, flops: int, parameters: set[str]) -> None:
        weight = node.args.get("weight")
        source = node.args.get("input", node.inputs[0] if node.inputs else None)
        named = (v for v in map(node.args.get, ("weight", "bias")) if isinstance(v, Value))
        own = {p.index: p for value in named for p in self._behind(value) if p.name in parameters}
        row["flops"].append(self._per_sample(flops))
        row["params"].append(sum(math.prod(self.shape(p)) for p in own.values()))
        row["weight_size"].append(self.shape(weight) if isinstance(weight, Value) else ())
        row["input_size"].append(self.shape(source) if isinstance(source, Value) else ())
        row["output_size"].append(self.shape(node.output))
        row["module_type"].append(self.graph.types[node.module].__name__)
        if self.shrunk is not None:
            row.setdefault("masked_flops", []).append(self._per_sample(self._masked_flops(node, self.shrunk)))

    def _behind(self, value: Value) -> list[Value]:
        """Return the stored values behind a weight (`parametrize`, pruning); none if it depends on an input."""
        sources: dict[int, Value] = {}
        queue = [value]
        while queue:
            head = queue.pop()
            if head.index not in sources:
                sources[head.index] = head
                queue += () if head.producer is None else self.graph.nodes[head.producer].inputs
        return [] if any(v.index in sources for v in self.graph.inputs) else [v for v in sources.values() if v.stored]

    def _masked_flops(self, node: Node, shrunk: Shrunk) -> int:
        """NNI's number: outputs are narrowed, inputs are not."""
        macs = self.rules.of(node).macs(node, lambda value: value.shape)
        c = self.rules.contraction(node)
        return macs if c is None else macs * shrunk.shape(c.output)[c.output_dim] // c.output.shape[c.output_dim]


def _table(flops: int, params: int, results: Mapping[str, Mapping[str, list[Any]]]) -> str:
    rows = [("Name", "Type", "Weight", "FLOPs", "Params")]
    for name, row in results.items():
        for call, count in enumerate(row["flops"]):
            sizes = tuple(row["weight_size"][call])
            rows.append((name, row["module_type"][call], str(sizes), f"{count:,}", f"{row['params'][call]:,}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, f"FLOPs total: {flops:,} (multiply-accumulates)", f"Params total: {params:,}"])

"""Multiply-accumulates and parameters, now and after compaction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from engine.build import analyse
from engine.errors import InputError
from engine.graph import Graph, Node, Value
from engine.masks import ZEROS, canonical_masks, load_masks
from engine.ops import RULES
from engine.rule import Registry, Shapes
from engine.shrink import Shrunk
from engine.tracer import trace

__all__ = ["count_flops_params"]

Results = dict[str, dict[str, list[Any]]]
_COLUMNS = ("flops", "params", "weight_size", "input_size", "output_size", "module_type")


def count_flops_params(
    model: nn.Module,
    x: Any,
    custom_ops: None = None,
    verbose: bool = True,
    mode: str = "default",
    *,
    masks: Any = None,
    batch_dim: int | None = 0,
    graph: Graph | None = None,
    rules: Registry = RULES,
) -> tuple[int, int, Results]:
    """Count the multiply-accumulates and parameters of a model, also as it will be once masks are compacted.

    One multiply-accumulate counts as one FLOP, bias not counted, as NNI and fvcore do; a counter that counts both steps
    gives twice as much. Functional calls count as well, under the module that makes them.

    Args:
        model: it is only read.
        x: shape of one input (random numbers in the dtype and on the device of the first floating parameter), a
            tensor, a
            tuple of tensors, or a mapping of keyword arguments.
        custom_ops: not supported; register a rule with ``macs`` for the op instead.
        verbose: print a table.
        mode: ``"default"`` counts contractions (convolution, linear …); ``"full"`` other ops too.
        masks: masks (or a file of these) under which to count what the compacted model will have; ``engine.ZEROS`` for
            whatever is zero in the weights.
        batch_dim: the total is divided by the first input's size along this dimension; None gives the total.
        graph: a graph of this model, to save recording it.
        rules: what is known of ops.

    Returns:
        ``(flops, params, results)``; results by layer name are lists with one entry per call: ``flops`` and ``params``
        (plain integers), ``weight_size``, ``input_size``, ``output_size``, ``module_type``; under masks also
        ``masked_flops``, NNI's number, which knows of masked outputs only.

    Raises:
        InputError: for an unknown mode or custom ops.
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
    if custom_ops is not None:
        raise InputError("`custom_ops` is not supported; register a rule with `macs` for the op instead.")
    graph = trace(model, _inputs(model, x)) if graph is None else graph
    graph.check_fresh(model)
    shrunk = _shrunk(model, graph, rules, masks)
    shapes: Shapes = (lambda value: value.shape) if shrunk is None else shrunk.shape
    results: Results = {}
    total = 0
    for node in graph.nodes:
        flops = _flops(node, rules, shapes, mode)
        if node.path == "eval" and (flops or rules.contraction(node) is not None):
            flops = _per_sample(flops, graph, batch_dim)
            total += flops
            _add_row(results, node, graph, shapes, flops, rules, shrunk, batch_dim)
    params = _parameters(model, graph, shapes)
    if verbose:
        print(_table(total, params, results))
    return total, params, results


def _inputs(model: nn.Module, x: Any) -> Any:
    if isinstance(x, (tuple, list)) and x and all(isinstance(n, int) for n in x):
        like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(0))
        return torch.rand(tuple(x), dtype=like.dtype, device=like.device)
    return x


def _shrunk(model: nn.Module, graph: Graph, rules: Registry, masks: Any) -> Shrunk | None:
    if masks is None:
        return None
    zeros = isinstance(masks, str) and masks == ZEROS
    canonical = None if zeros else canonical_masks(load_masks(masks), model)
    return analyse(model, graph, rules, canonical).kept.shrunk


def _flops(node: Node, rules: Registry, shapes: Shapes, mode: str) -> int:
    rule = rules.rule(node.op)
    flops = rule.macs(node, shapes)
    if mode == "full" and rule.elementwise:
        flops += rule.elementwise * math.prod(shapes(node.output))
    return flops


def _per_sample(flops: int, graph: Graph, batch_dim: int | None) -> int:
    """Divide by the batch size; an op that does not see the batch counts as it is."""
    if batch_dim is None or not graph.inputs or graph.inputs[0].ndim <= batch_dim:
        return flops
    return flops // max(graph.inputs[0].shape[batch_dim], 1)


def _add_row(
    results: Results,
    node: Node,
    graph: Graph,
    shapes: Shapes,
    flops: int,
    rules: Registry,
    shrunk: Shrunk | None,
    batch_dim: int | None,
) -> None:
    row = results.setdefault(node.module, {column: [] for column in _COLUMNS})
    weight = node.args.get("weight")
    source = node.args.get("input", node.inputs[0] if node.inputs else None)
    row["flops"].append(flops)
    row["params"].append(sum(math.prod(shapes(v)) for v in _own(node)))
    row["weight_size"].append(shapes(weight) if isinstance(weight, Value) else ())
    row["input_size"].append(shapes(source) if isinstance(source, Value) else ())
    row["output_size"].append(shapes(node.output))
    row["module_type"].append(graph.types[node.module].__name__)
    if shrunk is not None:
        row.setdefault("masked_flops", []).append(_masked_flops(node, rules, shrunk, graph, batch_dim))


def _own(node: Node) -> list[Value]:
    """Parameters of the call: weight and bias, not running statistics."""
    named = (node.args.get(name) for name in ("weight", "bias"))
    return [v for v in named if isinstance(v, Value) and v.stored]


def _masked_flops(node: Node, rules: Registry, shrunk: Shrunk, graph: Graph, batch_dim: int | None) -> int:
    """NNI's number: the outputs shrink, the inputs do not."""
    macs = rules.rule(node.op).macs(node, lambda value: value.shape)
    c = rules.contraction(node)
    if c is not None:
        macs = macs * shrunk.shape(c.output)[c.output_dim] // c.output.shape[c.output_dim]
    return _per_sample(macs, graph, batch_dim)


def _parameters(model: nn.Module, graph: Graph, shapes: Shapes) -> int:
    total = 0
    for name, parameter in model.named_parameters():
        value = graph.stored.get(name)
        total += parameter.numel() if value is None else math.prod(shapes(value))
    return total


def _table(flops: int, params: int, results: Mapping[str, Mapping[str, list[Any]]]) -> str:
    rows = [("Name", "Type", "Weight", "FLOPs", "Params")]
    for name, row in results.items():
        for call, count in enumerate(row["flops"]):
            sizes = tuple(row["weight_size"][call])
            rows.append((name, row["module_type"][call], str(sizes), f"{count:,}", f"{row['params'][call]:,}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, f"FLOPs total: {flops:,} (multiply-accumulates)", f"Params total: {params:,}"])

"""Modules narrowed by a user's function: how they transform channels is measured by running them.

Where entry ``i`` of the output depends on entry ``i`` of the inputs only, slots propagate. Otherwise the output
channels are new slots, and an input channel can be removed only if it is constantly zero. Parameters are never cut
here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.analysis.constants import Constants
from engine.analysis.constraints import NonEmpty
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.program.arrays import support
from engine.program.graph import Node, Value
from engine.recording.recorder import MODULE
from engine.rule import Rule, Statistic
from engine.running.probe import Probe, channel_inputs, channel_outputs

__all__ = ["LITERAL", "RULES"]

LITERAL = torch.ops.aten.lift_fresh.default
"""The op that torch calls to create a tensor from literals in the code."""


def _labels(node: Node, labels: Labels) -> None:
    passes, inputs, outputs = Probe(node).passes(), channel_inputs(node), channel_outputs(node)
    for value in node.inputs if outputs else (*node.inputs, *node.outputs):
        if value not in inputs or not outputs:
            labels.freeze(value, f"belongs to {node.module!r}, which a user's function narrows")
    dim = None if passes and _passes_all(inputs, passes, labels) else _mixed_dim(inputs[:1], passes, labels)
    for value in inputs:
        for layer in labels.layers(value):
            touched = support(layer)
            if not set(touched) <= set(passes) and touched != (dim,):
                labels.slots.freeze(layer, f"{node!r} mixes it with other dimensions")
            for out in outputs if set(touched) <= set(passes) else ():
                labels.add(out, layer)
    _tie_inputs(inputs, passes, labels)
    first = next(n for n in labels.graph.nodes if n.op == node.op and n.module == node.module)
    if first is not node:
        _tie_calls(first, node, labels)
    elif dim is not None:
        for out in outputs:
            _new_channels(out, _output_dim(inputs[0], out, dim), labels)


def _passes_all(inputs: Sequence[Value], passes: Sequence[int], labels: Labels) -> bool:
    """Whether all labelled dimensions propagate."""
    touched = {d for value in inputs for layer in labels.layers(value) for d in support(layer)}
    return bool(touched) and touched <= set(passes)


def _mixed_dim(inputs: Sequence[Value], passes: Sequence[int], labels: Labels) -> int | None:
    """The dimension of the channels that the module mixes; None if there is none or it is ambiguous."""
    for value in inputs:
        mixed = [d for d in range(1, value.ndim) if d not in passes and value.shape[d] > 1]
        layers = [layer for layer in labels.layers(value) if not labels.slots.frozen(layer).all()]
        labelled = [d for d in mixed if any(support(layer) == (d,) for layer in layers)]
        if len(labelled) == 1:
            return labelled[0]
        if not labelled and not passes and (len(mixed) == 1 or mixed[:1] == [1] and value.ndim != 3):
            return mixed[0]
    return None


def _output_dim(value: Value, out: Value, dim: int) -> int:
    if out.ndim == value.ndim:
        return dim
    return out.ndim - 1 if dim == value.ndim - 1 else 1


def _new_channels(out: Value, dim: int, labels: Labels) -> None:
    if 0 < dim < out.ndim:
        for layer in labels.fresh(out, [dim]):
            labels.born.append(layer.reshape(-1))
            labels.constraints.append(NonEmpty(layer.reshape(-1)))
            labels.add(out, layer)


def _tie_inputs(inputs: Sequence[Value], passes: Sequence[int], labels: Labels) -> None:
    """Tie all inputs along the dimensions that propagate."""
    for value in inputs[1:]:
        for dim in passes:
            _tie(inputs[0], value, dim, labels)


def _tie_calls(first: Node, again: Node, labels: Labels) -> None:
    """Tie all calls of the module, since the user's function is called once for all of them."""
    pairs = list(zip(channel_inputs(first), channel_inputs(again), strict=False))
    for a, b in pairs:
        for dim in range(1, max(a.ndim, b.ndim)):
            _tie(a, b, dim, labels)
    for a, b in zip(channel_outputs(first), channel_outputs(again), strict=False):
        for layer in list(labels.layers(a)):
            fits = a.ndim == b.ndim and all(a.shape[d] == b.shape[d] for d in support(layer))
            if fits:
                labels.add(b, layer)
            else:
                labels.slots.freeze(layer, f"{again!r} is called on tensors of several sizes")


def _tie(a: Value, b: Value, dim: int, labels: Labels) -> None:
    rows = [labels.along(v, dim) if dim < v.ndim else None for v in (a, b)]
    slot_rows = [row for row in rows if row is not None]
    if len(slot_rows) == 2 and len(slot_rows[0]) == len(slot_rows[1]):
        labels.slots.union(slot_rows[0], slot_rows[1])
    else:
        for row in slot_rows:
            labels.slots.freeze(row, "meets a tensor of fixed size in a module that is replaced")


def _constants(node: Node, constants: Constants) -> Sequence[Tensor] | None:
    """The outputs for constant channels where channels propagate; otherwise zeros where masks leave nothing."""
    stored, kept = _inside(node, constants)
    probe = Probe(node, stored, constants.training)
    zeros = probe.zeros(kept) if any(not k.all() for k in kept.values()) else None
    outputs = channel_outputs(node)
    arrays = [torch.full([1] * v.ndim, torch.nan, dtype=torch.float64) for v in node.outputs]
    start = node.args["results"][0]
    inputs = channel_inputs(node)
    for dim in probe.passes():
        input_rows = [_along(constants, value, dim) for value in inputs]
        if not torch.stack(input_rows).isnan().any(0).all():
            rows = probe.constants(dim, input_rows)
            arrays[start : start + len(outputs)] = [_spread(row, v, dim) for row, v in zip(rows, outputs, strict=True)]
            break
    for position, (dim, dead) in enumerate(zeros if outputs and zeros else (), start):
        if dead.any():
            zero = _spread(dead.double(), node.outputs[position], dim) != 0
            arrays[position] = torch.where(zero, 0.0, arrays[position])
    return arrays


def _inside(node: Node, constants: Constants) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The module's masked parameters and its buffers, and which entries of the parameters can be nonzero."""
    stored: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {}
    module, graph = node.args["module"], constants.graph
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        value = graph.stored[graph.aliases[f"{node.module}.{name}" if node.module else name]]
        if tensor.is_floating_point() and not tensor.is_meta:
            stored[name] = constants[value].expand(value.shape).to(tensor.device)
            if constants.is_parameter(value):
                kept[name] = ~constants.zero(value)
    return stored, kept


def _along(constants: Constants, value: Value, dim: int) -> Tensor:
    row = constants.along(value, dim)
    return torch.where(row == 0, row, torch.nan) if constants.has_profile(value) else row


def _spread(row: Tensor, value: Value, dim: int) -> Tensor:
    return row.view([-1 if d == dim else 1 for d in range(value.ndim)])


def _use(node: Node, use: Use) -> None:
    passes, inputs = Probe(node).passes(), channel_inputs(node)
    for value in node.inputs:
        if value not in inputs or not passes:
            use.add_all(value)
            continue
        for out in channel_outputs(node):
            used = use[out]
            for dim in range(used.ndim):
                used = used if dim in passes else used.any(dim, keepdim=True)
            use.add(value, used)


def _reads_zeros(node: Node) -> Iterable[Statistic]:
    passes = Probe(node).passes()
    for value in channel_inputs(node):
        yield from (Statistic(value, dim) for dim in range(1, value.ndim) if dim not in passes)


RULES = [Rule((MODULE,), _labels, _constants, _use, only_zeros=_reads_zeros)]

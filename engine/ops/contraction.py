"""Convolutions (1d–3d, dense, grouped, depthwise with any multiplier), transposed convolutions, linear layers.

All compute ``y[k, o] = b[k, o] + Σ_i W[k, o, i] * x[k, i]``; `engine.program.contraction` describes this common form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from engine.analysis.constants import Constants
from engine.analysis.constraints import Grouped, NonEmpty
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops.samples import chain
from engine.ops.stacks import indices_of, matrix_of
from engine.program.arrays import any_over
from engine.program.contraction import Contraction
from engine.program.graph import Node, Value
from engine.rule import Demand, Rule, Sample, Shapes, as_recorded

__all__ = ["RULES", "contract", "output_constants", "once", "used"]

T = TypeVar("T")


def _all_equal(numbers: Any, value: int) -> bool:
    return all(n == value for n in (numbers if isinstance(numbers, (list, tuple)) else [numbers]))


def once(describe: Callable[[Node], T]) -> Callable[[Node], T]:
    """Cache the description of each node, which all analyses ask for."""
    descriptions: WeakKeyDictionary[Node, T] = WeakKeyDictionary()

    def described(node: Node) -> T:
        if node not in descriptions:
            descriptions[node] = describe(node)
        return descriptions[node]

    return described


@once
def _convolution(node: Node) -> Contraction:
    a, transposed = node.args, "transpose" in node.op
    weight, padding = a["weight"], a["padding"]
    channel = a["input"].ndim - weight.ndim + 1  # an unbatched input has its channels first
    if transposed:  # each output position sees another part of the kernel, unless the kernel has only one element
        plain = _all_equal(weight.shape[2:], 1) and _all_equal(a["stride"], 1)
    else:
        plain = _all_equal(weight.shape[2:], 1) if padding == "same" else True
    padded = padding not in ("valid", "same") and not _all_equal(padding, 0)
    return Contraction(
        input=a["input"],
        weight=weight,
        bias=a["bias"],
        output=node.output,
        input_dim=channel,
        output_dim=channel,
        groups=a["groups"],
        transposed=transposed,
        bordered=padded or not plain,
    )


@once
def _deformed(node: Node) -> Contraction:
    """A convolution that samples its input at offset positions, with zeros outside the image."""
    a = node.args
    bias = a["bias"] if a["bias"].stored else None  # torchvision creates zeros for a layer without a bias
    return Contraction(a["input"], a["weight"], bias, node.output, 1, 1, a["groups"], False, True)


@once
def _linear(node: Node) -> Contraction:
    a, last = node.args, node.args["input"].ndim - 1
    matrix, bias = matrix_of(a["weight"]), None if _beside(node) is not None else a["bias"]
    if matrix is None or matrix.first is None:
        return Contraction(a["input"], a["weight"], bias, node.output, last, last, 1, False, False)
    stack = matrix.stacked
    return Contraction(a["input"], matrix.weight, bias, node.output, last, last, 1, not matrix.first, stack > 0, stack)


def _beside(node: Node) -> Value | None:
    """The bias of a linear function if it is a matrix instead of a vector: one row, or one row per sample."""
    bias: Value | None = node.args["bias"]
    return None if bias is None or bias.ndim == 1 else bias


def contract(node: Node, labels: Labels, c: Contraction, running: Container[int] = ()) -> None:
    """Tie inputs and outputs to the weight; ``running``: dimensions of its stack that another operand shares."""
    if labels.regrouped(c):
        for value in node.inputs:
            labels.freeze(value, f"a weight is read with different numbers of groups ({node!r})")
        return
    outputs = labels.outputs_of(c)
    if outputs is None:
        outside = c.weight.producer is None
        why = "belongs to no module of the model" if outside else "is computed by an op without a rule"
        for value in node.inputs:
            labels.freeze(value, f"the weight {why} ({node!r})")
        return
    for dim in c.kernel_dims:
        if dim not in running:
            labels.fix(c.weight, dim)
    inputs = labels.along(c.input, c.input_dim)
    if c.depthwise:
        if inputs is None:
            labels.slots.freeze(outputs, f"depthwise on channels that cannot be removed ({node!r})")
        else:
            labels.slots.union(inputs, outputs.reshape(-1))
    else:
        groups = None if inputs is None else inputs.view(c.groups, c.inputs)
        if c.inputs > 1 or c.transposed:
            fixed = groups if groups is not None else torch.zeros(c.groups, c.inputs, dtype=torch.long)
            labels.add(c.weight, c.layout(fixed[:, None, :]))
        if groups is not None:
            labels.constraints.append(NonEmpty(groups.reshape(-1)))
        if c.groups > 1:
            labels.constraints.append(Grouped(groups, outputs, _can_drop_groups(node, labels)))
    if c.bias is not None:
        labels.add(c.bias, outputs.reshape(-1))
    shape = [-1 if d == c.output_dim else 1 for d in range(c.output.ndim)]
    labels.add(c.output, outputs.reshape(shape))
    if c.depthwise and not _can_drop_groups(node, labels):
        labels.slots.freeze(outputs, f"groups={c.groups} is not an attribute of the layer ({node!r})")


def _can_drop_groups(node: Node, labels: Labels) -> bool:
    """Whether the number of groups can be changed: the owner has it as an attribute, or it is computed from sizes."""
    group_count = labels.graph.attributes.get(node.module, {}).get("groups")
    return ("groups", 0) in node.sizes or group_count == node.args["groups"]


def _convolution_labels(node: Node, labels: Labels) -> None:
    """Positions propagate if the kernel has a single element and visits each of them."""
    c = _convolution(node)
    whole = _all_equal(c.weight.shape[2:], 1) and _all_equal(node.args["stride"], 1)
    passes = whole and not c.bordered and _all_equal(node.args.get("output_padding", 0), 0)
    spatial = [] if passes else range(c.input_dim + 1, c.input.ndim)
    _pass_others(labels, c, labels.without(c.input, spatial, f"the kernel of {node!r} runs over it"))
    contract(node, labels, c)


def _pass_others(labels: Labels, c: Contraction, layers: Iterable[Tensor]) -> None:
    """Propagate labels of dimensions other than the channels."""
    labels.along(c.input, c.input_dim)
    for layer in layers:
        if layer.size(c.input_dim) == 1:
            labels.add(c.output, layer)


def _deformed_labels(node: Node, labels: Labels) -> None:
    """Offsets and modulation are shared by all channels, unless there are several offset groups."""
    c, a = _deformed(node), node.args
    for value in (a["offset"], a["mask"]):
        labels.freeze(value, f"{node!r} reads where it says")
    shared = a["offset_groups"] == 1
    labels.without(c.input, [0, 2, 3] if shared else [0, 1, 2, 3], f"{node!r} runs over it")
    contract(node, labels, c)
    outputs = labels.along(node.output, 1)
    if outputs is not None:
        labels.add(a["bias"], outputs)


def _deformed_used(node: Node, use: Use) -> None:
    used(node, use, _deformed(node))
    for name in ("offset", "mask"):
        use.add_all(node.args[name])


def _linear_labels(node: Node, labels: Labels) -> None:
    c, row = _linear(node), _beside(node)
    _pass_others(labels, c, labels.layers(c.input))
    contract(node, labels, c)
    outputs = None if row is None else labels.along(node.output, c.output_dim)
    if row is not None and outputs is not None and row.shape == (1, len(outputs)):
        labels.add(row, outputs[None])
    elif row is not None:
        for value in (row, node.output):
            labels.freeze(value, f"the bias of {node!r} is a matrix")


def _linear_constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    array, row = output_constants(node, constants, _linear(node))[0], _beside(node)
    if row is None:
        return [array]
    beside = constants[row] if row.shape[0] == 1 else torch.full([1], math.nan, dtype=torch.float64)
    return [array + beside.reshape([1] * (array.ndim - 1) + [-1])]


def output_constants(node: Node, constants: Constants, c: Contraction) -> Sequence[Tensor]:
    """``c_o = b_o + Σ W[o, i] c_i``, unless an input that varies or meets a border has a nonzero weight."""
    x = constants.along(c.input, c.input_dim).reshape(c.groups, c.inputs).numpy()
    links, varies = constants.links(c), np.isnan(x)
    constant = np.zeros_like(varies)
    if not constants.only_zeros(c.input):
        if constants.bordered(node, c):
            varies = x != 0
        constant = (x != 0) & ~varies
    unknown = links.reached(varies)
    if unknown.all():
        return [torch.full([1] * c.output.ndim, math.nan, dtype=torch.float64)]
    result = torch.zeros(unknown.shape, dtype=torch.float64)
    if constant.any():
        kernel = c.canonical(constants[c.weight].expand(c.weight.shape)).sum(-1)
        result = (kernel * torch.from_numpy(np.where(constant, x, 0.0))[:, None]).sum(-1)
    if c.bias is not None:
        bias = constants[c.bias].expand(c.groups * c.outputs).view(c.groups, c.outputs)
        result = result + torch.where(links.outputs(), bias, 0.0) if constants.repaired else result + bias
    shape = [-1 if d == c.output_dim else 1 for d in range(c.output.ndim)]
    return [result.masked_fill(torch.from_numpy(unknown), math.nan).reshape(shape)]


def used(node: Node, use: Use, c: Contraction, order: Sequence[int] | None = None) -> None:
    """``x_i`` is used where a used output reads it with a nonzero weight; so is whatever selects the weight.

    ``order``: the output dimension of each input dimension, where the two agree except for the channels.
    """
    outputs = use.along(c.output, c.output_dim).reshape(c.groups, c.outputs).numpy()
    inputs = torch.from_numpy(use.constants.links(c).feeding(outputs).reshape(-1))
    shape = [-1 if d == c.input_dim else 1 for d in range(c.input.ndim)]
    if order is None and c.input.ndim == c.output.ndim and c.input_dim == c.input.ndim - 1:
        order = range(c.input.ndim)  # a linear layer leaves other dimensions alone
    if order is not None:
        use.add(c.input, inputs.view(shape) & any_over(use[c.output], [c.output_dim]).permute(*order))
    else:
        use.add(c.input, inputs.view(shape))
    use.add_beside([c.bias], use.along(c.output, c.output_dim))
    for value in node.inputs:
        if not value.stored and value is not c.input and value is not c.bias:
            for what in [value] if value is c.weight else indices_of(value):
                use.add_all(what)


def _macs(node: Node, shapes: Shapes, c: Contraction) -> int:
    """Number of weight elements times the positions at which each is applied, without the bias."""
    weight, inputs, outputs = shapes(c.weight), shapes(c.input), shapes(c.output)
    if c.stacked:
        return math.prod(outputs) * inputs[c.input_dim]
    channels = inputs[c.input_dim] if c.transposed else outputs[c.output_dim]
    positions = math.prod(inputs if c.transposed else outputs) // max(channels, 1)
    return math.prod(weight) * positions


def _convolution_attributes(node: Node, shapes: Shapes) -> Mapping[str, int]:
    c = _deformed(node) if "offset" in node.args else _convolution(node)
    weight = shapes(c.weight)
    inputs, outputs = shapes(c.input)[c.input_dim], shapes(c.output)[c.output_dim]
    per_group = outputs if c.transposed else inputs
    return {"in_channels": inputs, "out_channels": outputs, "groups": per_group // weight[1]}


def _demands(node: Node, kept: Any, shapes: Shapes) -> Iterable[Demand]:
    """Update the number of groups; all other numbers (strides, paddings) stay as recorded."""
    for demand in as_recorded(node, kept, shapes):
        if demand.argument[0] == "groups":
            yield Demand(demand.argument, demand.original, _convolution_attributes(node, shapes)["groups"])
        else:
            yield demand


def _linear_attributes(node: Node, shapes: Shapes) -> Mapping[str, int]:
    outputs, inputs = shapes(node.args["weight"])
    return {"in_features": inputs, "out_features": outputs}


def _convolution_samples() -> Iterable[Sample]:
    yield Sample(lambda: chain(nn.Conv1d(3, 8, 3, padding=1), nn.Conv1d(8, 6, 3), flat=True), (2, 3, 9), "conv1d")
    yield Sample(
        lambda: chain(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 6, 3, padding=1)), (2, 3, 6, 6), "conv2d padded"
    )
    yield Sample(lambda: chain(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3, padding="same")), (2, 3, 6, 6), "conv2d same")
    yield Sample(lambda: chain(nn.Conv3d(2, 6, 2), nn.Conv3d(6, 4, 2, padding=1)), (2, 2, 4, 4, 4), "conv3d")
    yield Sample(lambda: chain(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 12, 3, groups=4)), (2, 3, 6, 6), "grouped")
    yield Sample(lambda: chain(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)), (2, 3, 6, 6), "depthwise")
    yield Sample(lambda: chain(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 12, 3, groups=4)), (2, 3, 6, 6), "depthwise multiplier")
    yield Sample(lambda: chain(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 1, 3), nn.Conv2d(1, 6, 1)), (2, 3, 6, 6), "one output")
    yield Sample(
        lambda: chain(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 3, padding=1, padding_mode="reflect")),
        (2, 3, 6, 6),
        "reflect",
    )


def _transposed_samples() -> Iterable[Sample]:
    yield Sample(lambda: chain(nn.Conv1d(3, 6, 1), nn.ConvTranspose1d(6, 4, 3, stride=2)), (2, 3, 5), "transposed 1d")
    yield Sample(
        lambda: chain(nn.Conv2d(3, 6, 1), nn.ConvTranspose2d(6, 8, 4, stride=2, padding=1)), (2, 3, 5, 5), "transposed"
    )
    yield Sample(
        lambda: chain(nn.Conv2d(3, 8, 1), nn.ConvTranspose2d(8, 12, 2, stride=2, groups=4)), (2, 3, 4, 4), "grouped"
    )
    yield Sample(
        lambda: chain(nn.Conv2d(3, 6, 1), nn.ConvTranspose2d(6, 6, 3, groups=6)), (2, 3, 4, 4), "depthwise transposed"
    )
    yield Sample(lambda: chain(nn.Conv3d(2, 4, 1), nn.ConvTranspose3d(4, 6, 2)), (2, 2, 3, 3, 3), "transposed 3d")


def _linear_samples() -> Iterable[Sample]:
    yield Sample(lambda: nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)), (2, 5), "linear")
    yield Sample(lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3, bias=False)), (2, 4, 5), "tokens")


def _rule(ops: str, describe: Callable[[Node], Contraction], labels: Any, attributes: Any, samples: Any) -> Rule:
    """Return the rule for ops whose contraction ``describe`` returns."""
    return Rule(
        ops=tuple(ops.split()),
        labels=labels,
        constants=lambda node, constants: output_constants(node, constants, describe(node)),
        use=lambda node, use: used(node, use, describe(node)),
        macs=lambda node, shapes: _macs(node, shapes, describe(node)),
        demands=_demands,
        attributes=attributes,
        contraction=describe,
        samples=samples,
    )


_CONVOLUTION = (_convolution, _convolution_labels, _convolution_attributes)

RULES = [
    _rule("conv1d conv2d conv3d", *_CONVOLUTION, _convolution_samples),
    _rule("conv_transpose1d conv_transpose2d conv_transpose3d", *_CONVOLUTION, _transposed_samples),
    replace(
        _rule("torchvision::deform_conv2d", _deformed, _deformed_labels, _convolution_attributes, tuple),
        use=_deformed_used,
    ),
    replace(
        _rule("linear", _linear, _linear_labels, _linear_attributes, _linear_samples),
        constants=_linear_constants,
    ),
]

"""A common form of all ops that contract channels with a weight: ``y[k, o] = b[k, o] + Σ_i W[k, o, i] * x[k, i]``.

Convolutions, transposed convolutions and linear layers differ in the layout of their weight; the common layout is
(groups, outputs per group, inputs per group, kernel). If a weight is a stack of matrices, one of which is selected for
each token (mixtures of experts), the stack takes the place of the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.program.graph import Value

__all__ = ["Contraction"]


@dataclass(frozen=True)
class Contraction:
    """How a node contracts channels with a weight.

    Attributes:
        input, weight, bias, output: the values involved. Inside a larger op, the weight stands in for an input or
            output that is not a value of the graph.
        input_dim, output_dim: channel dimension of input and output.
        groups: number of groups.
        transposed: whether the weight has its inputs first, as in transposed convolutions.
        bordered: whether a constant input produces an output that differs between positions (zero padding, transposed
            convolution), so that it can only be folded into another constant channel and not into the bias.
        stacked: number of stack dimensions in front of the weight's matrices.
    """

    input: Value
    weight: Value
    bias: Value | None
    output: Value
    input_dim: int
    output_dim: int
    groups: int
    transposed: bool
    bordered: bool
    stacked: int = 0

    @property
    def output_place(self) -> int:
        """Dimension of the weight along its outputs."""
        return self.stacked + self.transposed

    @property
    def input_place(self) -> int:
        """Dimension of the weight along its inputs."""
        return self.stacked + (not self.transposed)

    @property
    def kernel_dims(self) -> list[int]:
        """All other dimensions of the weight."""
        return [d for d in range(self.weight.ndim) if d not in (self.output_place, self.input_place)]

    @property
    def hidden(self) -> bool:
        """Whether the input is not a value of the graph, so that the weight stands in for it."""
        return self.input is self.weight

    @property
    def inner(self) -> bool:
        """Whether the output is not a value of its own, so that the weight stands for it."""
        return self.output is self.weight

    @property
    def outputs(self) -> int:
        """Number of outputs per group."""
        return self.output.shape[self.output_dim] // self.groups

    @property
    def inputs(self) -> int:
        """Number of inputs per group."""
        return self.input.shape[self.input_dim] // self.groups

    @property
    def depthwise(self) -> bool:
        """Whether each channel is its own group, so that input and output share a slot."""
        return self.groups > 1 and self.inputs == 1 and self.outputs == 1

    def canonical(self, weight: Tensor) -> Tensor:
        """View a weight as (groups, outputs, inputs, kernel elements)."""
        for _ in range(self.stacked):
            weight = weight.movedim(0, -1)
        if self.transposed:
            return weight.reshape(self.groups, self.inputs, self.outputs, -1).transpose(1, 2)
        return weight.reshape(self.groups, self.outputs, self.inputs, -1)

    def layout(self, array: Tensor) -> Tensor:
        """Rearrange a (groups, outputs | 1, inputs | 1) array to the weight's layout, compact."""
        groups, outputs, inputs = array.shape
        if self.stacked:
            matrix = array[0].t() if self.transposed else array[0]
            return matrix.reshape([1] * self.stacked + list(matrix.shape))
        tail = [1] * (self.weight.ndim - 2)
        if self.transposed:
            rows = array.transpose(1, 2)
            if groups == 1 or inputs == self.inputs and outputs == 1:
                return rows.reshape(groups * inputs, outputs, *tail)
            return rows.expand(-1, self.inputs, -1).reshape(groups * self.inputs, outputs, *tail)
        if groups == 1 or outputs == self.outputs and inputs == 1:
            return array.reshape(groups * outputs, inputs, *tail)
        return array.expand(-1, self.outputs, -1).reshape(groups * self.outputs, inputs, *tail)

    def compact(self, array: Tensor) -> Tensor:
        """Rearrange a compact 2-d array in the weight's layout to (groups | 1, outputs | 1, inputs | 1)."""
        rows, columns = array.shape
        if self.transposed:
            if rows == 1:
                return array.reshape(1, columns, 1)
            return array.reshape(self.groups, self.inputs, columns).transpose(1, 2)
        return array.reshape(self.groups if rows > 1 else 1, -1, columns)

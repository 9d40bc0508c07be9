"""One view of every op that contracts channels with a weight: ``y[k, o] = b[k, o] + Σ_i W[k, o, i] * x[k, i]``.

Convolutions, transposed convolutions and linear layers differ in how the weight is laid out; here it is always
(groups, outputs per group, inputs per group, kernel). Where a weight is a stack of matrices, one of which is picked for
each token (mixtures of experts), the stack takes the place of the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.program.graph import Value

__all__ = ["Contraction"]


@dataclass(frozen=True)
class Contraction:
    """How a node contracts.

    Attributes:
        input, weight, bias, output: the values involved. Inside of a larger op the weight stands for an input or output
            that is no value of its own.
        input_dim, output_dim: the channel dimension of input and output.
        groups: number of groups.
        transposed: whether the weight has its inputs first, as transposed convolutions have.
        bordered: whether a constant input gives an output that is not the same everywhere (zero padding, transposed
            convolution), so that only another constant channel, and no bias, can stand in for it.
        stacked: number of dimensions of the weight in front of its matrices.
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
        """The dimension of the weight that has the outputs."""
        return self.stacked + self.transposed

    @property
    def input_place(self) -> int:
        """The dimension of the weight that has the inputs."""
        return self.stacked + (not self.transposed)

    @property
    def kernel_dims(self) -> list[int]:
        """The other dimensions of the weight."""
        return [d for d in range(self.weight.ndim) if d not in (self.output_place, self.input_place)]

    @property
    def hidden(self) -> bool:
        """Whether the input is no value of its own, so that the weight stands for it."""
        return self.input is self.weight

    @property
    def outputs(self) -> int:
        """Outputs per group."""
        return self.output.shape[self.output_dim] // self.groups

    @property
    def inputs(self) -> int:
        """Inputs per group."""
        return self.input.shape[self.input_dim] // self.groups

    @property
    def depthwise(self) -> bool:
        """Whether each channel is its own group, so that input and output are one slot."""
        return self.groups > 1 and self.inputs == 1 and self.outputs == 1

    def canonical(self, weight: Tensor) -> Tensor:
        """View a weight as (groups, outputs, inputs, kernel elements)."""
        for _ in range(self.stacked):
            weight = weight.movedim(0, -1)
        if self.transposed:
            return weight.reshape(self.groups, self.inputs, self.outputs, -1).transpose(1, 2)
        return weight.reshape(self.groups, self.outputs, self.inputs, -1)

    def layout(self, array: Tensor) -> Tensor:
        """Bring a (groups, outputs | 1, inputs | 1) array into the weight's layout, compact."""
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
        """Bring a compact two-dimensional array in the weight's layout into (groups | 1, outputs | 1, inputs | 1)."""
        rows, columns = array.shape
        if self.transposed:
            if rows == 1:
                return array.reshape(1, columns, 1)
            return array.reshape(self.groups, self.inputs, columns).transpose(1, 2)
        return array.reshape(self.groups if rows > 1 else 1, -1, columns)

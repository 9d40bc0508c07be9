"""A recorded program, run on other batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.compensation.interpreter import Run, first_path
from engine.errors import InputError


class _Writes(nn.Module):
    """Writes through views, reshapes by the size of the batch, and changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        y = self.layer(x).view(x.shape[0], 2, 4)
        y[:, :1] += 1
        y[:, 1].relu_()
        return torch.cat([y.flatten(1), x.new_zeros(x.shape[0], 1)], 1).sum(1)


def test_it_computes_what_the_model_does_at_another_batch_size() -> None:
    """Views, writes and sizes come out as in the model; what nothing reads any more is let go of."""
    torch.manual_seed(0)
    net = _Writes().eval()
    graph = engine.trace(net, torch.zeros(2, 6))
    batch = torch.randn(5, 6)
    before = batch.clone()
    run = Run(graph, dict(net.named_parameters()), [batch])
    with torch.no_grad():
        for node in first_path(graph):
            run.step(node)
        outputs = [run[value] for value in graph.outputs if value in run]
        assert torch.equal(batch, before)
        assert any(torch.equal(out, net(batch.clone())) for out in outputs)
    assert sum(value in run and not value.stored for value in graph.values) <= len(outputs) + 2


def test_a_batch_of_another_number_of_tensors() -> None:
    """Said before anything runs."""
    graph = engine.trace(nn.Linear(3, 2), torch.zeros(1, 3))
    with pytest.raises(InputError, match="2 tensors, and the example 1"):
        Run(graph, {}, [torch.zeros(1, 3)] * 2)

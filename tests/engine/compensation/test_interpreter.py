"""A recorded program, run on other batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.compensation.interpreter import Run, advance, check_program, first_path
from engine.compensation.weights import Weights
from engine.errors import InputError
from engine.surgery.kinds.norms import wide_norms


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


class _Fills(nn.Module):
    """Computes results in memory that is there already, one of them over its operand, one in a part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        memory = torch.zeros_like(y)
        torch.mul(y, y, out=memory)
        torch.add(memory, 0.5, out=memory)
        torch.sigmoid(y[:, :4], out=memory[:, 4:])
        return memory.sum(1)


def test_results_in_memory_that_is_there_already() -> None:
    """They are there for all that reads the memory afterwards."""
    torch.manual_seed(0)
    net, batch = _Fills().eval().requires_grad_(False), torch.randn(5, 6)
    graph = engine.trace(net, torch.zeros(2, 6))
    run = Run(graph, dict(net.named_parameters()), [batch])
    with torch.no_grad():
        for node in first_path(graph):
            run.step(node)
        assert torch.equal(run[graph.outputs[0]], net(batch))


def test_norms_that_lost_channels_keep_their_statistics() -> None:
    """They were recorded as plain norms; with a constant to fill in, and in groups, too."""
    for norm, name in ((nn.LayerNorm(8), "layer"), (nn.RMSNorm(8), "rms"), (nn.GroupNorm(2, 8), "group")):
        torch.manual_seed(0)
        lift = nn.Conv1d(3, 8, 1) if name == "group" else nn.Linear(3, 8)
        read = nn.Conv1d(8, 2, 1) if name == "group" else nn.Linear(8, 2)
        net = nn.Sequential(lift, norm, read).double().eval()
        mask = torch.tensor([1, 1, 0, 1] * 2).double()
        batch = torch.randn(5, 3, 4).double() if name == "group" else torch.randn(5, 3).double()
        with torch.no_grad():
            lift.weight.mul_(mask.view(-1, *[1] * (lift.weight.ndim - 1)))
            lift.bias.mul_(mask).add_(0.5 * (1 - mask))
            for parameter in norm.parameters():
                parameter.mul_(mask)
        engine.ModelSpeedup(net, batch[:2], None).speedup_model()
        assert net[0].weight.size(0) < 8, name
        graph, stored = engine.trace(net, batch[:2]), Weights(dict(net.named_parameters()))
        run, plain = (Run(graph, stored, [batch], norms=norms) for norms in (wide_norms(net), None))
        with torch.no_grad():
            check_program(net, graph, stored, [batch])
            advance([run, plain], first_path(graph), stored)
            [out], [off] = ([r[v] for v in graph.outputs if v in r] for r in (run, plain))
            assert torch.allclose(out, net(batch), rtol=0, atol=1e-12) and not torch.allclose(off, out, atol=1e-3)


def test_a_batch_of_another_number_of_tensors() -> None:
    """Said before anything runs."""
    graph = engine.trace(nn.Linear(3, 2), torch.zeros(1, 3))
    with pytest.raises(InputError, match="2 tensors, but the example 1"):
        Run(graph, {}, [torch.zeros(1, 3)] * 2)


def test_what_an_earlier_call_left_is_named() -> None:
    """A cache that the model fills, as a module of timm's EfficientViT does."""

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.cache = nn.Linear(3, 3), dict[str, Tensor]()

        def forward(self, x: Tensor) -> Tensor:
            if "bias" not in self.cache:
                self.cache["bias"] = self.layer.bias * 2
            return self.layer(x) + self.cache["bias"]

    model = Caching().eval()
    model(torch.zeros(2, 3))
    graph = engine.trace(model, torch.zeros(2, 3))
    run = Run(graph, dict(model.named_parameters()), [torch.ones(5, 3)])
    with pytest.raises(InputError, match="add .*keeps from one call to the next"):
        for node in first_path(graph):
            run.step(node)

"""Batch norm statistics, re-estimated."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.errors import EngineError


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(4, 2, 1)).double()


def test_the_statistics_are_those_of_the_batches() -> None:
    """As torch's cumulative average has them; parameters, modes and momenta stay, dropout is off."""
    net, batches = _net().eval(), [torch.randn(16, 3, 6, 6).double() for _ in range(3)]
    weights = copy.deepcopy(dict(net.named_parameters()))
    moved = engine.recalibrate_norms(net, [(batch, torch.zeros(16)) for batch in batches])
    features = [net[0](batch) for batch in batches]
    mean = torch.stack([f.mean((0, 2, 3)) for f in features]).mean(0)
    variance = torch.stack([f.var((0, 2, 3)) for f in features]).mean(0)
    assert torch.allclose(net[1].running_mean, mean) and torch.allclose(net[1].running_var, variance)
    assert not net.training and not net[1].training and net[1].momentum == 0.1 and moved["1"] > 0
    assert all(torch.equal(parameter, weights[name]) for name, parameter in net.named_parameters())


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "no batches"),
        ([torch.full((2, 3, 6, 6), torch.nan).double()], "statistics of '1' on these batches are not finite"),
        ([torch.randn(2, 5, 6, 6).double()], "rejected"),
    ],
)
@pytest.mark.parametrize("keep_outputs", [False, True])
def test_after_an_error_the_statistics_are_as_before(
    batches: list[torch.Tensor], message: str, keep_outputs: bool
) -> None:
    """No batches, NaN, the wrong shape: said, and nothing changes."""
    net = _net().train()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(EngineError, match=message):
        engine.recalibrate_norms(net, batches, keep_outputs=keep_outputs)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items()) and net.training


class _Branching(nn.Module):
    """Has a norm that only another input reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.BatchNorm1d(4).double(), nn.BatchNorm1d(4).double()
        self.other.running_mean += 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised input."""
        return self.norm(x) if x.shape[0] > 1 else self.other(x)


@pytest.mark.parametrize("keep_outputs", [False, True])
def test_a_norm_that_does_not_run_keeps_its_statistics(keep_outputs: bool) -> None:
    """There are no other ones for it."""
    net = _Branching()
    moved = engine.recalibrate_norms(net, [torch.randn(8, 4).double()], keep_outputs=keep_outputs)
    assert list(moved) == ["norm"] and torch.equal(net.other.running_mean, torch.full((4,), 3.0).double())


def _strange(net: nn.Module) -> nn.Module:
    """Give the norms of a network statistics that are not those of its inputs."""
    for norm in net.modules():
        if isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.uniform_(norm.running_mean, -1, 1), nn.init.uniform_(norm.running_var, 0.1, 4)
            if norm.affine:
                nn.init.uniform_(norm.weight, -2, 2), nn.init.uniform_(norm.bias, -1, 1)
    return net.double().eval()


def test_weight_and_bias_take_up_the_difference() -> None:
    """Eval mode computes what it did, and train mode the same on the batch of which the statistics are."""
    torch.manual_seed(0)
    net = _strange(
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5), nn.ReLU()
        )
    )
    x = torch.randn(64, 3, 8, 8).double()
    before, off = net(x), (copy.deepcopy(net).train()(x) - net(x)).abs().max()
    moved = engine.recalibrate_norms(net, [x], keep_outputs=True)
    assert list(moved) == ["1", "4"] and torch.allclose(net(x), before, rtol=1e-9, atol=1e-12)
    after = (net.train()(x) - before).abs().max()
    assert off > 0.5 and after < 2e-3  # a batch is normalised by its biased variance


def test_norms_that_cannot_take_up_the_difference_stay() -> None:
    """Those without a weight, and those that share theirs with another."""
    net = _strange(nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4), nn.BatchNorm1d(4)))
    net[2].weight = net[1].weight
    state = copy.deepcopy(net.state_dict())
    assert engine.recalibrate_norms(net, [torch.randn(8, 4).double()], keep_outputs=True) == {}
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


def test_batches_of_one_value_per_channel_are_no_statistics() -> None:
    """Eval mode takes them, train mode does not."""
    net = _strange(nn.Sequential(nn.BatchNorm1d(4)))
    batches = [torch.randn(n, 4).double() for n in (1, 8)]
    engine.recalibrate_norms(net, batches, keep_outputs=True)
    assert torch.allclose(net[0].running_mean, batches[1].mean(0))
    assert engine.recalibrate_norms(net, batches[:1], keep_outputs=True) == {}


Reader = Callable[["_Read", Tensor], Tensor]


class _Read(nn.Module):
    """Has a norm of which a function reads something besides."""

    def __init__(self, read: Reader) -> None:
        super().__init__()
        self.conv, self.norm, self.read = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), read

    def forward(self, x: Tensor) -> Tensor:
        """Return what is normalised, with what is read."""
        y = self.conv(x)
        return self.norm(y) * self.read(self, y)


def _importance(net: _Read, y: Tensor) -> Tensor:
    """Weigh channels by the scales of the norm (NAM, "Normalization-based Attention Module")."""
    scale = net.norm.weight.data.abs()
    return (scale / scale.sum())[:, None, None]


def _whitened(net: _Read, y: Tensor) -> Tensor:
    return F.batch_norm(y, net.norm.running_mean, net.norm.running_var)


def _with_another_eps(net: _Read, y: Tensor) -> Tensor:
    norm = net.norm
    return F.batch_norm(y, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=0.1)


READS: dict[str, Reader] = {
    "scales as importance": _importance,
    "a mean": lambda net, y: net.norm.running_mean.view(-1, 1, 1),  # type: ignore[union-attr]
    "a number of a bias": lambda net, y: y.new_tensor(net.norm.bias[0].item()),
    "statistics alone": _whitened,
    "another eps": _with_another_eps,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_norm_of_which_something_else_reads_stays(read: Reader) -> None:
    """What is read changes with the statistics or the weights, and eval mode with it."""
    torch.manual_seed(0)
    net, x = _strange(_Read(read)), torch.randn(16, 3, 5, 5).double()
    before = net(x)
    assert engine.recalibrate_norms(net, [x * 2 + 1], keep_outputs=True) == {}
    assert torch.equal(net(x), before)


class _FromOne(nn.BatchNorm2d):
    """Has a weight that counts from one."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input."""
        return F.batch_norm(x, self.running_mean, self.running_var, 1 + self.weight, self.bias, self.training)


def test_a_norm_of_another_formula_stays() -> None:
    """Its weight does not multiply what is normalised."""
    torch.manual_seed(0)
    net, x = _strange(nn.Sequential(_FromOne(3), nn.Conv2d(3, 2, 1))), torch.randn(8, 3, 5, 5).double()
    before = net(x)
    assert engine.recalibrate_norms(net, [x * 2 + 1], keep_outputs=True) == {}
    assert torch.equal(net(x), before)


def test_norms_that_share_statistics_stay() -> None:
    """The weight of one cannot make up for what the batches of another change."""
    torch.manual_seed(0)
    net = _strange(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)))
    net[2].running_mean, net[2].running_var = net[0].running_mean, net[0].running_var
    assert engine.recalibrate_norms(net, [torch.randn(8, 4).double()], keep_outputs=True) == {}


@pytest.mark.parametrize("keep_outputs", [False, True])
def test_reading_a_shape_is_no_use(keep_outputs: bool) -> None:
    """The norm is changed, whoever asks for its dtype."""
    net = _strange(_Read(lambda net, y: torch.ones(len(net.norm.weight), 1, 1, dtype=net.norm.bias.dtype)))
    moved = engine.recalibrate_norms(net, [torch.randn(8, 3, 5, 5).double()], keep_outputs=keep_outputs)
    assert list(moved) == ["norm"]


class Remembering(nn.Module):
    """Keeps an average of its features, the number of its calls, and their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.register_buffer("average", torch.zeros(8))
        self.calls, self.sizes = 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        y = self.norm(self.first(x)).relu()
        self.get_buffer("average").lerp_(y.mean(0), 0.1)
        self.first.bias.data.clamp_(-0.1, 0.1)
        self.calls += 1
        self.sizes.append(len(x))
        return self.head(y)  # type: ignore[no-any-return]


@pytest.mark.parametrize("keep_outputs", [False, True])
def test_the_batches_leave_nothing_behind(keep_outputs: bool) -> None:
    """Neither buffers nor weights nor attributes that the model itself writes to, nor random numbers."""
    torch.manual_seed(0)
    net = _strange(Remembering())
    average, bias, random = net.average.clone(), net.first.bias.clone(), torch.get_rng_state()
    engine.recalibrate_norms(net, [torch.randn(8, 4, generator=torch.Generator()).double()], keep_outputs=keep_outputs)
    assert torch.equal(net.average, average) and torch.equal(net.first.bias, bias)
    assert net.calls == 0 and net.sizes == [] and torch.equal(torch.get_rng_state(), random)

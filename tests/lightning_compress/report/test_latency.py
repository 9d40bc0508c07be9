"""How long forward passes take."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from lightning_compress.report import latency as timing
from lightning_compress.report.latency import Comparison, Spread, check_runs, compare, latency, replica
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.models import Net


class Slow(nn.Module):
    """Takes 5 ms in eval mode, long in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Wait."""
        time.sleep(1 if self.training else 0.005)
        return self.layer(x)


def test_latency_is_milliseconds_of_eval_mode_and_leaves_the_mode() -> None:
    """The random state stays too."""
    net, state = Slow().train(), torch.get_rng_state()
    assert 5 <= latency(net, torch.ones(1, 2), runs=3) < 100
    assert net.training and torch.equal(torch.get_rng_state(), state)


def test_a_rejected_example_names_the_model() -> None:
    """As everywhere."""
    with pytest.raises(engine.errors.TraceError, match="Net rejected the example input"):
        latency(Net(), torch.ones(1, 2), runs=1)


@pytest.mark.parametrize("runs", [-1, True, 1.5])
def test_a_wrong_number_of_runs(runs: object) -> None:
    """It names the argument."""
    with pytest.raises(MisconfigurationException, match="latency_runs"):
        check_runs(runs)  # type: ignore[arg-type]


class Named(nn.Module):
    """Has a name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        """Nothing."""
        return x


class Machine:
    """Runs networks, ever more slowly: the masked one for 2 ms at first, any other for 1 ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.seconds = 0.0
        monkeypatch.setattr(timing, "call_model", self.run)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.seconds)

    def run(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Run one."""
        self.seconds += (2e-3 if model.name == "masked" else 1e-3) * (1 + len(self.calls) / 10)
        self.calls.append(str(model.name))


def test_the_networks_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a warm-up of each, neither always comes second, so that a load on the machine slows both alike."""
    machine = Machine(monkeypatch)
    comparison = compare(Named("masked"), Named("small"), torch.ones(1, 2), runs=4)
    assert machine.calls[:4] == ["masked", "masked", "small", "small"]
    assert machine.calls[4:] == ["small", "masked", "masked", "small"] * 2
    assert comparison.runs == 4 and comparison.example == "1×2" and comparison.device.startswith("CPU, ")


def test_a_load_that_grows_does_not_make_the_small_network_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine slows down fourfold while they run: by turns the ratio of the medians stays what it is."""
    Machine(monkeypatch)
    comparison = compare(Named("masked"), Named("small"), torch.ones(1, 2), runs=14)
    assert comparison.compacted.median / comparison.masked.median == pytest.approx(0.5, rel=0.05)
    assert not comparison.is_slower


def test_what_is_slower_says_so() -> None:
    """Beyond what a machine does by itself."""
    times = [Spread(median, median, median) for median in (1.0, 1.2, 1.01, 0.5)]
    slower = [Comparison(times[0], other, 5, "[1]", "CPU").is_slower for other in times[1:]]
    assert slower == [True, False, False]
    assert not Comparison(Spread(1.0, 0.8, 1.4), Spread(1.2, 1.0, 1.5), 9, "1", "CPU").is_slower  # they overlap
    assert not Comparison(times[0], times[1], 3, "1", "CPU").is_slower


def test_a_copy_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers in other tensors; without memory, or where a part cannot be copied, the reason."""
    net = Net()
    other, reason = replica(net)
    assert other is not None and reason == "" and torch.equal(other.stem.weight, net.stem.weight)
    assert other.stem.weight.data_ptr() != net.stem.weight.data_ptr()

    def full(model: nn.Module) -> nn.Module:
        raise MemoryError

    net.lock = (part for part in ())  # type: ignore[assignment]  # a generator cannot be copied
    assert replica(net)[0] is None and "cannot be copied" in replica(net)[1]
    monkeypatch.setattr(copy, "deepcopy", full)
    assert replica(net) == (None, "there is not enough memory for the masked network beside the compacted one")

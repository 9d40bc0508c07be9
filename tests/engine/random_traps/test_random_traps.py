"""Random networks of blocks that an analysis could get wrong: exact in all uses, or refused."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

import engine
from tests.engine.random_traps import oracle
from tests.engine.random_traps.blocks import BLOCKS
from tests.engine.random_traps.nets import random_net
from tests.engine.random_traps.oracle import Result, examine, gap, observed

SEEDS = range(50)
SHARE = 0.6
"""Of the networks, so many lose parameters: where everything is refused or kept, nothing is tried."""

examined = functools.cache(examine)


@pytest.mark.parametrize("seed", [*SEEDS, *(pytest.param(n, marks=pytest.mark.slow) for n in range(50, 500))])
def test_a_random_network_is_exact_or_refused(seed: int) -> None:
    """The masked network and the compacted one agree in uses that the certificate did not see."""
    result = examined(seed)
    assert result.outcome in ("exact", "refused"), result


def test_most_networks_lose_parameters() -> None:
    """Keeping everything whole is not a success."""
    results: list[Result] = [examined(seed) for seed in SEEDS]
    assert sum(result.shrunk for result in results) >= SHARE * len(results)


def test_all_blocks_are_drawn() -> None:
    """Each class has a place in some network of the first thousand."""
    drawn = {type(block) for seed in range(1000) for block in random_net(seed)[0].blocks}
    assert drawn == {cls for classes in BLOCKS.values() for cls in classes}


def test_a_network_follows_from_its_seed() -> None:
    """A failure is reproduced by its number."""
    (one, inputs, size), (other, again, same) = random_net(7), random_net(7)
    assert size == same and torch.equal(inputs(*size), again(*size))
    state = other.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in one.state_dict().items())


def test_the_oracle_sees_a_wrong_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that changes the function fails."""
    speedup = engine.ModelSpeedup.speedup_model

    def wrong(self: engine.ModelSpeedup) -> nn.Module:
        model = speedup(self)
        with torch.no_grad():
            model.head.bias.add_(1e-4)
        return model

    monkeypatch.setattr(engine.ModelSpeedup, "speedup_model", wrong)
    assert oracle.examine(4).outcome == "wrong"


class _Cancels(nn.Module):
    """Returns what is left of a weight, less what it was, in units of its last place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.register_buffer("before", torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Return numbers that rounding decides."""
        return x + (self.weight - self.before) * 2.0**52


def test_what_rounding_decides_is_no_difference() -> None:
    """Only a network that goes either way by itself, where its weights move in their last place, is excused."""
    x = torch.ones(2, 4, dtype=torch.float64)
    for net, excused in ((_Cancels(), True), (nn.Linear(4, 4).double(), False)):
        assert oracle._is_up_to_rounding(net, {}, lambda model: model(x).detach(), 1e-9) is excused


def test_the_oracle_sees_what_a_refusal_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal changes nothing, and any other error is internal."""

    def refuse(model: nn.Module, *args: object, error: type[Exception]) -> None:
        model.head.bias.data.add_(1)
        raise error("on purpose")

    monkeypatch.setattr(engine, "trace", functools.partial(refuse, error=engine.errors.TraceError))
    assert oracle.examine(4).outcome == "wrong"
    monkeypatch.setattr(engine, "trace", functools.partial(refuse, error=KeyError))
    assert oracle.examine(4).outcome == "internal"


def test_objects_are_walked_into() -> None:
    """Named tuples, data classes, distributions, arrays and slots are compared by what they hold."""
    normal = torch.distributions.Normal(torch.zeros(2), torch.ones(2), validate_args=False)
    other = copy.deepcopy(normal)
    assert gap(observed(normal), observed(other)) == 0.0
    other.loc[0] = 1e-3
    assert gap(observed([{"d": normal}]), observed([{"d": other}])) > 1e-9
    assert gap(observed({"a": 1}), observed({"a": 1.0})) > 1 and gap(observed((1, 2)), observed((1,))) > 1


def test_a_gradient_of_rounding_counts_against_its_layer() -> None:
    """The weight of a layer says how large rounding is in its bias, also where the weight is smaller afterwards."""
    weight = torch.full((2, 2), 200.0, dtype=torch.float64)
    pair = [
        oracle.Sized({"layer.weight": weight[:rows], "layer.bias": torch.full((2,), bias, dtype=torch.float64)})
        for rows, bias in ((2, 1e-10), (1, 2e-10))
    ]
    oracle._paired(*pair)
    assert pair[0].value.keys() == {"layer.bias"} and gap(*pair) < 1e-9
    pair[1].value["layer.bias"] += 1e-3
    assert gap(*pair) > 1e-9

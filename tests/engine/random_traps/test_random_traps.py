"""Random networks of blocks that an analysis could get wrong: exact in all uses, or refused."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

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


def test_a_rounding_error_that_decides_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros are larger than a mean that cancels out, or are not: the masked network alone goes either way."""
    assert oracle.examine(1006787).outcome == "exact"
    monkeypatch.setattr(oracle, "_move", lambda model, seed: None)
    assert oracle.examine(1006787).outcome == "wrong"


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

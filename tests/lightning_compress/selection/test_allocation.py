"""Tests of how amounts are divided among layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import engine
from lightning_compress import (
    ChannelPruning,
    ModelCompaction,
    allocate_by_sensitivity,
    anneal_amounts,
    validation_metric,
)
from lightning_compress.selection.allocation import Allocator, patterns
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.models import Net, Wrapped, data, fit, seeded, trainer

X = torch.ones(1, 3, 8, 8)


def robust(stem: float = 0.1, wide: float = 0.4) -> engine.SensitivityTable:
    """Losses that grow with the square of the sparsity, faster for one group."""
    columns = [n / 10 for n in range(1, 10)]
    rows = {
        layer: {s: 0.9 - factor * s**2 for s in columns}
        for layer, factor in (("stem", stem), ("back", stem), ("wide", wide))
    }
    return engine.SensitivityTable(rows, columns, 0.9, "higher")


def left(net: nn.Module, amounts: dict[str, float], target: str, folder: Path) -> float:
    """What is left of a model that ChannelPruning has pruned by amounts, and ModelCompaction made smaller."""
    module = seeded(Wrapped)
    module.net.load_state_dict(net.state_dict())
    pruning = ChannelPruning("l1", amount=amounts, schedule="one_shot")
    fit(module, folder, pruning, ModelCompaction(save=False, on_failure="raise", confidence=0), max_epochs=1)
    found = engine.count_flops_params(module.net, X, verbose=False)
    return float(found[0] if target == "macs" else found[1])


@pytest.mark.parametrize("target", ["macs", "params"])
@pytest.mark.parametrize("amount", [0.3, 0.7])
def test_what_is_sensitive_keeps_more_and_the_target_is_met(tmp_path: Path, target: str, amount: float) -> None:
    """The amounts, given to ChannelPruning, leave at most what is wanted, and within a channel of each group of it."""
    net: Any = seeded(Net)
    amounts = allocate_by_sensitivity(robust(), net, X, amount=amount, target=target)
    assert list(amounts) == ["stem", "wide"] and amounts["stem"] > amounts["wide"]
    position = 0 if target == "macs" else 1
    dense = engine.count_flops_params(net, X, verbose=False)[position]
    found = left(net, amounts, target, tmp_path)
    assert found <= (1 - amount) * dense
    more = {"stem": amounts["stem"] - 1 / 8, "wide": amounts["wide"] - 1 / 16}
    assert left(net, {name: max(a, 0.0) for name, a in more.items()}, target, tmp_path) > (1 - amount) * dense


def test_equal_losses() -> None:
    """Groups lose as much as makes the metric worse by the same: four times the sensitivity, half the amount."""
    net: Any = seeded(Net)
    amounts = allocate_by_sensitivity(robust(0.1, 0.4), net, X, amount=0.25, target="channels")
    assert amounts["stem"] == pytest.approx(2 * amounts["wide"], abs=0.1)


def test_out_of_reach_of_the_table() -> None:
    """Beyond the largest sparsity of the table nothing goes, so that the target may be out of reach."""
    table = engine.SensitivityTable({"wide": {0.1: 0.9}}, [0.1], 0.9, "higher")
    with pytest.raises(MisconfigurationException, match="cannot be reached with this table.*larger sparsities"):
        allocate_by_sensitivity(table, seeded(Net), X, amount=0.5)


def test_layers_that_feed_several_groups_are_told() -> None:
    """A pattern cannot tell them apart, so that is an error and not a wrong amount."""
    groups = [
        engine.Group(name, ("conv",), 2, (), None, torch.zeros(2), torch.arange(2)) for name in ("conv", "conv#2")
    ]
    with pytest.raises(MisconfigurationException, match="`conv` feeds several groups.*exclude='conv'"):
        patterns({"conv": 0.5, "conv#2": 0.2}, groups)


def important(net: nn.Module) -> float:
    """A metric that wants the channels of `wide`, and does not care for others."""
    return float((net.wide.weight.flatten(1) != 0).any(1).float().mean())


def test_annealing_finds_what_the_metric_wants() -> None:
    """At the same target it keeps more of what matters than equal amounts do, and leaves the model as it was."""
    net: Any = seeded(Net)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = anneal_amounts(net, X, important, 0.5, "params", steps=25, seed=1)
    equal = Allocator(net, X, 0.5, "params")
    uniform = equal.meet(lambda part: dict.fromkeys(equal.ladders, part))
    assert found.metric > 1 - uniform["wide"] and found.amounts["stem"] > found.amounts["wide"]
    assert equal.cost(found.amounts) <= equal.budget
    assert len(found.history) == 25 and any(accepted for _, accepted in found.history)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_annealing_repeats_itself() -> None:
    """The same seed gives the same amounts; the global random state stays as it is."""
    net: Any = seeded(Net)
    state = torch.get_rng_state()
    one, two = (anneal_amounts(net, X, important, 0.4, steps=4, seed=2) for _ in range(2))
    assert one == two and torch.equal(state, torch.get_rng_state())


def test_annealing_with_a_trainers_validation(tmp_path: Path) -> None:
    """The metric of the validation loop decides; module, trainer and their state stay as they are."""

    class Validated(Wrapped):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("alive", (self.net.wide.weight.flatten(1) != 0).any(1).float().mean())

    module = seeded(Validated)
    run = trainer(tmp_path, limit_val_batches=1)
    network, example, evaluate = validation_metric(
        run, module, dataloaders=data(8), metric="alive", model="net", example_input=X
    )
    found = anneal_amounts(network, example, evaluate, 0.5, "channels", steps=3)
    assert network is not module.net and found.metric == pytest.approx(1 - found.amounts["wide"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"better": "most"}, "`better`.*'most'"),
        ({"steps": 0}, "`steps`.*0"),
        ({"target": "latency"}, "`target` must be 'channels', 'macs' or 'params' here"),
        ({"amount": 1.5}, "`amount`"),
        ({"amount": 0.9, "max_amount": 0.1}, "cannot be reached"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    """Each is an error that names it."""
    with pytest.raises(MisconfigurationException, match=message):
        anneal_amounts(seeded(Net), X, important, **arguments)


def test_a_metric_that_is_nan_is_an_error() -> None:
    """It would compare with nothing."""
    with pytest.raises(MisconfigurationException, match="returned NaN"):
        anneal_amounts(seeded(Net), X, lambda net: float("nan"))

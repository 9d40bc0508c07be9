"""Batch norm against running it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import engine
from engine.analysis.constants import Constants
from tests.engine.exactness import check_exact, masked, randomised, relative_error, run
from tests.engine.nets import Mean, constants_of, dead, image, plain, structure
from tests.engine.ops.brute import check_constants, check_labels, check_macs, check_use


def norm(**arguments: object) -> nn.Module:
    """A batch norm with random statistics."""
    return randomised(nn.BatchNorm2d(8, **arguments))


def test_a_norm_keeps_channels() -> None:
    """Removing a channel leaves the others as they are: each is a class of its own."""
    eval_norm = norm()
    check_labels(eval_norm, classes=8)


def test_statistics_and_affine_parameters_go_with_the_channel() -> None:
    """γ, β, running mean and variance carry the channel's slots."""
    model = plain()
    found = structure(model, image())
    slots = found.along(found.graph.stored["0.weight"], 0)
    for name in ("weight", "bias", "running_mean", "running_var"):
        assert torch.equal(found.along(found.graph.stored[f"1.{name}"], 0), slots)


@pytest.mark.parametrize("arguments", [{}, {"affine": False}])
def test_constants_in_eval_mode(arguments: dict[str, bool]) -> None:
    """A dead channel puts out ``(b - μ) / √(σ² + ε) · γ + β``."""
    bn = norm(**arguments)
    row = check_constants(lambda m, x: m.norm(x), [0, 1, 2, 3], norm=bn)
    assert (row[:4] != 0).all()


def test_constants_of_batch_statistics() -> None:
    """Without running statistics a constant channel is centred to 0, and β is left."""
    bn = norm(track_running_stats=False)
    row = check_constants(lambda m, x: m.norm(x), [0, 1, 2, 3], norm=bn)
    assert torch.equal(row[:4], bn.bias.detach()[:4])


def test_a_masked_scale_gives_the_shift() -> None:
    """γ = 0 gives β whatever comes in, and what comes in is unused."""
    model = plain()
    masks = {"1": {"weight": torch.tensor([0.0, 0, 1, 1, 1, 1])}}
    constants = constants_of(model, image(), masks)
    node = next(n for n in constants.graph.nodes if n.module == "1")
    found = constants.along(node.output, 1)
    assert torch.equal(found[:2], model[1].bias.detach()[:2]) and found[2:].isnan().all()
    plan = check_exact(model, masks, image(), image(9))
    assert plan.slices["0.weight"].shape[0] < 6


def test_beta_of_a_dead_channel_is_not_lost() -> None:
    """The BN shift of a masked channel goes on to the next layer; dropping it would change the output."""
    model = plain()
    masks = dead(model, {"0": [0, 1, 2]}, bias=True)
    with torch.no_grad():
        model[1].bias.abs_().add_(1)
    plan = check_exact(model, masks, image(), image(10))
    assert plan.slices["0.weight"].shape[0] == 4  # three live ones and the carrier
    careless = masked(model, masks)
    with torch.no_grad():
        careless[1].bias[:3] = 0
        careless[1].running_mean[:3] = 0
    assert relative_error(run(masked(model, masks), image()), run(careless, image())) > 1e-3


def test_use_follows_the_scale() -> None:
    """A channel with a masked γ, or that nobody reads, is unused."""
    check_use(lambda m, x: m.norm(x), [1, 6], [1, 6], norm=norm())


def test_a_constant_into_the_running_mean() -> None:
    """A convolution without bias, in front of an eval norm, hands constants to the running mean: no carrier stays."""
    model = randomised(
        nn.Sequential(
            nn.Conv2d(3, 6, 3),
            nn.ReLU(),
            nn.Conv2d(6, 5, 3, bias=False),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            Mean(),
            nn.Linear(5, 2),
        )
    )
    with torch.no_grad():
        model[0].bias.abs_().add_(0.1)
    plan = check_exact(model, dead(model, {"0": [0, 1, 2, 3]}), image(), image(9))
    assert [fold.name for fold in plan.folds] == ["3.running_mean"]
    assert plan.slices["0.weight"].shape[0] == 2


def test_num_features_follows() -> None:
    """The module's attributes are those of the small norm."""
    model = plain()
    engine.ModelSpeedup(model, image(), dead(model, {"0": [0, 1], "1": [0, 1]}, bias=True)).speedup_model()
    assert model[1].num_features == 4 == len(model[1].running_mean)


def test_a_norm_has_no_multiply_accumulates_of_its_own() -> None:
    """As NNI and torch's counter: contractions only, unless ``full`` is asked for."""
    model = plain()
    assert check_macs(model, image(batch=1)) > 0
    default = engine.count_flops_params(model, image(), verbose=False)
    full = engine.count_flops_params(model, image(), verbose=False, mode="full")
    assert "1" not in default[2] and full[2]["1"]["flops"] == [2 * 6 * 36]


def test_repaired_constants_are_zero() -> None:
    """Looked at as repair will leave it, a dead channel puts out exactly 0."""
    model = plain()
    constants = constants_of(model, image(), dead(model, {"0": [0, 1]}), repaired=True)
    node = next(n for n in constants.graph.nodes if n.module == "1")
    assert constants.along(node.output, 1)[:2].tolist() == [0, 0]


@pytest.mark.parametrize("training", [False, True])
def test_a_variance_of_zero_or_less(training: bool) -> None:
    """Where eval mode divides zero by zero, only batch statistics have a constant."""
    net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4, eps=0.0))
    net[1].running_var[1] = 0
    masks = {"0.weight": torch.zeros(4, 1, 1, 1), "0.bias": torch.zeros(4), "1.weight": torch.zeros(4)}
    graph = engine.trace(net, torch.zeros(2, 1, 3, 3))
    stored = dict([*net.named_parameters(), *net.named_buffers()])
    base = Constants(graph, engine.RULES, stored, masks)
    constants = Constants(graph, engine.RULES, stored, masks, training=training, base=base)
    undefined = constants[graph.outputs[0]].reshape(-1).expand(4).isnan()
    assert undefined.any() != training and (training or undefined[1])

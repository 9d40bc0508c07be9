"""A smaller network in one call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import InputError
from lightning_compress import prune, summarize
from lightning_compress.trainer.packages import MisconfigurationException
from tests.engine.exactness import randomised, run
from tests.lightning_compress.models import OnDemand


def _net() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 1))
    return randomised(nn.Sequential(*layers))


EXAMPLE = torch.zeros(2, 3, 8, 8, dtype=torch.float64)


@pytest.mark.parametrize(("target", "place"), [("macs", 0), ("params", 1)])
def test_the_target_is_met_and_the_model_stays(target: str, place: int) -> None:
    """The copy costs what was asked for at most, and nearly as much; weights, mode and example are as before."""
    net = _net().train()
    before = copy.deepcopy(net.state_dict())
    small = prune(net, EXAMPLE, 0.4, target=target)
    dense, left = (engine.count_flops_params(m, EXAMPLE, verbose=False)[place] for m in (net, small))
    assert 0.5 * dense < left <= 0.6 * dense
    assert small.certificate.verified and not small.plan.is_empty and not small.report and small.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_data_bring_the_small_network_closer_to_the_dense_one() -> None:
    """On inputs that nothing was fitted on."""
    net = _net()
    data = [torch.randn(64, 3, 8, 8, dtype=torch.float64) for _ in range(4)]
    fresh = torch.randn(64, 3, 8, 8, dtype=torch.float64)
    dense = run(net, fresh)[0]
    plain, fitted = prune(net, EXAMPLE, 0.5), prune(net, EXAMPLE, 0.5, data=data)
    before, after = (float((run(small, fresh)[0] - dense).square().sum()) for small in (plain, fitted))
    assert after < 0.7 * before
    assert all(row.after <= row.before for row in fitted.report.values()) and fitted.report


def test_train_mode_starts_from_the_outputs_of_eval_mode() -> None:
    """The statistics of norms are those of the data, which eval mode does not notice."""
    data = [torch.randn(64, 3, 8, 8, dtype=torch.float64) for _ in range(4)]
    small = prune(_net(), EXAMPLE, 0.5, data=data)
    features = torch.stack([small[0](batch).mean((0, 2, 3)) for batch in data]).mean(0)
    torch.testing.assert_close(small[1].running_mean, features)
    assert small.certificate.verified


def test_channels_by_pattern() -> None:
    """As `ChannelPruning` takes them."""
    small = prune(_net(), EXAMPLE, {"0": 0.25}, target="channels", scope="group")
    assert [small[i].out_channels for i in (0, 3, 5)] == [12, 16, 4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"criterion": "taylor"}, "needs statistics of training"),
        ({"amount": 1.5}, "fraction"),
        ({"target": "speed"}, "`target` must be one of"),
        ({"amount": 0.999}, "cannot be reached"),
        ({"layers": "nothing.*"}, "matches no layer"),
    ],
)
def test_arguments_that_cannot_be(options: dict[str, object], message: str) -> None:
    """Each is refused by name, before anything runs."""
    with pytest.raises(MisconfigurationException, match=message):
        prune(_net(), EXAMPLE, **options)


@pytest.mark.parametrize("criterion", ["reconstruction", "fisher", {"reconstruction": 1.0, "l2": 0.5}])
def test_criteria_that_look_at_data(criterion: Any) -> None:
    """On batches that can be read once, with and without compensation; without data the criterion says so."""
    net = _net()
    before = copy.deepcopy(net.state_dict())
    batches = [torch.randn(32, 3, 8, 8, dtype=torch.float64) for _ in range(3)]
    dense = engine.count_flops_params(net, EXAMPLE, verbose=False)[0]
    for compensate in (True, False):
        small = prune(net, EXAMPLE, 0.4, criterion=criterion, data=iter(batches), compensate=compensate)
        assert engine.count_flops_params(small, EXAMPLE, verbose=False)[0] <= 0.6 * dense
        assert small.certificate.verified and bool(small.report) == compensate
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    with pytest.raises(MisconfigurationException, match="needs batches: pass `data=`"):
        prune(net, EXAMPLE, 0.4, criterion=criterion)


def test_what_others_can_make_up_for_goes_first() -> None:
    """Channels that repeat others, although their weights are the largest."""
    torch.manual_seed(0)
    net = randomised(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    with torch.no_grad():
        net[0].weight[4:], net[0].bias[4:] = 3 * net[0].weight[:4], 3 * net[0].bias[:4]
    x, fresh = (torch.randn(n, 4, dtype=torch.float64) for n in (256, 64))
    one = prune(net, x[:2], 0.125, criterion="reconstruction", target="channels", data=[x], ridge=1e-9)
    assert one[0].out_features == 7 and float((one(fresh) - net(fresh)).detach().abs().max()) < 1e-3


def test_layer_norms_become_ordinary_ones() -> None:
    """Where they are asked for, and then the result is not called exact."""
    net = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2))
    exact, plain = (prune(net, torch.zeros(2, 4), 0.5, plain_norms=asked) for asked in (False, True))
    assert exact.certificate.exact and not plain.certificate.exact
    assert type(plain[1]) is nn.LayerNorm and type(exact[1]) is not nn.LayerNorm


def test_what_is_declared_is_pruned() -> None:
    """Features that other arguments return stay, unless they are declared to keep their value."""
    net, images = OnDemand(), torch.zeros(1, 3, 8, 8)
    assert not any(
        prediction.params < summary.params for summary in [summarize(net, images)] for prediction in summary.predictions
    )
    assert summarize(net, images, constants="embed").predictions[-1].params < 100
    small = prune(net, images, 0.5, constants="embed")
    assert small.certificate.verified and small.head.in_features == 4
    with pytest.raises(InputError, match="'embeds'; the model has no such buffer, attribute or argument"):
        prune(net, images, 0.5, constants=["embeds"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude": "*"}, r"With .*exclude=\('\*',\), no layer remains to prune"),
        ({"round_to": 1000}, "cannot be reached: .* relax what limits it: .*round_to=1000"),
        ({"minimum": 100}, "cannot be reached: .* relax what limits it: .*minimum=100"),
        ({"scope": lambda group: [1]}, r"`scope` returned \[1\] for group '0'"),
        ({"criterion": lambda group, evidence: [1] * group.size}, r"criterion returned \[1, .* for group `0`, neither"),
    ],
)
def test_settings_that_prevent_pruning_are_named(options: dict[str, Any], message: str) -> None:
    """Each by its name and value."""
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
    with pytest.raises(MisconfigurationException, match=message):
        prune(net, torch.zeros(1, 2), 0.5, **options)


class _Scaled(nn.Module):
    """Multiplies its scores by a number, its first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, scale: Tensor, x: Tensor) -> Tensor:
        """Return scores."""
        return self.leave(torch.relu(self.enter(x))) * scale  # type: ignore[no-any-return]


@pytest.mark.parametrize("criterion", ["l2", "fisher", "reconstruction"])
def test_a_number_among_the_inputs_is_no_sample(criterion: str) -> None:
    """The samples of a batch are those of its first tensor with dimensions; a number for all is passed on whole."""
    batch = torch.tensor(2.0), torch.randn(16, 4)
    small = prune(_Scaled(), (batch[0], batch[1][:2]), 0.5, data=[batch] * 2, criterion=criterion)
    assert small.enter.out_features == 4 and list(small.report)


def _fails(*_: Any) -> Any:
    raise KeyError("mine")


@pytest.mark.parametrize("argument", ["criterion", "scope"])
def test_a_function_of_the_user_that_fails_is_named(argument: str) -> None:
    """With the group that it was called for, and the original error as the cause."""
    with pytest.raises(
        MisconfigurationException, match=f"{argument}.* for group .0. failed: KeyError: 'mine'"
    ) as raised:
        prune(_net(), EXAMPLE, **{argument: _fails})
    assert isinstance(raised.value.__cause__, KeyError)


def test_patterns_are_text() -> None:
    """Numbers of layers are none."""
    with pytest.raises(MisconfigurationException, match=r"`amount` must be a name pattern.*, got \(3,\)"):
        prune(_net(), EXAMPLE, {3: 0.5}, target="channels")  # type: ignore[dict-item]


def test_a_model_with_masks_of_torch() -> None:
    """It holds a weight that is computed before each call, which Python's own copy refuses."""
    net = _net()
    torch.nn.utils.prune.ln_structured(net[0], "weight", 0.25, 2, 0)
    assert prune(net, EXAMPLE, 0.5).certificate.verified

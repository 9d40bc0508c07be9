"""Norms that span channels or positions, against running them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.rule import Statistic
from engine.surgery.kinds.norms import NarrowedNorm
from tests.engine.attentions import stored
from tests.engine.exactness import KINDS, Masks, check_exact, randomised, relative_error, run
from tests.engine.nets import Net, constants_of, dead, image, structure
from tests.engine.ops.brute import check_constants, check_labels, check_macs, check_use, labels_of, node_of, stems


def over_channels(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    """The norm with channels moved to the last dimension and back."""
    return lambda x: norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def affine(norm: nn.Module) -> nn.Module:
    """With random parameters and statistics; float64, eval mode."""
    with torch.no_grad():
        for name, tensor in (*norm.named_parameters(), *norm.named_buffers()):
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5) if "weight" in name or "var" in name else tensor.normal_(0, 0.3)
    return norm.double().eval()


LABELS: dict[str, tuple[Callable[..., Any], int]] = {
    # function, classes that are left free
    "layer norm over the last positions": (lambda x: F.layer_norm(x, (4,)), 8),
    "layer norm over all positions": (lambda x: F.layer_norm(x, (4, 4)), 8),
    "layer norm over channels, by function": (lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (8,)), 0),
    "layer norm over channels and positions": (lambda x: F.layer_norm(x, (8, 4, 4)), 0),
    "rms norm over positions": (lambda x: F.rms_norm(x, (4,)), 8),
    "group norm": (lambda x: F.group_norm(x, 4), 0),
    "group norm with one group": (lambda x: F.group_norm(x, 1), 0),
    "group norm with a group per channel": (lambda x: F.group_norm(x, 8), 0),
    "instance norm": (lambda x: F.instance_norm(x), 8),
    "instance norm of three dimensions": (lambda x: F.instance_norm(x[:, :, None]), 8),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels(name: str) -> None:
    """Channels that a statistic spans stay where nothing can put them back; per channel they pass."""
    f, classes = LABELS[name]
    check_labels(f, classes)


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_module_over_channels_passes_them(kind: Callable[..., nn.Module]) -> None:
    """Its output, γ and β carry the channels' slots, and the rule says what the statistics span."""
    model = Net(lambda m, x: m.head(m.norm(m.stem(x))), stem=nn.Linear(5, 8), norm=kind(8), head=nn.Linear(8, 3))
    found = structure(model, torch.randn(2, 4, 5))
    node = next(n for n in found.graph.nodes if n.module == "norm")
    slots = found.along(node.args["input"], 2)
    assert slots is not None and torch.equal(found.along(node.output, 2), slots) and not found.frozen[slots].any()
    for name in ("weight", "bias"):
        if hasattr(model.norm, name):
            assert torch.equal(found.along(found.graph.stored[f"norm.{name}"], 0), slots)
    rule = engine.RULES.rule(node.op)
    assert rule.normalises and rule.statistic(node) == Statistic(node.args["input"], 2)


def test_a_norm_over_several_dimensions_has_no_statistic_of_channels() -> None:
    """Only one over the last dimension can lose some of it."""
    labels = labels_of(stems(lambda x: F.layer_norm(x, (4, 4))))
    assert engine.RULES.rule("layer_norm").statistic(node_of(labels, "layer_norm")) is None


def test_affine_parameters_over_positions_stay_whole() -> None:
    """Their sizes never change, and channels go past them."""
    model = randomised(
        Net(
            lambda m, x: m.head(m.norm(m.stem(x)).mean((2, 3))),
            stem=nn.Conv2d(3, 8, 1),
            norm=nn.LayerNorm((6, 6)),
            head=nn.Linear(8, 2),
        )
    )
    masks = dead(model, {"stem": [0, 1]}, bias=True)
    masks["head"] = {"weight": torch.ones(2, 8).index_fill(1, torch.tensor([0, 1]), 0)}
    plan = check_exact(model, masks, image(), image(batch=3))
    assert plan.slices["stem.weight"].shape[0] == 6 and "norm.weight" not in plan.slices


def test_constants_of_a_layer_norm() -> None:
    """β where γ = 0, whatever comes in; nothing else is known without running it."""
    model = randomised(nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3)))
    masks = dead(model, {"0": [0, 1]}, bias=True)
    masks["1"] = {"weight": torch.ones(8).index_fill(0, torch.tensor([1, 4]), 0)}
    for repaired in (False, True):
        constants = constants_of(model, torch.randn(2, 4, 5, dtype=torch.float64), masks, repaired)
        node = next(n for n in constants.graph.nodes if n.module == "1")
        row = constants.along(node.output, 2)
        expected = {c: model[1].bias[c].item() for c in (1, 4)}
        if repaired:  # what arrives as zero will have its γ and β masked
            expected |= {0: 0.0, 1: 0.0}
        assert {c: row[c].item() for c in (~row.isnan()).nonzero()[:, 0].tolist()} == expected


def test_use_of_norms_over_channels() -> None:
    """Every channel has a share in the statistics, read or not."""
    check_use(over_channels(affine(nn.LayerNorm(8))), [1, 6], [])
    check_use(lambda x: F.group_norm(x, 8), [1, 6], [])


def test_use_of_norms_per_channel() -> None:
    """A channel that nobody reads behind the norm is unused in front of it."""
    check_use(lambda m, x: m.norm(x), [1, 6], [1, 6], norm=affine(nn.InstanceNorm2d(8, affine=True)))
    check_use(lambda x: F.layer_norm(x, (4,)), [1, 6], [1, 6])


@pytest.mark.parametrize("options", [{}, {"affine": True}, {"affine": True, "track_running_stats": True}])
def test_constants_of_an_instance_norm(options: dict[str, bool]) -> None:
    """A constant channel is centred to 0 and β is left; with running statistics only γ = 0 says something."""
    norm = affine(nn.InstanceNorm2d(8, **options))
    tracked = bool(options.get("track_running_stats"))
    row = check_constants(lambda m, x: m.norm(x), [] if tracked else [0, 1, 2, 3], norm=norm)
    if not tracked:
        expected = norm.bias.detach()[:4] if options else torch.zeros(4, dtype=torch.float64)
        assert torch.equal(row[:4], expected)


@pytest.mark.parametrize("tracked", [True, False])
def test_a_masked_scale_of_an_instance_norm(tracked: bool) -> None:
    """γ = 0 gives β whatever comes in."""
    model = instance_net(affine=True, track_running_stats=tracked)
    masks = {"norm": {"weight": torch.ones(8).index_fill(0, torch.tensor([2, 5]), 0)}}
    constants = constants_of(model, image(), masks)
    row = constants.along(next(n for n in constants.graph.nodes if n.module == "norm").output, 1)
    assert (~row.isnan()).nonzero()[:, 0].tolist() == [2, 5]
    assert torch.equal(row[[2, 5]], model.norm.bias.detach()[[2, 5]])


def instance_net(**options: bool) -> nn.Module:
    """A convolution, instance norm, and two layers behind it."""
    return randomised(
        Net(
            lambda m, x: m.head(torch.relu(m.body(torch.tanh(m.norm(m.stem(x))))).mean((2, 3))),
            stem=nn.Conv2d(3, 8, 3),
            norm=affine(nn.InstanceNorm2d(8, **options)),
            body=nn.Conv2d(8, 6, 1),
            head=nn.Linear(6, 2),
        )
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tracked", [True, False])
def test_instance_norm_compacts_per_channel(tracked: bool, kind: str) -> None:
    """Exact for any masks, at other resolutions; attribute and statistics follow."""
    model = instance_net(affine=True, track_running_stats=tracked)
    check_exact(model, KINDS[kind](model, 4), image(), image(9))


def test_num_features_follows() -> None:
    """The module's attribute and all of its tensors are those of the small norm."""
    model = instance_net(affine=True, track_running_stats=True)
    columns = torch.ones(6, 8, 1, 1)
    columns[:, [0, 5, 7]] = 0
    engine.ModelSpeedup(model, image(), {"body": {"weight": columns}}).speedup_model()
    assert model.norm.num_features == 5 == len(model.norm.running_mean) == len(model.norm.weight)


def grouped(affine: bool = True) -> nn.Module:
    """A stem, a group norm of four groups, and two layers."""
    return randomised(
        Net(
            lambda m, x: m.head(torch.relu(m.body(torch.relu(m.norm(m.stem(x))))).mean((2, 3))),
            stem=nn.Conv2d(3, 12, 3),
            norm=nn.GroupNorm(4, 12, affine=affine),
            body=nn.Conv2d(12, 6, 1),
            head=nn.Linear(6, 2),
        )
    )


def dead_under_norm(model: nn.Module, channels: list[int], bias: bool = True) -> Masks:
    """Mask channels of the stem, and of the norm behind it."""
    masks = dead(model, {"stem": channels}, bias=bias)
    keep = torch.ones(12)
    keep[channels] = 0
    return {**masks, "norm": {"weight": keep, "bias": keep}}


@pytest.mark.parametrize("bias", [True, False])
def test_groups_of_a_norm_lose_equally_many(bias: bool) -> None:
    """One dead channel of each group goes, zero or constant; a second one stays, and all where a group is whole."""
    model = grouped()
    masks = dead_under_norm(model, [0, 1, 4, 8], bias)
    assert check_exact(model, masks, image(), image(9)).is_empty  # the last group is whole
    masks = dead_under_norm(model, [0, 1, 4, 8, 11], bias)
    plan = check_exact(model, masks, image(), image(9, batch=3))
    assert plan.slices["norm.weight"].shape == (8,) and plan.of(NarrowedNorm)[0].kept == 8
    assert (plan.of(NarrowedNorm)[0].fill is None) == bias
    small = plan.apply(copy.deepcopy(model))
    assert small.norm.num_channels == 8 and small.norm.num_groups == 4
    small.train()(image()).sum().backward()
    assert small.norm.weight.grad.shape == (8,)


def test_a_plain_group_norm_of_the_rest_would_be_wrong() -> None:
    """The statistics span what was removed."""
    model = grouped()
    masks = dead_under_norm(model, [0, 3, 6, 9])
    plan = check_exact(model, masks, image())
    small = plan.apply(copy.deepcopy(model))
    careless = dataclasses.replace(plan, exchanges=()).apply(copy.deepcopy(model))
    assert relative_error(run(small, image()), run(careless, image())) > 1e-3


def test_a_plan_with_a_group_norm_survives_a_file() -> None:
    """Stored and read with weights_only, and copied."""
    model = grouped()
    plan = check_exact(model, dead_under_norm(model, [0, 3, 6, 9], bias=False), image())
    small, again = plan.apply(copy.deepcopy(model)), stored(plan).apply(copy.deepcopy(model))
    assert relative_error(run(small, image()), run(copy.deepcopy(again), image())) == 0


def test_a_group_norm_by_function_keeps_its_channels() -> None:
    """With a reason that names the place; what is behind it goes; the result is exact."""
    model = randomised(
        Net(
            lambda m, x: m.head(torch.relu(m.body(nn.functional.group_norm(m.stem(x), 4))).mean((2, 3))),
            stem=nn.Conv2d(3, 8, 3),
            body=nn.Conv2d(8, 6, 1),
            head=nn.Linear(6, 2),
        )
    )
    reasons = {g.name: g.reason for g in engine.dependency_groups(model, image())}
    assert "group_norm" in reasons["stem"] and reasons["body"] is None
    plan = check_exact(model, dead(model, {"stem": [0, 2, 4, 6], "body": [0, 1]}, bias=True), image(), image(9))
    assert "stem.weight" not in plan.slices and plan.slices["body.weight"].shape[0] == 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("affine", [True, False])
def test_any_masks_under_a_group_norm(affine: bool, kind: str) -> None:
    """Exact, whatever is masked."""
    model = grouped(affine)
    check_exact(model, KINDS[kind](model, 2), image(), image(9))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(8), lambda: nn.RMSNorm(8, eps=0.1)], ids=["layer", "rms"])
def test_any_masks(make: Callable[[], nn.Module], kind: str) -> None:
    """Before a norm over channels, inside a residual block and behind it: exact."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = x + m.up(torch.nn.functional.gelu(m.down(m.first(x))))
        return m.head(m.last(x))

    parts = {"stem": nn.Linear(5, 8), "first": make(), "down": nn.Linear(8, 6), "up": nn.Linear(6, 8)}
    model = randomised(Net(forward, **parts, last=make(), head=nn.Linear(8, 3)))
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    check_exact(model, KINDS[kind](model, 5), x, x[:1, :3] + 1)


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(1, 3), nn.InstanceNorm2d(3)])
def test_norms_have_no_multiply_accumulates(norm: nn.Module) -> None:
    """As torch's counter; in full mode five operations per element."""
    x = torch.randn(1, 3, 4, 4)
    assert check_macs(norm, x) == 0
    assert engine.count_flops_params(norm, x, verbose=False, mode="full")[0] == 5 * 3 * 4 * 4

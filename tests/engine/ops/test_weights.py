"""Weight norm loses outputs and inputs, exactly; what other parametrizations span stays, with the reason."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import engine
from tests.engine.exactness import Masks, check_exact, masked, randomised, relative_error, run
from tests.engine.nets import Mean, image

norm = parametrizations.weight_norm
ORIGINAL = "parametrizations.weight.original"


def net(*layers: nn.Module, width: int = 4) -> nn.Module:
    """The layers, a mean over positions, and a linear one."""
    return randomised(nn.Sequential(*layers, Mean(), nn.Linear(width, 2)))


NETS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": lambda: net(norm(nn.Conv2d(3, 6, 3)), nn.ReLU(), norm(nn.Conv2d(6, 8, 3)), nn.Conv2d(8, 4, 1)),
    "transposed": lambda: net(
        nn.Conv2d(3, 6, 3), nn.ReLU(), norm(nn.ConvTranspose2d(6, 8, 3), dim=1), nn.Conv2d(8, 4, 1)
    ),
    "a norm for each input": lambda: net(nn.Conv2d(3, 6, 3), norm(nn.Conv2d(6, 8, 1), dim=1), nn.Conv2d(8, 4, 1)),
    "one norm for all": lambda: net(nn.Conv2d(3, 6, 3), norm(nn.Conv2d(6, 8, 3), dim=None), nn.Conv2d(8, 4, 1)),  # type: ignore[arg-type]
    "groups": lambda: net(
        norm(nn.Conv2d(3, 6, 3)), nn.ReLU(), norm(nn.Conv2d(6, 8, 3, groups=2)), nn.ReLU(), nn.Conv2d(8, 4, 1)
    ),
    "depthwise": lambda: net(
        norm(nn.Conv2d(3, 8, 3)), norm(nn.Conv2d(8, 8, 3, padding=1, groups=8)), nn.ReLU(), nn.Conv2d(8, 4, 1)
    ),
    "groups, called twice": lambda: net(
        nn.Conv2d(3, 6, 1), (same := norm(nn.Conv2d(6, 6, 3, padding=1, groups=3))), nn.ReLU(), same, nn.Conv2d(6, 4, 1)
    ),
    "called twice": lambda: net((same := norm(nn.Conv2d(3, 3, 1))), nn.ReLU(), same, nn.Conv2d(3, 4, 1)),
}


def halved(model: nn.Module) -> Masks:
    """Masks that close the second half of each row of every group."""
    groups = [g for g in engine.dependency_groups(model, image()) if g.reason is None]
    keep = {g.name: torch.ones(g.size, dtype=torch.bool) for g in groups}
    for group in groups:
        for row in group.rows.unique():
            members = (group.rows == row).nonzero()[:, 0]
            keep[group.name][members[len(members) // 2 :]] = False
    return engine.group_masks(groups, keep)


@pytest.mark.parametrize("name", NETS)
def test_half_of_all_channels(name: str) -> None:
    """Scales and directions are cut along; scales make up for the columns that are gone."""
    model = NETS[name]()
    plan = check_exact(model, halved(model), image(), image(9))
    cut = [n for n in plan.slices if "original1" in n]
    assert len(cut) == sum("original1" in n for n, _ in model.named_parameters()) - (name == "called twice")
    directions = any("original1" in entries for entries in halved(model).values())
    assert directions == (name in ("one norm for all", "a norm for each input"))


@pytest.mark.parametrize("name", NETS)
def test_any_masks(name: str) -> None:
    """Single entries of directions, whole scales, units of layers that are not part of it."""
    model, generator = NETS[name](), torch.Generator().manual_seed(3)
    masks: Masks = {}
    for full, parameter in model.named_parameters():
        module, _, key = full.rpartition(".")
        share = 0.5 if parameter.ndim and "original1" not in key else 0.8
        masks.setdefault(module, {})[key] = (torch.rand(parameter.shape, generator=generator) < share).double()
    if name == "one norm for all":
        masks["1.parametrizations.weight"]["original0"] = torch.tensor(1.0)
    plan = check_exact(model, masks, image(), image(8))
    assert not plan.is_empty


def test_an_output_that_is_masked_at_its_scale() -> None:
    """``original0``, also as the mask of ``weight``, by its name in torch's older form, and read from zeros."""
    model = NETS["convolutions"]()
    kept = torch.tensor([1, 0, 1, 1, 0, 1.0]).view(6, 1, 1, 1)
    bias = {"bias": kept.view(-1)}
    masks = ({"0": {"weight": kept, **bias}}, {"0.parametrizations.weight": {"original0": kept}, "0": bias})
    for mask in masks:
        speedup = engine.ModelSpeedup(copy.deepcopy(model), image(), mask)
        small = speedup.speedup_model()
        assert small[0].weight.shape == (4, 3, 3, 3) and small[0].out_channels == 4
        assert speedup.certificate.max_error < 1e-9
        # columns of the next layer's directions went, and its scales take larger steps than those of before
        assert not speedup.certificate.exact_in_train
        assert set(small.state_dict()) == set(model.state_dict())


def test_steps_are_larger_whether_a_sample_shows_it_or_not() -> None:
    """What the layer reads is zero on all samples: no gradient tells that its directions became shorter."""
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), norm(nn.Linear(6, 4)), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    kept = torch.tensor([1, 0, 1, 1, 0, 1.0])
    speedup = engine.ModelSpeedup(
        model, torch.rand(2, 3).double(), {"0": {"weight": kept.view(6, 1).expand(6, 3), "bias": kept}}
    )
    speedup.speedup_model()
    assert model[0].out_features == 4 and speedup.certificate.verified and not speedup.certificate.exact_in_train


def test_the_older_form() -> None:
    """``weight_g`` and ``weight_v``, renewed by a hook at each call."""
    with pytest.warns(FutureWarning, match="deprecated"):
        layer = torch.nn.utils.weight_norm(nn.Linear(5, 6))
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), layer, nn.ReLU(), nn.Linear(6, 2)).double().eval()
    x, kept = torch.randn(4, 3).double(), torch.tensor([1, 0, 1, 1, 0, 1.0])
    mask = {"0": {"weight": torch.ones(5, 3), "bias": torch.ones(5)}, "2": {"weight": kept.view(6, 1), "bias": kept}}
    mask["0"]["weight"][[0, 2]], mask["0"]["bias"][[0, 2]] = 0, 0
    with torch.no_grad():
        for parameter, entry in ((model[0].weight, mask["0"]["weight"]), (model[0].bias, mask["0"]["bias"])):
            parameter.mul_(entry)
        layer.weight_g.mul_(mask["2"]["weight"])
        layer.bias.mul_(kept)
    (wanted,) = run(model, x)
    engine.ModelSpeedup(model, x, mask).speedup_model()
    assert layer.weight_v.shape == (4, 3) and layer.weight_g.shape == (4, 1)
    torch.testing.assert_close(run(model, x)[0], wanted, rtol=1e-9, atol=1e-12)


def test_groups_lose_single_channels_at_each_call() -> None:
    """The weight is computed anew by each call; the second finds slots of the groups' inputs along its outputs."""
    group, *_ = engine.dependency_groups(NETS["groups, called twice"](), image())
    assert group.size == 6 and len(group.rows.unique()) == 3


def test_repair_masks_scales() -> None:
    """A closed unit is masked at its scale and its bias; directions stay as they are."""
    model = NETS["convolutions"]()
    kept = torch.tensor([1, 0, 1, 1, 0, 1.0])
    fixed = engine.fix_mask_conflict({"0": {"weight": kept.view(6, 1, 1, 1)}}, model, image())
    assert fixed["0"]["weight"].flatten().tolist() == fixed["0"]["bias"].tolist() == kept.tolist()
    assert set(fixed) == {"0"}
    assert check_repaired(model, fixed) == 4


def check_repaired(model: nn.Module, masks: Masks) -> int:
    """Compact, and return how many outputs the first layer has."""
    small = engine.ModelSpeedup(copy.deepcopy(model), image(), masks).speedup_model()
    return int(small[0].out_channels)


def test_roles() -> None:
    """Scales put the units out, and are what a criterion looks at; directions are neither scored nor masked."""
    first = engine.dependency_groups(NETS["convolutions"](), image())[0]
    roles = {(m.parameter, m.role, m.units.ndim) for m in first.members}
    assert (f"0.{ORIGINAL}0", "out", 4) in roles and (f"0.{ORIGINAL}1", "in", 4) in roles
    assert (f"2.{ORIGINAL}1", "in", 4) in roles


def test_a_direction_of_which_nothing_is_left_holds_its_inputs() -> None:
    """An output that looks only at inputs that go: its direction would be zero, and no scale makes up for that."""
    model = NETS["convolutions"]()
    masks = {name: entries for name, entries in halved(model).items() if name.startswith("0")}
    direction = model[2].get_parameter(f"{ORIGINAL}1")
    with torch.no_grad():
        direction[3, 3:] = 0  # by chance, not by a mask
    assert check_exact(model, masks, image()).slices[f"2.{ORIGINAL}1"].shape == (8, 3, 3, 3)
    with torch.no_grad():
        direction[3, :3], direction[3, 3:] = 0, 1
    assert f"2.{ORIGINAL}1" not in check_exact(model, masks, image()).slices


@pytest.mark.parametrize("other", ["spectral_norm", "orthogonal"])
def test_what_spans_all_of_a_weight_stays(other: str) -> None:
    """Outputs and inputs, with the reason; layers further away are free."""
    middle = getattr(parametrizations, other)(nn.Conv2d(6, 6, 1))
    model = net(nn.Conv2d(3, 6, 3), nn.ReLU(), middle, nn.ReLU(), nn.Conv2d(6, 8, 1), nn.Conv2d(8, 4, 1))
    reasons = {g.name: g.reason for g in engine.dependency_groups(model, image())}
    assert "in '2.parametrizations.weight.0'" in str(reasons["0"]) and "in '2" in str(reasons["2"])
    assert reasons["4"] is None
    plan = check_exact(model, halved(model), image(), image(9))
    assert plan.slices["4.weight"].shape[0] == 4 and not any(n.startswith(("0.", "2.")) for n in plan.slices)


def test_weights_without_data() -> None:
    """On meta no scale can be worked out, so that inputs stay; outputs go."""
    model = nn.Sequential(norm(nn.Linear(3, 6)), nn.ReLU(), norm(nn.Linear(6, 4)), nn.ReLU(), nn.Linear(4, 2)).to(
        "meta"
    )
    kept = torch.tensor([1, 0, 1, 1, 0, 1.0])
    other = torch.tensor([1, 0, 1, 1.0])
    masks = {"0": {"weight": kept.view(6, 1), "bias": kept}, "2": {"weight": other.view(4, 1), "bias": other}}
    flops = engine.count_flops_params(model, torch.zeros(1, 3, device="meta"), verbose=False, masks=masks)[0]
    assert flops == 3 * 6 + 6 * 3 + 3 * 2


class Router(nn.Module):
    """Converts a layer without a bias to the input's dtype at each call, as the routers of Switch Transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(6, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        self.classifier = self.classifier.to(x.dtype)
        scores: torch.Tensor = self.classifier(x)
        return scores


def routed() -> nn.Module:
    """A router between two layers, without a bias that could take up what is folded."""
    return randomised(nn.Sequential(nn.Linear(5, 6), nn.Sigmoid(), Router(), nn.Tanh(), nn.Linear(4, 3)))


def test_a_layer_that_converts_itself() -> None:
    """Its inputs and outputs go."""
    model, x = routed(), torch.randn(4, 5, dtype=torch.float64)
    reasons = {g.name: g.reason for g in engine.dependency_groups(model, x)}
    assert reasons["0"] is None and reasons["2.classifier"] is None
    gone = torch.tensor([1, 1, 0, 1, 0, 1.0])
    into = gone.expand(4, 6) * torch.tensor([[1], [0], [1], [1.0]])
    plan = check_exact(model, {"0": {"weight": gone[:, None].expand(6, 5)}, "2.classifier": {"weight": into}}, x)
    assert plan.slices["2.classifier.weight"].shape == (3, 4) and plan.slices["0.weight"].shape == (4, 5)


def test_a_weight_that_an_op_without_outputs_reads() -> None:
    """Nothing behind the layer takes up a constant: no rule, no error, exact."""
    model, x = routed(), torch.randn(4, 5, dtype=torch.float64)
    unknown = engine.Registry(r for r in engine.RULES.distinct() if "_has_compatible_shallow_copy_type" not in r.ops)
    masks = {"0": {"weight": torch.tensor([1, 1, 0, 1, 0, 1.0])[:, None].expand(6, 5)}}
    expected = run(masked(model, masks), x)
    speedup = engine.ModelSpeedup(model, x, masks, rules=unknown)
    assert relative_error(expected, run(speedup.speedup_model(), x)) < 1e-9
    assert "0.weight" not in speedup.plan.slices


class _Across(nn.Module):
    """A convolution with norms along one dimension of its weight and scales along another one."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, 6, 1), nn.Conv2d(8, 4, 1)
        self.v, self.g = nn.Parameter(torch.randn(8, 6, 1, 3)), nn.Parameter(torch.randn(1, 1, 1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve."""
        weight = torch._weight_norm(self.v, self.g, 1)
        return self.leave(torch.relu(nn.functional.conv2d(self.enter(x), weight)))  # type: ignore[no-any-return]


def test_scales_along_another_dimension_than_the_norms() -> None:
    """Such a weight is kept whole; the layers around it lose channels, exactly."""
    model = net(_Across())
    plan = check_exact(model, halved(model), image(), image(9))
    assert not {"0.v", "0.g"} & plan.slices.keys()

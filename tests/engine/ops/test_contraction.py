"""Convolutions and linear layers against running them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import DeformConv2d

import engine
from engine.analysis.constraints import Grouped
from engine.ops.products import Product
from tests.engine.exactness import KINDS, check_exact, masked, randomised, run
from tests.engine.nets import Mean, Net, constants_of, dead, image, structure
from tests.engine.ops.brute import check_macs

LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1, stride=2), (2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, (3, 1), padding=(1, 0), dilation=2), (2, 4, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(4, 6, 2), (2, 4, 3, 3, 3)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 6, 6)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (2, 4, 6, 6)),
    "depthwise multiplier": (lambda: nn.Conv2d(4, 8, 3, groups=4), (2, 4, 6, 6)),
    "linear": (lambda: nn.Linear(4, 6), (2, 4)),
    "linear on tokens": (lambda: nn.Linear(4, 6, bias=False), (2, 5, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 5, 5)),
    "transposed grouped": (lambda: nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2), (2, 4, 5, 5)),
    "transposed depthwise": (lambda: nn.ConvTranspose1d(4, 4, 3, groups=4), (2, 4, 5)),
    "unbatched": (lambda: nn.Conv2d(4, 6, 3), (4, 6, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_macs_are_torchs(name: str) -> None:
    """Half of FlopCounterMode's forward count."""
    make, shape = LAYERS[name]
    assert check_macs(make(), torch.randn(*shape)) > 0


@pytest.mark.parametrize("name", LAYERS)
def test_links_are_what_has_an_influence(name: str) -> None:
    """With random entries masked, (group, output, input) is linked exactly where a changed input changes it."""
    make, shape = LAYERS[name]
    layer = make().double()
    mask = (torch.rand_like(layer.weight) > 0.7).double()
    constants = constants_of(layer, torch.randn(*shape, dtype=torch.float64), {"": {"weight": mask}})
    c = engine.RULES.contraction(constants.graph.nodes[-1])
    found = constants.links(c).dense()
    small = masked(layer, {"": {"weight": mask}})
    x = torch.randn(*shape, dtype=torch.float64)
    before = run(small, x)[0].movedim(c.output_dim, 0).flatten(1)
    really = torch.zeros(c.groups * c.outputs, c.groups * c.inputs, dtype=torch.bool)
    for channel in range(c.groups * c.inputs):
        other = x.clone()
        other.select(c.input_dim, channel).normal_()
        after = run(small, other)[0].movedim(c.output_dim, 0).flatten(1)
        really[:, channel] = (after != before).any(1)
    blocks = torch.block_diag(*found.to(torch.float64)).bool()
    assert torch.equal(blocks, really)


@pytest.mark.parametrize("name", [n for n in LAYERS if n not in ("unbatched", "linear", "linear on tokens")])
@pytest.mark.parametrize("bias", [0.0, 0.7])
def test_constants_behind_constants(name: str, bias: float) -> None:
    """``b + Σ W c`` where all inputs are constants and no border disturbs; otherwise only dead outputs are known."""
    make, shape = LAYERS[name]
    layer = make().double()
    stem = getattr(nn, f"Conv{len(shape) - 2}d")(4, 4, 1).double()
    nn.init.constant_(stem.bias, bias)
    model = nn.Sequential(stem, layer).eval()
    masks = dead(model, {"0": range(4)})
    constants = constants_of(model, torch.randn(*shape, dtype=torch.float64), masks)
    predicted = constants[constants.graph.outputs[0]]
    small = masked(model, masks)
    for size in (shape, (3, 4, *(n + 3 for n in shape[2:]))):
        out = run(small, torch.randn(*size, dtype=torch.float64))[0]
        expected = predicted.expand_as(out)
        where = ~expected.isnan()
        torch.testing.assert_close(out[where], expected[where])
    disturbed = bias != 0 and (name.startswith("transposed") or name in ("conv1d", "conv2d"))
    assert predicted.isnan().all() == disturbed


def test_depthwise_ties_input_and_output() -> None:
    """Each channel is its own group: one slot in and out, with weight and bias."""
    found = structure(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 2, 1)), image().float()
    )
    first, second = (found.along(found.graph.stored[n], 0) for n in ("0.weight", "1.weight"))
    assert torch.equal(first, second) and torch.equal(first, found.along(found.graph.stored["1.bias"], 0))


def test_a_convolution_ties_its_columns_to_the_input() -> None:
    """Input columns carry the producer's slots; outputs are new."""
    found = structure(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 3), nn.Conv2d(5, 2, 1)), image().float())
    weight = found.graph.stored["1.weight"]
    assert torch.equal(found.along(weight, 1), found.along(found.graph.stored["0.weight"], 0))
    assert not set(found.along(weight, 0).tolist()) & set(found.along(weight, 1).tolist())


def test_depthwise_with_multiplier() -> None:
    """Two outputs per input: an input goes only with its group, whose outputs then go as a whole."""
    model = randomised(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 3, padding=1, groups=4), Mean(), nn.Linear(8, 2))
    )
    found = structure(model, image())
    assert any(isinstance(c, Grouped) and c.outputs.shape == (4, 2) for c in found.constraints)
    masks = engine.fix_mask_conflict(dead(model, {"0": [1], "1": [2, 3, 4]}, bias=True), model, image())
    plan = check_exact(model, masks, image(), image(9))
    assert plan.slices["1.weight"].shape == (6, 1, 3, 3) and plan.attributes["1"]["groups"] == 3
    for kind in KINDS:
        check_exact(model, KINDS[kind](model, 1), image(), image(9))


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_transposed_convolution(kind: str) -> None:
    """Its weight is (inputs, outputs per group): rows are inputs, and outputs of a group are columns."""
    model = randomised(
        nn.Sequential(
            nn.Conv2d(3, 8, 1),
            nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, groups=2),
            nn.ReLU(),
            Mean(),
            nn.Linear(6, 2),
        )
    )
    check_exact(model, KINDS[kind](model, 2), image(), image(4))


def test_balanced_masks_shrink_a_grouped_transposed_convolution() -> None:
    """Equal counts per group go, and the attributes say so."""
    model = randomised(
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.ConvTranspose2d(8, 6, 3, groups=2), Mean(), nn.Linear(6, 2))
    )
    masks = dead(model, {"0": [0, 5]}, bias=True)
    plan = check_exact(model, masks, image(), image(4))
    assert plan.slices["1.weight"].shape == (6, 3, 3, 3)
    assert plan.attributes["1"] == {"in_channels": 6}


def test_attributes_are_those_of_the_small_layers() -> None:
    """Channel counts of modules are true after compaction, so that printing and re-building them works."""
    model = randomised(
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 6, 1), Mean(), nn.Linear(6, 2))
    )
    masks = dead(model, {"0": [0, 1], "1": [0, 1], "2": [5]}, bias=True)
    engine.ModelSpeedup(model, image(), masks).speedup_model()
    shapes = [(m.in_channels, m.out_channels, m.groups) for m in model[:3]]
    assert shapes == [(3, 6, 1), (6, 6, 6), (6, 5, 1)]
    assert (model[4].in_features, model[4].out_features) == (5, 2)
    for layer in model[:3]:
        assert (
            layer.weight.shape
            == type(layer)(*shapes[list(model).index(layer)][:2], layer.kernel_size, groups=layer.groups).weight.shape
        )


def test_use_of_a_weight_that_is_computed() -> None:
    """A weight made at each call (weight standardisation) freezes what it reads, and stays exact."""

    def forward(m: Net, x: Tensor) -> Tensor:
        w = m.conv.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.var((1, 2, 3), keepdim=True) + 1e-5).sqrt()
        return m.head(torch.conv2d(m.stem(x), w, m.conv.bias).mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 6, 1), conv=nn.Conv2d(6, 4, 3), head=nn.Linear(4, 2)))
    check_exact(model, dead(model, {"stem": [0, 1], "conv": [2]}), image(), image(8))


def test_groups_written_in_the_code_stay() -> None:
    """``F.conv2d(..., groups=4)`` without an attribute: no group may go."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(torch.conv2d(m.stem(x), m.conv.weight, groups=4).mean((2, 3)))

    model = Net(forward, stem=nn.Conv2d(3, 4, 1), conv=nn.Conv2d(1, 4, 3), head=nn.Linear(4, 2))
    reason = engine.dependency_groups(model, image().float())[0].reason
    assert reason is not None and "groups=4" in reason
    check_exact(randomised(model), dead(model, {"stem": [0, 1]}), image())


@pytest.mark.parametrize("padding_mode", ["reflect", "replicate", "circular"])
def test_padding_modes_without_zeros_need_no_carrier(padding_mode: str) -> None:
    """A constant padded with itself is a constant: it goes to the bias, and every dead channel goes."""
    model = randomised(
        nn.Sequential(
            nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 3, padding=1, padding_mode=padding_mode), Mean(), nn.Linear(4, 2)
        )
    )
    plan = check_exact(model, dead(model, {"0": [0, 1, 2]}), image(), image(9))
    assert plan.slices["0.weight"].shape[0] == 3 and [f.name for f in plan.folds] == ["1.bias"]


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "scaled": lambda w: w * 0.5,
    "normalised": lambda w: w / (1 + w.norm()),
    "normalised per output": lambda w: w / (1 + w.flatten(1).norm(dim=1).view(-1, 1, 1, 1)),
    "clamped": lambda w: w.clamp(-0.1, 0.1),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", [None, "union", "score"])
def test_a_computed_weight_compacts_exactly(name: str, kind: str, policy: str | None) -> None:
    """A function of a parameter as weight: whatever the rules make of it, no mask crashes, and the result is exact."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(torch.conv2d(m.stem(x), WEIGHTS[name](m.conv.weight), m.conv.bias, padding=1).mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 4, 1), conv=nn.Conv2d(4, 4, 3), head=nn.Linear(4, 2)))
    masks = KINDS[kind](model, 1)
    masks = masks if policy is None else engine.fix_mask_conflict(masks, model, image(), policy)
    check_exact(model, masks, image(), image(8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [4, 6], ids=["narrower", "as wide"])
def test_a_weight_shared_by_a_convolution_and_its_transpose(kind: str, width: int) -> None:
    """A tied auto-encoder: outputs of the one are inputs of the other, and both have as many where they are as wide."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head((x + torch.conv_transpose2d(torch.tanh(m.conv(x)), m.conv.weight)).mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 6, 1), conv=nn.Conv2d(6, width, 3), head=nn.Linear(6, 2)))
    check_exact(model, KINDS[kind](model, 1), image(), image(8))


class Deformed(nn.Module):
    """Every channel read at the same places, which the picture says; some of them outside."""

    def __init__(self, groups: int = 1, bias: bool = True, places: int = 1) -> None:
        super().__init__()
        self.offset, self.mask = nn.Conv2d(3, 18 * places, 3, padding=1), nn.Conv2d(3, 9 * places, 3, padding=1)
        self.stem, self.last, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(6, 4, 1), nn.Linear(4, 2)
        self.conv = DeformConv2d(8, 6, 3, padding=1, groups=groups, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores."""
        features = torch.sigmoid(self.stem(x))
        features = self.conv(features, self.offset(x), torch.sigmoid(self.mask(x)))
        return self.head(torch.relu(self.last(torch.relu(features))).mean((2, 3)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"bias": False}, {"places": 2}], ids=str)
def test_deformable_convolution(options: dict[str, int], kind: str) -> None:
    """Exact under any masks: offsets stay, and all channels that are read at the same places can go."""
    model = randomised(Deformed(**options))
    check_exact(model, KINDS[kind](model, 1), image(), image(8))


def test_channels_of_a_deformable_convolution_go() -> None:
    """Inputs and outputs; not where groups of channels have places of their own."""
    masks = {"stem": [0, 1, 4, 5], "conv": [0, 1, 2]}
    model = randomised(Deformed())
    plan = check_exact(model, dead(model, masks, bias=True), image(), image(8))
    assert plan.slices["conv.weight"].shape[0] == 3 and plan.slices["stem.weight"].shape[0] < 8
    groups = {g.name: g.reason for g in engine.dependency_groups(model, image())}
    assert groups["stem"] is None and groups["conv"] is None and "reads where it says" in str(groups["offset"])
    apart = {g.name: g.reason for g in engine.dependency_groups(Deformed(places=2).double(), image())}
    assert "runs over it" in str(apart["stem"]) and apart["conv"] is None


def test_positions_with_slots_in_front_of_a_kernel() -> None:
    """A batch that is filled image by image has slots along its positions: they end at a kernel with a stride."""

    def forward(m: Net, x: Tensor) -> Tensor:
        batch = x.new_zeros(x.shape)
        for place, item in zip(batch, x, strict=True):
            place[:, : item.shape[1], : item.shape[2]].copy_(item)
        return m.head(torch.relu(m.stem(batch)).mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 8, 3, 2, 1), head=nn.Linear(8, 2)))
    plan = check_exact(model, dead(model, {"stem": [0, 4]}, bias=True), image(), image(8))
    assert plan.slices["stem.weight"].shape[0] == 6


class Blur(nn.Module):
    """A fixed filter over each channel (anti-aliasing), its number of groups written in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.channels = kind, 8
        self.register_buffer("one", torch.rand(1, 1, 3, 3))
        self.register_buffer("each", torch.rand(8, 1, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Return blurred channels at half of the resolution."""
        if self.kind == "repeated":
            return F.conv2d(x, self.one.repeat(self.channels, 1, 1, 1), stride=2, groups=self.channels)
        groups = {"written": 8, "shape": x.shape[1], "attribute": self.channels}[self.kind]
        return F.conv2d(x, self.each, stride=2, groups=groups)


@pytest.mark.parametrize("kind", ["shape", "attribute", "repeated", "written"])
def test_a_fixed_filter_over_each_channel(kind: str) -> None:
    """The number of groups follows a shape, or is set in an attribute; what is written down or made anew stays."""
    model = randomised(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), Blur(kind), nn.Conv2d(8, 4, 1), nn.Flatten()))
    plan = check_exact(model, dead(model, {"0": [1, 2, 5]}, bias=True), image(9))
    assert ("0.weight" in plan.slices) == (kind in ("shape", "attribute"))
    assert plan.is_empty or plan.slices["0.weight"].shape[0] == 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["addmm", "mm", "matmul"])
def test_a_layer_that_is_a_product_with_its_matrix(op: str, kind: str) -> None:
    """As GPT-2 writes them: its outputs and inputs go like those of a linear layer, under any masks."""
    model = randomised(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), Product(8, 6, op), nn.Tanh(), nn.Linear(6, 3)))
    x, other = (torch.randn(n, 5).double() if op == "mm" else torch.randn(n, 4, 5).double() for n in (2, 3))
    masks = dead(model, {"0": [1, 2]}, bias=True)
    masks["2"] = {"weight": torch.ones(8, 6).index_fill(1, torch.tensor([0, 3, 4]), 0), "bias": torch.ones(6)}
    masks["2"]["bias"][[0, 3, 4]] = 0
    plan = check_exact(model, masks, x, other)
    assert plan.slices["2.weight"].shape == (6, 3) and plan.slices["4.weight"].shape == (3, 3)
    groups = {group.name: group for group in engine.dependency_groups(model, x)}
    assert groups["2"].size == 6 and groups["2"].reason is None
    assert engine.count_flops_params(model, x, verbose=False)[0] == (5 * 8 + 8 * 6 + 6 * 3) * (x.numel() // 5 // len(x))
    check_exact(model, KINDS[kind](model, 3), x, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["addmm", "mm", "matmul"])
def test_a_layer_that_is_a_product_with_the_transpose_of_its_matrix(op: str, kind: str) -> None:
    """As Falcon writes them; a square matrix is not taken for its transpose."""
    layers = (Product(8, 8, op, turned=True), nn.Tanh(), Product(8, 6, op, turned=True), nn.Linear(6, 3))
    model = randomised(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), *layers))
    x, other = (torch.randn(n, 5).double() if op == "mm" else torch.randn(n, 4, 5).double() for n in (2, 3))
    plan = check_exact(model, dead(model, {"0": [1, 2], "2": [0, 5, 6], "4": [3]}, bias=True), x, other)
    assert [plan.slices[f"{n}.weight"].shape for n in (0, 2, 4, 5)] == [(6, 5), (5, 6), (5, 5), (3, 5)]
    groups = {group.name: group for group in engine.dependency_groups(model, x)}
    assert {name: group.size for name, group in groups.items() if group.reason is None} == {"0": 8, "2": 8, "4": 6}
    check_exact(model, KINDS[kind](model, 3), x, other)


@pytest.mark.parametrize("options", [{"alpha": 2.0}, {"beta": 0.5}])
def test_a_scaled_sum_is_no_layer(options: dict[str, float]) -> None:
    """What goes in stays whole, and the result is exact."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(torch.addmm(m.product.bias, m.stem(x), m.product.weight, **options))

    parts = {"stem": nn.Linear(5, 8), "product": Product(8, 6, "addmm"), "head": nn.Linear(6, 3)}
    model = randomised(Net(forward, **parts))
    plan = check_exact(model, dead(model, {"stem": [1, 2]}, bias=True), torch.randn(2, 5).double())
    assert "stem.weight" not in plan.slices


class Rows(nn.Module):
    """A linear function whose bias is a matrix: a row that is computed or stored, or one row for each sample."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem, self.wide, self.head, self.kind = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 3), kind
        self.row, self.rows = nn.Parameter(torch.randn(1, 6)), nn.Parameter(torch.randn(5, 6))

    def bias(self) -> Tensor:
        """Return it."""
        return {"computed": (2 * self.wide.bias)[None], "row": self.row, "rows": self.rows}[self.kind]

    def forward(self, x: Tensor) -> Tensor:
        """(5, 4) -> (5, 3)."""
        return self.head(F.linear(torch.relu(self.stem(x)), self.wide.weight, self.bias()).tanh())  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["computed", "row", "rows"])
def test_a_bias_that_is_a_matrix(kind: str) -> None:
    """A row, as noisy layers of reinforcement learning add it, goes with the outputs; several rows keep them."""
    model, x = randomised(Rows(kind)), torch.randn(5, 4, dtype=torch.float64)
    masks = dead(model, {"stem": [0, 1, 5], "wide": [2, 3]}, bias=True)
    masks[""] = {"row": torch.tensor([[1, 1, 0, 0, 1, 1]])}
    plan = check_exact(model, masks, x, 2 * x)
    assert plan.slices["stem.weight"].shape[0] == 5
    assert plan.slices["wide.weight"].shape == (6 if kind == "rows" else 4, 5)

"""What users of other tools reported, as tests: each names its threads.

Those about training (checkpoints, optimizers, ranks) are listed in ``tests/lightning_compress/test_fixtures.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import engine
from engine.sensitivity.importance import cut, l1, unit_rows
from tests.engine.exactness import KINDS, Masks, channel_masks, check_exact, parameters, randomised
from tests.engine.nets import Mean, Net, dead, image, plain, residual_net


def half(model: nn.Module, example: Any) -> Masks:
    """Mask half of the units of each group, chosen by their weights."""
    groups = engine.dependency_groups(model, example)
    keep = {g.name: cut(l1(unit_rows(g, model.get_parameter)), 0.5, g.rows) for g in groups if g.reason is None}
    assert keep, [g.reason for g in groups]
    return engine.group_masks(groups, keep)


def check_all(model: nn.Module, *batches: Any) -> engine.Plan:
    """Exact under independent channel masks, single weights, input columns, and half of each group, which all go."""
    for kind in KINDS.values():
        check_exact(model, kind(model, 3), *batches)
    return check_exact(model, half(model, batches[0]), *batches)


def tokens(batch: int = 2, length: int = 5, width: int = 6) -> Tensor:
    """Random tokens."""
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


# ---------------------------------------------------------------- constants


@pytest.mark.parametrize("padding", [0, 1])
def test_batch_norms_beta(padding: int) -> None:
    """A masked convolution in front of a norm puts out β, not 0: nni#2130, nni#3010, nni#5095.

    Only the convolutions are masked, so each dead channel leaves the norm's shift; at borders too.
    """
    model = plain(padding=padding)
    masks = dead(model, {"0": [0, 2, 5], "3": [1, 4]})
    plan = check_exact(model, masks, image(), image(9, batch=3))
    # with a border one dead channel stays and carries the constants of the others
    assert plan.slices["0.weight"].shape[0] == (4 if padding else 3)


def test_a_layer_that_dies_completely() -> None:
    """All channels of a layer masked, where simplify crashes: its constant stays, and everything still runs."""
    for model in (plain(), plain(bias=False), residual_net()):
        name = "branch" if hasattr(model, "branch") else "3"
        width = model.get_submodule(name).out_channels
        check_exact(model, dead(model, {name: range(width)}, bias=True), image(), image(9))
        check_exact(model, channel_masks(model, 0, amount=1.0), image(), image(9))


# ---------------------------------------------------------------- sizes in the code


@pytest.mark.parametrize("view", ["derived", "literal"])
def test_view_with_constants(view: str) -> None:
    """``x.view(-1, 128)`` and ``x.reshape(x.shape[0], c * h * w)``: nni#5449, Torch-Pruning#125.

    A derived size follows; for a literal one the layer stays whole, and is named with the line.
    """

    def literal(m: Net, x: Tensor) -> Tensor:
        return m.head(torch.relu(m.hidden(torch.relu(m.conv(x)).view(-1, 128))))

    def derived(m: Net, x: Tensor) -> Tensor:
        x = torch.relu(m.conv(x))
        return m.head(torch.relu(m.hidden(x.reshape(x.shape[0], x.shape[1] * x.shape[2] * x.shape[3]))))

    forward = literal if view == "literal" else derived
    parts = {"conv": nn.Conv2d(3, 8, 3), "hidden": nn.Linear(128, 6), "head": nn.Linear(6, 2)}
    model = randomised(Net(forward, **parts))
    unsafe = engine.not_safe_to_prune(model, image())
    assert unsafe == (["conv"] if view == "literal" else [])
    assert all("test_fixtures.py:" in reason for reason in unsafe.reasons.values())
    plan = check_all(model, image(), image(batch=3))
    assert plan.slices["hidden.weight"].shape == ((3, 128) if view == "literal" else (3, 64))


class Attention(nn.Module):
    """Self-attention as vision transformers write it."""

    def __init__(self, width: int = 12, heads: int = 4) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        weights = (q @ k.transpose(-2, -1) * (c // self.num_heads) ** -0.5).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, c))


def attending() -> nn.Module:
    """A block with attention between two linear layers."""
    parts = {"stem": nn.Linear(6, 12), "norm": nn.LayerNorm(12), "attention": Attention(), "head": nn.Linear(12, 3)}
    forward: Callable[..., Tensor] = lambda m, x: (lambda y: m.head(y + m.attention(m.norm(y))))(m.stem(x))  # noqa: E731
    return randomised(Net(forward, **parts))


def test_attention_heads() -> None:
    """Whole heads go, and a ``num_heads`` that still says the old number does no harm: nni#5187, Torch-Pruning#287."""
    model = attending()
    group = next(g for g in engine.dependency_groups(model, tokens()) if g.name == "attention.qkv")
    assert group.reason is None
    check_exact(model, half(model, tokens()), tokens(), tokens(3, 7))
    masks = engine.group_masks([group], {group.name: cut(torch.arange(group.size), 0.5, group.rows)})
    plan = check_exact(model, masks, tokens(), tokens(3, 7))
    assert plan.slices["attention.qkv.weight"].shape == (18, 12) and plan.slices["attention.proj.weight"].shape == (
        12,
        6,
    )


def test_attention_that_returns_its_weights() -> None:
    """``nn.MultiheadAttention`` with ``need_weights=True`` and ``False`` puts out the same as the masked one."""
    for need in (True, False):

        def forward(m: Net, x: Tensor, need: bool = need) -> Any:
            x = m.stem(x)
            found, weights = m.attention(x, x, x, need_weights=need)
            return (m.head(found + x), weights) if need else m.head(found + x)

        parts = {"stem": nn.Linear(6, 8), "head": nn.Linear(8, 3)}
        model = randomised(Net(forward, attention=nn.MultiheadAttention(8, 2, batch_first=True), **parts))
        check_all(model, tokens(), tokens(3, 7))


# ---------------------------------------------------------------- kinds of layers


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers(kind: Callable[..., nn.Module]) -> None:
    """LSTM and GRU between other layers, exactly, at other lengths too: Torch-Pruning#44, Torch-Pruning#404."""

    def forward(m: Net, x: Tensor) -> Tensor:
        steps, _ = m.layer(torch.tanh(m.first(torch.relu(m.front(x)))))
        return m.out(torch.relu(m.hidden(steps[:, -1])))

    parts = {"front": nn.Linear(6, 8), "first": nn.Linear(8, 6), "hidden": nn.Linear(4, 6), "out": nn.Linear(6, 3)}
    model = randomised(Net(forward, layer=kind(6, 4, batch_first=True), **parts))
    plan = check_all(model, tokens(), tokens(3, 9))
    assert plan.slices["front.weight"].shape[0] == 4 and plan.slices["hidden.weight"].shape[0] == 3


def test_one_output_channel_is_no_depthwise_convolution() -> None:
    """``out_channels=1`` with ``groups=1`` contracts its inputs: Torch-Pruning#126, Torch-Pruning#179."""
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 1, 1), nn.ReLU(), nn.Conv2d(1, 4, 3), Mean(), nn.Linear(4, 2)]
    model = randomised(nn.Sequential(*layers))
    plan = check_all(model, image(8), image(11))
    assert plan.slices["0.weight"].shape[0] == 4 and plan.slices["2.weight"].shape == (1, 4, 1, 1)


def test_depthwise_convolution_with_a_multiplier() -> None:
    """``groups=in_channels``, two outputs each: equally many go of each group, and groups go as a whole: NNCF#986."""
    layers = [nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 12, 3, padding=1, groups=6), nn.ReLU(), nn.Conv2d(12, 4, 1)]
    model = randomised(nn.Sequential(*layers, Mean(), nn.Linear(4, 2)))
    plan = check_all(model, image(), image(9))
    assert plan.slices["2.weight"].shape == (3, 1, 3, 3) and plan.attributes["2"]["groups"] == 3
    plan = check_exact(model, dead(model, {"0": [0, 1, 2]}, bias=True), image(), image(9))
    assert plan.slices["2.weight"].shape == (6, 1, 3, 3) and plan.attributes["2"]["groups"] == 3


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolution(groups: int) -> None:
    """Its weight has the inputs first: Torch-Pruning#99, nni#3013."""
    up = nn.ConvTranspose2d(8, 6, 4, stride=2, padding=1, groups=groups)
    model = randomised(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), up, nn.ReLU(), Mean(), nn.Linear(6, 2)))
    plan = check_all(model, image(), image(9))
    assert plan.slices["2.weight"].shape == ((4, 3, 4, 4) if groups == 1 else (4, 2, 4, 4))


def test_channel_shuffle() -> None:
    """ShuffleNet's shuffle by view, transpose and flatten: Torch-Pruning#14, nni#3453."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = torch.relu(m.norm(m.first(x)))
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).flatten(1, 2)
        return m.head(torch.relu(m.second(x)).mean((2, 3)))

    parts = {"first": nn.Conv2d(3, 8, 1), "norm": nn.BatchNorm2d(8), "head": nn.Linear(8, 2)}
    model = randomised(Net(forward, second=nn.Conv2d(8, 8, 3, groups=2), **parts))
    plan = check_all(model, image(), image(9))
    assert plan.slices["first.weight"].shape[0] == 4


def test_squeeze_and_excitation() -> None:
    """The gate of a dead channel multiplies zero, so it has no say; its own neurons go too: nni#4540."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = torch.relu(m.norm(m.conv(x)))
        gate = torch.sigmoid(m.up(torch.relu(m.down(x.mean((2, 3), keepdim=True)))))
        return m.head((x * gate).mean((2, 3)))

    parts = {"conv": nn.Conv2d(3, 8, 3), "norm": nn.BatchNorm2d(8), "head": nn.Linear(8, 2)}
    model = randomised(Net(forward, down=nn.Conv2d(8, 4, 1), up=nn.Conv2d(4, 8, 1), **parts))
    plan = check_all(model, image(), image(9))
    assert plan.slices["up.weight"].shape == (4, 2, 1, 1) and plan.slices["down.weight"].shape == (2, 4, 1, 1)
    masks = dead(model, {"conv": [0, 1, 2]}, bias=True) | dead(model, {"norm": []})
    masks["norm"] = dict.fromkeys(("weight", "bias"), masks["conv"]["bias"])
    assert check_exact(model, masks, image()).slices["up.weight"].shape[0] == 5


@pytest.mark.parametrize("gate", ["chunk", "glu"])
def test_gates(gate: str) -> None:
    """``a * sigmoid(b)`` of two halves of one layer: both halves lose the same channels."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.first(x)
        if gate == "glu":
            return m.head(F.glu(x, 1).mean((2, 3)))
        a, b = x.chunk(2, 1)
        return m.head((a * torch.sigmoid(b)).mean((2, 3)))

    model = randomised(Net(forward, first=nn.Conv2d(3, 12, 3), head=nn.Linear(6, 2)))
    plan = check_all(model, image(), image(9))
    assert plan.slices["first.weight"].shape[0] == 6 and plan.slices["head.weight"].shape == (2, 3)


# ---------------------------------------------------------------- sharing


def test_tied_embedding_and_head() -> None:
    """One table looks words up and scores them: its columns go once, its rows stay."""
    parts = {"table": nn.Embedding(11, 8), "inner": nn.Linear(8, 6), "back": nn.Linear(6, 8), "head": nn.Linear(8, 11)}
    forward: Callable[..., Tensor] = lambda m, x: m.head(m.back(torch.tanh(m.inner(m.table(x)))))  # noqa: E731
    model = Net(forward, **parts)
    model.head.weight = model.table.weight
    model = randomised(model)
    words = torch.randint(0, 11, (2, 5))
    plan = check_exact(model, half(model, words), words, torch.randint(0, 11, (3, 4)))
    assert plan.slices["table.weight"].shape == (11, 4)
    small = copy.deepcopy(model)
    engine.ModelSpeedup(small, words, half(model, words)).speedup_model()
    assert small.head.weight is small.table.weight


def test_a_module_called_twice() -> None:
    """The same weights see two inputs: what is dead in one call only stays."""
    forward: Callable[..., Tensor] = lambda m, x: m.head(m.twice(torch.relu(m.twice(m.stem(x)))).mean((2, 3)))  # noqa: E731
    model = randomised(Net(forward, stem=nn.Conv2d(3, 6, 1), twice=nn.Conv2d(6, 6, 3, padding=1), head=nn.Linear(6, 2)))
    plan = check_all(model, image(), image(9))
    assert plan.slices["twice.weight"].shape == (3, 3, 3, 3)


def test_a_module_under_two_names() -> None:
    """A shared sub-module is one layer, whatever name a mask uses."""
    shared = nn.Conv2d(6, 6, 3, padding=1)
    forward: Callable[..., Tensor] = lambda m, x: m.head(m.b(torch.relu(m.a(m.stem(x)))).mean((2, 3)))  # noqa: E731
    model = randomised(Net(forward, stem=nn.Conv2d(3, 6, 1), a=shared, b=shared, head=nn.Linear(6, 2)))
    plan = check_all(model, image(), image(9))
    assert plan.slices["a.weight"].shape == (3, 3, 3, 3)
    small = copy.deepcopy(model)
    masks = engine.fix_mask_conflict(dead(model, {"b": [0, 1], "stem": [0, 1]}, bias=True), model, image())
    engine.ModelSpeedup(small, image(), masks).speedup_model()
    assert small.a is small.b


@pytest.mark.parametrize("policy", ["union", "intersection", "score"])
def test_a_residual_with_masks_that_disagree(policy: str) -> None:
    """Two layers that are added lose different channels: exact as they are, and after repair."""
    model = residual_net()
    masks = dead(model, {"stem": [0, 1, 2], "branch": [2, 3]}, bias=True)
    check_exact(model, masks, image(), image(9))
    repaired = engine.fix_mask_conflict(masks, model, image(), policy)
    check_exact(model, repaired, image(), image(9))


def test_a_shortcut_padded_with_zeros() -> None:
    """CIFAR's ResNet, option A: every second pixel, channels filled up with zeros on both sides."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = torch.relu(m.stem(x))
        y = m.norm(m.wide(x)) + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))
        return m.head(torch.relu(y).mean((2, 3)))

    parts = {"stem": nn.Conv2d(3, 4, 3, padding=1), "norm": nn.BatchNorm2d(8), "head": nn.Linear(8, 2)}
    model = randomised(Net(forward, wide=nn.Conv2d(4, 8, 3, stride=2, padding=1), **parts))
    check_all(model, image(8), image(12))
    masks = dead(model, {"stem": [0, 1], "wide": [2, 3]}, bias=True)
    plan = check_exact(model, masks, image(8), image(12))
    assert plan.slices["stem.weight"].shape[0] < 4


# ---------------------------------------------------------------- parameters and buffers


class Scaled(nn.Module):
    """A block with a layer scale and a buffer per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 6, 3, padding=1), nn.Linear(6, 2)
        self.inner = nn.Conv2d(6, 6, 3)
        self.scale = nn.Parameter(torch.rand(6, 1, 1) + 0.5)
        self.register_buffer("mean", torch.rand(1, 6, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        x = torch.relu(self.conv(x)) - self.mean
        return self.head((x[..., 1:-1, 1:-1] + self.scale * self.inner(x)).mean((2, 3)))


def test_buffers_per_channel_and_layer_scales() -> None:
    """Both lose the channels of what they meet; a mean that is subtracted from a dead channel is a constant."""
    model = randomised(Scaled())
    plan = check_all(model, image(), image(9))
    assert plan.slices["scale"].shape == (3, 1, 1) and plan.slices["mean"].shape == (1, 3, 1, 1)


def test_frozen_layers() -> None:
    """Layers that are not trained shrink like others, and stay frozen."""
    model = plain()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("0.", "1.")))
    small = copy.deepcopy(model)
    engine.ModelSpeedup(small, image(), half(model, image())).speedup_model()
    assert small[0].out_channels == 3 and parameters(small) < parameters(model)
    assert [p.requires_grad for p in small.parameters()] == [p.requires_grad for p in model.parameters()]
    assert {p.requires_grad for p in small.parameters()} == {True, False}
    check_exact(model, half(model, image()), image(), image(9))


def test_weight_norm() -> None:
    """``g v / |v|`` is computed at each call from all columns: masks at ``original0`` close outputs, exactly."""
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), weight_norm(nn.Conv2d(8, 6, 3)), nn.ReLU(), nn.Conv2d(6, 4, 1)]
    model = randomised(nn.Sequential(*layers, Mean(), nn.Linear(4, 2)))
    assert {g.name: g.reason for g in engine.dependency_groups(model, image())}["2"] is None
    kept = torch.tensor([0, 1, 1, 0, 1, 1]).double()
    masks = half(model, image()) | dead(model, {"0": [0, 1]}, bias=True)
    masks |= {"2.parametrizations.weight": {"original0": kept.view(6, 1, 1, 1)}, "2": {"bias": kept}}
    plan = check_exact(model, masks, image(), image(9))
    assert plan.slices["4.weight"].shape == (2, 4, 1, 1)
    assert plan.slices["2.parametrizations.weight.original1"].shape == (4, 6, 3, 3)


# ---------------------------------------------------------------- outputs, dtypes, devices


@dataclass
class Found:
    """What a model returns."""

    scores: Tensor
    features: Tensor


RESULTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dataclass": Found,
    "dict": lambda scores, features: {"scores": scores, "more": [features]},
    "nested": lambda scores, features: (scores, (features, {"again": scores})),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_outputs_of_any_kind(kind: str) -> None:
    """A dict, a dataclass, several outputs: all of them are the model's outputs, and stay whole."""

    def forward(m: Net, x: Tensor) -> Any:
        x = torch.relu(m.stem(x))
        return RESULTS[kind](m.head(torch.relu(m.body(x)).mean((2, 3))), m.out(x))

    parts = {"stem": nn.Conv2d(3, 6, 3), "body": nn.Conv2d(6, 8, 1), "out": nn.Conv2d(6, 4, 1), "head": nn.Linear(8, 2)}
    model = randomised(Net(forward, **parts))
    plan = check_all(model, image(), image(9))
    assert plan.slices["body.weight"].shape == (4, 3, 1, 1) and plan.slices["out.weight"].shape == (4, 3, 1, 1)


def test_half_precision() -> None:
    """A bf16 model stays one, and what it computes is what the masked one computes, rounded."""
    model = plain().bfloat16()
    masks = half(model, image(dtype=torch.bfloat16))
    speedup = engine.ModelSpeedup(model, image(dtype=torch.bfloat16), masks)
    speedup.speedup_model()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and model[0].out_channels == 3
    assert speedup.certificate.verified and speedup.certificate.max_error < 1e-9  # in float64, before rounding


def test_another_device() -> None:
    """On ``meta``, the device that every machine has besides its CPU: shapes and plan are those of the CPU."""
    model = plain()
    masks = half(model, image())
    far = copy.deepcopy(model).to("meta")
    for example in (image(), image().to("meta")):
        if example.is_meta:
            engine.ModelSpeedup(far, example, masks, confidence=0).speedup_model()
        else:
            engine.ModelSpeedup(model, example, masks).speedup_model()
    assert [p.shape for p in far.parameters()] == [p.shape for p in model.parameters()]
    assert all(p.is_meta for p in far.parameters())


# ---------------------------------------------------------------- measuring


def test_sensitivity_of_coupled_layers() -> None:
    """A residual layer looks robust as long as its own channels go alone; with ``group=True`` not: fasterai#40."""
    model = residual_net()
    expected = model(image()).detach()

    def agreement() -> float:
        return -float((model(image()).detach() - expected).abs().mean())

    def loss(group: bool) -> dict[str, float]:
        analysis = engine.SensitivityAnalysis(model, agreement, [0.5], group=group, dummy_input=image())
        return {name: -table[0.5] for name, table in analysis.analysis().items()}

    alone, together = loss(False), loss(True)
    assert max(together.values()) > alone["branch"] + 1e-6

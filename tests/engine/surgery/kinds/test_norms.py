"""Norms whose statistics keep the full width while channels are gone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import layer_norm as over_layers
from torch.nn.functional import rms_norm

import engine
from engine.errors import PlanError
from engine.surgery.exchange import Change
from engine.surgery.full_width import FullWidth
from engine.surgery.kinds.norms import NarrowedNorm, can_narrow
from engine.surgery.spans import weights_of
from tests.engine.attentions import stored, tokens
from tests.engine.exactness import Masks, check_exact, masked, randomised, relative_error, run
from tests.engine.nets import Net, dead, image, snapshot, unchanged


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of images, as in torchvision."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape, (batch, channels, height, width)."""
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class Handing(nn.LayerNorm):
    """Leaves the norm to its base class, as transformers' ConvNeXt and SAM do."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        return super().forward(x.flip(0)).flip(0)


class Further(Handing):
    """Derived from one that hands on."""


class Plain(nn.Module):
    """A norm of an author's own, by function."""

    def __init__(self) -> None:
        super().__init__()
        self.normalized_shape, self.weight = (8,), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        return F.layer_norm(x, self.normalized_shape, self.weight)


class Imported(nn.RMSNorm):
    """By a function that is imported by its own name, as timm does."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


class Renamed(nn.LayerNorm):
    """By a function that is imported under another name."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        return over_layers(x, self.normalized_shape, self.weight, self.bias, self.eps)


class ThroughNN(nn.LayerNorm):
    """By way of torch's ``nn``, as transformers' BiT does."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class ThroughTorch(nn.LayerNorm):
    """By the full name."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        return torch.nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps).clone()


NORMS: dict[str, Callable[[], nn.Module]] = {
    "by way of nn": lambda: ThroughNN(8),
    "by the full name": lambda: ThroughTorch(8),
    "layer norm": lambda: nn.LayerNorm(8),
    "layer norm, large eps": lambda: nn.LayerNorm(8, eps=0.5),
    "layer norm, no eps": lambda: nn.LayerNorm(8, eps=0.0),
    "layer norm without bias": lambda: nn.LayerNorm(8, bias=False),
    "layer norm without affine": lambda: nn.LayerNorm(8, elementwise_affine=False, eps=0.1),
    "layer norm of the base class": lambda: Handing(8),
    "layer norm of the base class of the base class": lambda: Further(8),
    "layer norm in a class of its own": lambda: Plain(),
    "layer norm by a function of another name": lambda: Renamed(8),
    "rms norm": lambda: nn.RMSNorm(8),
    "rms norm by an imported function": lambda: Imported(8),
    "rms norm, large eps": lambda: nn.RMSNorm(8, eps=0.5),
    "rms norm without affine": lambda: nn.RMSNorm(8, elementwise_affine=False),
}


def net(norm: nn.Module) -> nn.Module:
    """Two layers with a norm between them, and a head."""
    model = randomised(nn.Sequential(nn.Linear(5, 8), norm, nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)))
    if getattr(norm, "weight", None) is not None:
        with torch.no_grad():
            norm.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(1))
    return model


def masks_of(model: nn.Module, closed: Iterable[int], bias: bool) -> Masks:
    """Close channels in front of the norm, in the norm, and for its reader; ``bias``: in front, to zero."""
    closed = list(closed)
    masks = dead(model, {"0": closed}, bias=bias)
    for key in ("weight", "bias"):
        if getattr(model[1], key, None) is not None:
            masks.setdefault("1", {})[key] = torch.ones(8).index_fill(0, torch.tensor(closed), 0)
    masks["2"] = {"weight": torch.ones(6, 8).index_fill(1, torch.tensor(closed), 0)}
    return masks


def compacted(model: nn.Module, masks: Masks | None, x: Tensor) -> tuple[nn.Module, engine.Plan]:
    """A small copy, and its plan."""
    speedup = engine.ModelSpeedup(copy.deepcopy(model), x, masks, confidence=2)
    return speedup.speedup_model(), speedup.plan


@pytest.mark.parametrize("bias", [True, False], ids=["zero", "constant"])
@pytest.mark.parametrize("name", NORMS)
def test_dead_channels_go_exactly(name: str, bias: bool) -> None:
    """With any ``eps``, with and without affine, for zeros and for other constants in front of the norm."""
    model = net(NORMS[name]())
    plan = check_exact(model, masks_of(model, [0, 3, 5], bias), tokens(), tokens(1, 1), tokens(3, 7, seed=1))
    assert plan.slices["0.weight"].shape == (5, 5) and plan.slices["2.weight"].shape == (6, 5)
    (norm,) = plan.of(NarrowedNorm)
    assert (norm.module, norm.size, norm.kept) == ("1", 8, 5)
    if bias:
        assert norm.fill is None
    else:
        assert torch.equal(norm.fill, model[0].bias.detach()[[0, 3, 5]])


def test_what_a_plain_norm_of_the_rest_would_give_is_wrong() -> None:
    """Without the full width the result would differ by far."""
    model = net(nn.LayerNorm(8))
    masks = masks_of(model, [0, 3, 5], bias=True)
    small, _ = compacted(model, masks, tokens())
    narrow = copy.deepcopy(small)
    narrow[1].__class__, narrow[1].normalized_shape = nn.LayerNorm, (5,)
    assert relative_error(run(masked(model, masks), tokens()), run(narrow, tokens())) > 1e-2


def test_a_live_channel_stays() -> None:
    """It has a share in the statistics, even where nothing else reads it."""
    model = net(nn.LayerNorm(8))
    masks = masks_of(model, [0, 3], bias=True)
    del masks["0"]
    plan = check_exact(model, masks, tokens())
    assert "0.weight" not in plan.slices and plan.of(NarrowedNorm) == ()


def test_a_shift_behind_a_dead_channel_is_folded() -> None:
    """γ = 0 leaves β, which the next layer's bias takes up."""
    model = net(nn.LayerNorm(8))
    masks = masks_of(model, [0, 3], bias=True)
    del masks["1"]["bias"], masks["2"]
    plan = check_exact(model, masks, tokens(), tokens(3, 7))
    assert [fold.name for fold in plan.folds] == ["2.bias"] and plan.slices["2.weight"].shape == (6, 6)


def test_what_varies_behind_the_norm_stays() -> None:
    """A dead channel that is scaled and shifted by statistics of the others is read by the next layer."""
    model = net(nn.LayerNorm(8))
    masks = dead(model, {"0": [0, 3]}, bias=True)
    small, plan = compacted(model, masks, tokens())
    assert plan.is_empty or relative_error(run(masked(model, masks), tokens(3, 7)), run(small, tokens(3, 7))) < 1e-9
    assert "2.weight" not in plan.slices


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("bias", [True, False], ids=["zero", "constant"])
def test_train_mode_and_gradients(kind: Callable[[int], nn.Module], bias: bool) -> None:
    """Outputs and gradients of what is left are those of the masked model."""
    model = net(kind(8))
    masks = masks_of(model, [0, 3, 5], bias)
    small, plan = compacted(model, masks, tokens())
    reference = masked(model, masks)
    outputs = []
    for either in (reference, small):
        either.train()
        outputs.append(either(tokens(3, 7)))
        (outputs[-1] ** 2).sum().backward()
    assert relative_error([outputs[0].detach()], [outputs[1].detach()]) < 1e-9
    for name, parameter in small.named_parameters():
        old = reference.get_parameter(name).grad
        expected = plan.slices[name].apply(old) if name in plan.slices else old
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-8, atol=1e-10)


def test_the_certificate_says_whether_train_mode_is_exact() -> None:
    """Zeros put back are exact at any time; a constant holds only until its layer's bias would have been trained."""
    model = net(nn.LayerNorm(8))
    for bias in (True, False):
        speedup = engine.ModelSpeedup(copy.deepcopy(model), tokens(), masks_of(model, [0], bias))
        speedup.speedup_model()
        assert speedup.certificate.verified and speedup.certificate.exact_in_train is bias


@pytest.mark.parametrize("bias", [True, False], ids=["zero", "constant"])
def test_a_plan_survives_a_file(bias: bool) -> None:
    """Read with weights_only it does the same to another instance, and the small state loads."""
    model = net(nn.LayerNorm(8))
    small, plan = compacted(model, masks_of(model, [0, 3], bias), tokens())
    again = stored(plan).apply(copy.deepcopy(model))
    assert unchanged(again, snapshot(small)) and repr(again) == repr(small)
    fresh = stored(plan.structure()).apply(net(nn.LayerNorm(8)))
    fresh.load_state_dict(small.state_dict())
    for other in (again, fresh):
        assert relative_error(run(small, tokens(3, 7)), run(other, tokens(3, 7))) == 0


def test_a_subclass_with_its_own_forward() -> None:
    """Permute, norm, permute: channels of images go, at any resolution; the class keeps its name."""
    model = randomised(
        Net(
            lambda m, x: m.head(torch.tanh(m.norm(m.stem(x)))).mean((2, 3)),
            stem=nn.Conv2d(3, 8, 3),
            norm=LayerNorm2d(8),
            head=nn.Conv2d(8, 2, 1),
        )
    )
    kept = torch.ones(8).index_fill(0, torch.tensor([1, 6]), 0)
    masks = dead(model, {"stem": [1, 6]}) | {"norm": {"weight": kept, "bias": kept}}
    plan = check_exact(model, masks, image(), image(9), image(5, batch=1))
    assert plan.slices["stem.weight"].shape[0] == 6 == plan.slices["norm.weight"].shape[0]
    small, _ = compacted(model, masks, image())
    assert type(small.norm).__name__ == "LayerNorm2d" and isinstance(small.norm, LayerNorm2d)


class Twice(nn.Module):
    """One norm in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(5, 8), nn.Linear(5, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        return self.head(torch.tanh(self.norm(self.one(x))) * torch.tanh(self.norm(self.two(x))))


@pytest.mark.parametrize("alike", [True, False])
def test_a_norm_that_is_called_twice(alike: bool) -> None:
    """Channels go where both calls see the same constant; else they stay."""
    model = randomised(Twice())
    kept = torch.ones(8).index_fill(0, torch.tensor([2, 4]), 0)
    masks = dead(model, {"one": [2, 4], "two": [2, 4]}) | {"norm": {"weight": kept, "bias": kept}}
    if alike:
        with torch.no_grad():
            model.two.bias.copy_(model.one.bias)
    plan = check_exact(model, masks, tokens(), tokens(3, 7))
    assert ([n.kept for n in plan.of(NarrowedNorm)] == [6]) is alike and ("one.weight" in plan.slices) is alike


@pytest.mark.parametrize("bias", [True, False], ids=["zero", "constant"])
def test_a_compacted_model_is_compacted_again(bias: bool) -> None:
    """Other layers lose more, the norm keeps its statistics, and the result is exact."""
    model = net(nn.LayerNorm(8))
    small, _ = compacted(model, masks_of(model, [0, 3], bias), tokens())
    kept = torch.ones(6).index_fill(0, torch.tensor([1]), 0)
    masks = dead(small, {"0": [1], "2": [0, 4]}, bias=True) | {"1": {"weight": kept, "bias": kept}}
    smaller, plan = compacted(small, masks, tokens())
    assert relative_error(run(masked(small, masks), tokens(3, 7)), run(smaller, tokens(3, 7))) < 1e-9
    assert plan.slices["4.weight"].shape == (3, 4)


def test_a_widened_norm_follows_dtype_and_copies() -> None:
    """It has one state-dict key per parameter, runs in other dtypes and under autocast, and can be copied."""
    model = net(nn.LayerNorm(8))
    small, _ = compacted(model, masks_of(model, [0, 3], bias=False), tokens())
    assert list(weights_of(small)) == list(model.state_dict()) and tuple(small[1].normalized_shape) == (6,)
    twin = copy.deepcopy(small)
    assert relative_error(run(small, tokens()), run(twin, tokens())) == 0
    assert twin.bfloat16()(tokens().bfloat16()).dtype == torch.bfloat16
    twin.float()
    full, x = net(nn.LayerNorm(8)).float(), tokens().float()
    with torch.autocast("cpu", torch.bfloat16):
        hidden = full[0](x)
        assert twin[1](twin[0](x)).dtype == full[1](hidden).dtype
    error = relative_error(run(small.float(), x), run(twin, x))
    assert error < 2e-2


def test_rollback_restores_the_norm() -> None:
    """Class, shape and numbers."""
    model = net(nn.LayerNorm(8))
    plan = compacted(model, masks_of(model, [0, 3], bias=False), tokens())[1]
    state, before = snapshot(model), run(model, tokens())
    change = plan.prepare(model)
    change.commit()
    assert type(model[1]) is not nn.LayerNorm and type(model[1].normalized_shape) is FullWidth
    change.rollback()
    assert type(model[1]) is nn.LayerNorm and model[1].normalized_shape == (8,) and unchanged(model, state)
    assert relative_error(before, run(model, tokens())) == 0


class Hard(nn.LayerNorm):
    """A norm that writes its width down."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the same shape."""
        return F.layer_norm(x, (8,), self.weight, self.bias, self.eps)


def test_which_classes_can_be_widened() -> None:
    """Norms that pass on ``self.normalized_shape``, and those that leave that to their base class."""
    kinds = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, LayerNorm2d, Plain, Further, Imported, Renamed)
    assert all(map(can_narrow, kinds))
    assert not any(can_narrow(kind) for kind in (Hard, nn.Linear, None, 3))


@pytest.mark.parametrize("make", [lambda: Hard(8), lambda: nn.LayerNorm((4, 8))])
def test_what_cannot_be_widened_keeps_its_channels(make: Callable[[], nn.Module]) -> None:
    """Norms with written widths, or over several dimensions: exact, and whole."""
    model = net(make())
    masks = dead(model, {"0": [0, 3]}, bias=True)
    plan = check_exact(model, masks, tokens(), tokens(3, 4))
    assert "0.weight" not in plan.slices and plan.of(NarrowedNorm) == ()
    reasons = {g.name: g.reason for g in engine.dependency_groups(model, tokens())}
    assert "averages over it" in reasons["0"]


@pytest.mark.parametrize(
    "narrowed",
    [
        NarrowedNorm("1", 8, 8, None),
        NarrowedNorm("1", 8, 0, None),
        NarrowedNorm("1", 8, 6, torch.zeros(3)),
        NarrowedNorm("0", 8, 6, None),
        NarrowedNorm("norm", 8, 6, None),
    ],
)
def test_a_narrowed_that_does_not_fit_is_refused(narrowed: NarrowedNorm) -> None:
    """In one error that names the module, and nothing has been changed."""
    model = net(nn.LayerNorm(8))
    state = snapshot(model)
    with pytest.raises(PlanError, match=f"'{narrowed.module}'"):
        engine.Plan(exchanges=(narrowed,)).apply(model)
    assert unchanged(model, state) and type(model[1]) is nn.LayerNorm


def test_a_narrowed_of_another_width_is_refused() -> None:
    """A plan made for 8 channels does not fit a norm over 16."""
    norm = nn.LayerNorm(16, elementwise_affine=False)
    with pytest.raises(PlanError, match="'0'"):
        engine.Plan(exchanges=(NarrowedNorm("0", 8, 6, None),)).apply(nn.Sequential(norm))
    assert type(norm) is nn.LayerNorm


def test_a_narrowed_as_primitives() -> None:
    """There and back, with constants in float64."""
    for fill in (None, torch.tensor([1.0, 2.0])):
        again = NarrowedNorm.from_state_dict(NarrowedNorm("a.norm", 8, 6, fill).state_dict())
        assert (again.module, again.size, again.kept) == ("a.norm", 8, 6)
        assert again.fill is None if fill is None else torch.equal(again.fill, fill.double())


def test_narrowed_by_hand() -> None:
    """Redo gives the norm of the padded input, cut off again; undo gives the plain norm."""
    norm = nn.LayerNorm(6, elementwise_affine=False).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    full = F.layer_norm(torch.cat([x, torch.tensor([[2.0, -1.0]]).expand(3, 2)], 1), (6,))
    change = Change(norm)
    NarrowedNorm("", 6, 4, torch.tensor([2.0, -1.0])).prepare(change)
    change.commit()
    torch.testing.assert_close(norm(x), full[:, :4], rtol=1e-12, atol=1e-12)
    change.rollback()
    wide = torch.randn(3, 6, dtype=torch.float64)
    torch.testing.assert_close(norm(wide), F.layer_norm(wide, (6,)), rtol=1e-12, atol=1e-12)


NORMED: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "layer norm": (lambda: nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3)), torch.ones(2, 4, 5)),
    "RMS norm": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.RMSNorm(8, eps=1e-6), nn.Linear(8, 3)),
        torch.ones(2, 4, 5),
    ),
    "group norm": (
        lambda: nn.Sequential(nn.Conv2d(5, 8, 1), nn.GroupNorm(2, 8), nn.Conv2d(8, 3, 1)),
        torch.ones(2, 5, 4, 4),
    ),
}


class Merging(nn.Module):
    """Four tokens become one by a ``view`` of what a norm put out, as in the vision towers of Qwen3-VL."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(5, 8), norm, nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each four tokens."""
        return self.head(self.norm(self.stem(x)).view(-1, self.head.in_features))


@pytest.mark.parametrize("bias", [True, False], ids=["zero", "constant"])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_tokens_behind_a_norm_are_viewed(kind: Callable[[int], nn.Module], bias: bool) -> None:
    """What is left of a norm lies in memory as what a plain norm puts out."""
    model = randomised(Merging(kind(8)))
    kept = torch.ones(8).index_fill(0, torch.tensor([1, 6]), 0)
    masks = dead(model, {"stem": [1, 6]}, bias=bias) | {"norm": {k: kept for k, _ in model.norm.named_parameters()}}
    x = torch.randn(8, 5, dtype=torch.float64)
    plan = check_exact(model, masks, x, x[:4])
    assert plan.slices["stem.weight"].shape == (6, 5) and plan.slices["head.weight"].shape == (3, 24)


FORMATS = {
    "tokens": torch.rand(2, 3, 8).transpose(1, 2),
    "images": torch.rand(2, 8, 3, 8),
    "channels last": torch.rand(2, 8, 3, 8).to(memory_format=torch.channels_last),
    "volumes, channels last": torch.rand(2, 8, 3, 2, 8).to(memory_format=torch.channels_last_3d),
}


@pytest.mark.parametrize("fill", [None, torch.ones(2)], ids=["zero", "constant"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "make",
    [lambda n: nn.LayerNorm(n), lambda n: nn.RMSNorm(n), lambda n: nn.GroupNorm(1, n), lambda n: nn.GroupNorm(2, n)],
)
def test_memory_format_of_a_norm(make: Callable[[int], nn.Module], name: str, fill: Tensor | None) -> None:
    """The strides are those of the plain norm, in each memory format."""
    x, narrow = FORMATS[name], make(10)
    if isinstance(narrow, nn.LayerNorm | nn.RMSNorm) and x.shape[-1] != 8:
        x = x.transpose(1, 2).contiguous()
    change = Change(narrow)
    NarrowedNorm("", 10, 8, fill).prepare(change)
    change.commit()
    for key, parameter in narrow.named_parameters():
        setattr(narrow, key, nn.Parameter(parameter[:8]))
    assert narrow(x).stride() == make(8)(x).stride()


@pytest.mark.parametrize("constants", [False, True])
@pytest.mark.parametrize("name", NORMED)
def test_a_norm_loses_channels_again(name: str, constants: bool) -> None:
    """A second compaction goes on where the first one stopped; the two plans in one do the same to a fresh model."""
    make, shape = NORMED[name]
    torch.manual_seed(0)
    model = randomised(make())
    fresh, plans = copy.deepcopy(model), []
    x = torch.randn(shape.shape, dtype=torch.float64)
    for gone in ([1, 5], [0, 3], [1, 2]):
        (group,) = (g for g in engine.dependency_groups(model, x) if g.name == "0")
        assert group.reason is None
        masks = dead(model, {"0": gone}, bias=not constants)
        stays = torch.ones(len(model[0].bias)).index_fill_(0, torch.tensor(gone), 0)
        masks["1"] = {key: stays for key, _ in model[1].named_parameters()}
        expected = run(masked(model, masks), x)
        speedup = engine.ModelSpeedup(model, x, masks)
        speedup.speedup_model()
        assert relative_error(expected, run(model, x)) < 1e-9
        plans.append(speedup.plan)
    assert len(model[0].bias) == 2
    plan = plans[0].then(plans[1]).then(plans[2])
    plan.apply(fresh).load_state_dict(model.state_dict())
    assert relative_error(run(fresh, x), run(model, x)) < 1e-9


@pytest.mark.parametrize("name", ["layer norm", "group norm"])
def test_plain_norms(name: str) -> None:
    """On demand a norm becomes that of what is left: another function, and the certificate says how far it is off."""
    make, shape = NORMED[name]
    torch.manual_seed(0)
    model = randomised(make())
    x = torch.randn(shape.shape, dtype=torch.float64)
    masks = engine.fix_mask_conflict(dead(model, {"0": [1, 5]}, bias=True), model, x)
    expected, kind = run(masked(model, masks), x), type(model[1])
    fresh = copy.deepcopy(model)
    speedup = engine.ModelSpeedup(model, x, masks, plain_norms=True)
    speedup.speedup_model()
    certificate = speedup.certificate
    assert type(model[1]) is kind and len(model[1].weight) == 6
    assert not certificate.exact and not certificate.verified and not certificate.exact_in_train
    assert relative_error(expected, run(model, x)) > 1e-3 and certificate.max_error > 1e-3
    assert "not exact: norms" in str(certificate)
    assert engine.Certificate.from_state_dict(certificate.state_dict()) == certificate
    stored(speedup.plan).apply(fresh)
    assert type(fresh[1]) is kind and relative_error(run(model, x), run(fresh, x)) == 0
    more = engine.fix_mask_conflict(dead(model, {"0": [0, 3]}, bias=True), model, x)
    again = engine.ModelSpeedup(model, x, more)
    again.speedup_model()
    assert again.certificate.exact and again.certificate.verified


def test_without_norms_over_channels_plain_is_exact() -> None:
    """There is nothing to keep plain."""
    model = randomised(nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3)))
    speedup = engine.ModelSpeedup(model, tokens(), dead(model, {"0": [1]}, bias=True), plain_norms=True)
    speedup.speedup_model()
    assert speedup.certificate.exact and speedup.certificate.verified

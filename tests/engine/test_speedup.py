"""Masks in, a small and verified network out."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import engine
from engine.compaction.folds import Fold
from engine.errors import EngineError, InputError, PlanError, StaleGraphError, TraceError, VerificationError
from engine.program.contraction import Contraction
from engine.removal.keep import alive
from engine.surgery.kinds.norms import NarrowedNorm
from tests.engine.exactness import KINDS, masked, randomised, relative_error, run
from tests.engine.nets import Mean, Net, dead, image, plain, residual_net, snapshot, unchanged


def test_a_model_in_train_mode_stays_in_train_mode() -> None:
    """Each module keeps its own mode."""
    model = plain().train()
    model[1].eval()
    modes = [m.training for m in model.modules()]
    masks = dead(model, {"0": [0, 1]}, bias=True)
    reference = run(copy.deepcopy(masked(model, masks)), image())
    speedup = engine.ModelSpeedup(model, image(), masks)
    assert speedup.speedup_model() is model
    assert [m.training for m in model.modules()] == modes and speedup.certificate.verified
    assert relative_error(reference, run(model, image())) < 1e-9


def test_statistics_and_random_state_are_untouched() -> None:
    """Verification runs the model, in eval mode, and draws its own numbers."""
    model = plain().train()
    masks = engine.fix_mask_conflict(dead(model, {"0": [0, 1]}), model, image())
    mean, batches = model[4].running_mean.clone(), model[4].num_batches_tracked.clone()
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    engine.ModelSpeedup(model, image(), masks).speedup_model()
    assert torch.equal(model[4].running_mean, mean) and model[4].num_batches_tracked == batches
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (numpy.random.get_state()[1] == states[2]).all()


def test_nothing_masked_changes_nothing() -> None:
    """An empty plan, bit for bit the same model, no claim of a verification."""
    model = plain()
    state = snapshot(model)
    for masks in ({}, {"0": {"weight": torch.ones(6, 3, 3, 3)}}):
        speedup = engine.ModelSpeedup(model, image(), masks)
        speedup.speedup_model()
        assert speedup.plan.is_empty and unchanged(model, state) and speedup.certificate.exact_in_train


@pytest.mark.parametrize("plain_norms", [False, True])
def test_the_plan_can_be_read_before_it_is_carried_out(plain_norms: bool) -> None:
    """It is that of the weights as they are; nothing is changed by looking at it."""
    model = randomised(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)))
    groups = engine.dependency_groups(model, torch.rand(2, 4).double())
    masks = engine.group_masks(groups[:1], {groups[0].name: torch.arange(8) < 5})
    state = snapshot(model)
    speedup = engine.ModelSpeedup(model, torch.rand(2, 4).double(), masks, plain_norms=plain_norms)
    before = str(speedup.plan)
    assert "0.weight" in before and unchanged(model, state)
    speedup.speedup_model()
    assert str(speedup.plan) == before and [norm.plain for norm in speedup.plan.of(NarrowedNorm)] == [plain_norms]


def test_compacting_twice() -> None:
    """A second compaction of the small model, with masks of its own, is exact again; the same object refuses."""
    model = residual_net()
    masks = engine.fix_mask_conflict(dead(model, {"stem": [0, 1], "branch": [0, 1]}), model, image())
    speedup = engine.ModelSpeedup(model, image(), masks)
    speedup.speedup_model()
    with pytest.raises(StaleGraphError):
        speedup.speedup_model()
    more = dead(model, {"stem": [0], "branch": [0]}, bias=True)
    reference = run(masked(model, more), image(9))
    engine.ModelSpeedup(model, image(), more).speedup_model()
    assert model.stem.out_channels <= 4 and relative_error(reference, run(model, image(9))) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_without_masks_zeros_are_removed(kind: str) -> None:
    """What is zero in the weights goes, whoever made it zero."""
    model = masked(plain(), KINDS[kind](plain(), 1))
    reference = run(model, image(9))
    engine.ModelSpeedup(model, image()).speedup_model()
    assert relative_error(reference, run(model, image(9))) < 1e-9


def test_confidence_zero_runs_nothing() -> None:
    """The shapes are those that the rules predict; the certificate says that no numbers were compared."""
    model = plain()
    masks = dead(model, {"0": [0, 1]}, bias=True)
    reference = run(masked(model, masks), image())
    speedup = engine.ModelSpeedup(model, image(), masks, confidence=0)
    calls: list[int] = []
    model.register_forward_hook(lambda *a: calls.append(1))
    speedup.speedup_model()
    assert calls == [] and not speedup.certificate.verified and "not verified" in str(speedup.certificate)
    assert relative_error(reference, run(model, image())) < 1e-9


@pytest.mark.parametrize("confidence", [-1, 0.5, "8", None])
def test_bad_confidence_is_refused(confidence: Any) -> None:
    """With the value."""
    with pytest.raises(InputError, match=f"`confidence`.*{confidence!r}"):
        engine.ModelSpeedup(plain(), image(), {}, confidence=confidence)


def test_a_rejected_input_leaves_the_model_alone() -> None:
    """The error names model and shape, at construction."""
    model = plain()
    state = snapshot(model)
    with pytest.raises(TraceError, match=r"Sequential rejected the example input \(\(2, 4, 6, 6\)"):
        engine.ModelSpeedup(model, torch.zeros(2, 4, 6, 6, dtype=torch.float64), {})
    assert unchanged(model, state)


def test_the_batch_dimension_may_be_another() -> None:
    """Sequence first: samples are drawn along dimension 1."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    masks = dead(model, {"0": [0, 1, 2]})
    x = torch.randn(5, 2, 4, dtype=torch.float64)
    reference = run(masked(model, masks), x)
    speedup = engine.ModelSpeedup(model, x, masks, batch_dim=1, confidence=3)
    speedup.speedup_model()
    assert speedup.certificate.shapes[0] == (5, 3, 4) and model[0].out_features == 5
    assert relative_error(reference, run(model, x)) < 1e-9


def test_a_graph_saves_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given one, the model is not traced again before it is changed."""
    model = plain()
    graph = engine.trace(model, image())
    monkeypatch.setattr("engine.speedup.trace", None)
    engine.ModelSpeedup(model, None, dead(model, {"0": [0]}, bias=True), graph=graph).speedup_model()
    assert model[0].out_channels < 6


def test_a_root_that_is_a_layer() -> None:
    """The model's own output stays whole, so nothing happens."""
    layer = nn.Conv2d(3, 4, 1).double()
    engine.ModelSpeedup(layer, image(), {"": dead(nn.Sequential(layer), {"0": [0]})["0"]}).speedup_model()
    assert layer.out_channels == 4


DEFECTS = {
    "canonical swaps outputs and inputs": "engine.program.contraction.Contraction.canonical",
    "layout swaps outputs and inputs": "engine.program.contraction.Contraction.layout",
    "constants are not folded": "engine.compaction.build.folds_of",
    "constants are folded the wrong way": "engine.compaction.folds.Fold.apply",
    "a live channel is called dead": "engine.removal.keep.alive",
    "use is lost": "engine.analysis.use.Use.add",
    "carriers are not asked for": "engine.removal.keep.Consumer.needs",
    "batch norm hands on its input": "rule:batch_norm",
    "sigmoid of a dead channel is zero": "rule:sigmoid",
}


def square() -> nn.Module:
    """Equal widths, so that swapped axes fit, with a border, a norm, a gate and biases."""
    return randomised(
        nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Sigmoid(),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(4, 4, 1),
            nn.Tanh(),
            Mean(),
            nn.Linear(4, 2),
        )
    )


def _break(monkeypatch: pytest.MonkeyPatch, name: str) -> engine.Registry:
    """Put a defect into the engine, and return the rules to use."""
    where = DEFECTS[name]
    canonical, layout, apply = Contraction.canonical, Contraction.layout, Fold.apply
    replacements: dict[str, Any] = {
        "engine.program.contraction.Contraction.canonical": lambda self, w: (
            canonical(self, w.transpose(0, 1)) if w.ndim > 1 and w.shape[0] == w.shape[1] else canonical(self, w)
        ),
        "engine.program.contraction.Contraction.layout": lambda self, a: (
            layout(self, a).transpose(0, 1) if self.weight.shape[0] == self.weight.shape[1] else layout(self, a)
        ),
        "engine.compaction.build.folds_of": lambda *a: iter(()),
        "engine.compaction.folds.Fold.apply": lambda self, t: apply(dataclasses.replace(self, delta=-self.delta), t),
        "engine.removal.keep.alive": lambda s, f, u: _without_first_live(s, alive(s, f, u)),
        "engine.analysis.use.Use.add": lambda self, value, used: None,
        "engine.removal.keep.Consumer.needs": lambda self, keep: iter(()),
    }
    if not where.startswith("rule:"):
        monkeypatch.setattr(where, replacements[where])
        return engine.RULES
    op = where.removeprefix("rule:")

    def wrong(node: engine.Node, constants: Any) -> Any:
        known = constants[node.inputs[0]]
        return [known if op == "batch_norm" else torch.where(known.isnan(), known, 0.0)]

    mine = engine.RULES[op]
    rest = dataclasses.replace(mine, ops=tuple(o for o in mine.ops if o != op))
    others = [rest if rule is mine else rule for rule in engine.RULES.distinct()]
    return engine.Registry([*others, dataclasses.replace(mine, ops=(op,), constants=wrong)])


def _without_first_live(structure: Any, keep: torch.Tensor) -> torch.Tensor:
    live = (keep & structure.free()).nonzero()[:, 0]
    keep = keep.clone()
    keep[live[:1]] = False
    return keep


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_of_the_engine_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate refuses what a broken analysis gives, and the model is bit for bit as it was."""
    model = square()
    masks = dead(model, {"0": [0, 1], "3": [1], "5": [2, 3]})
    state, text = snapshot(model), repr(model)
    rules = _break(monkeypatch, name)
    with pytest.raises(engine.errors.EngineError):
        engine.ModelSpeedup(model, image(), masks, rules=rules).speedup_model()
    assert unchanged(model, state) and repr(model) == text


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_shows_in_the_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a certificate the broken result is wrong, so that comparing with the masked model finds it too."""
    model = square()
    masks = dead(model, {"0": [0, 1], "3": [1], "5": [2, 3]})
    reference = run(masked(model, masks), image())
    rules = _break(monkeypatch, name)
    try:
        engine.ModelSpeedup(model, image(), masks, confidence=0, rules=rules).speedup_model()
        error = relative_error(reference, run(model, image()))
    except (engine.errors.EngineError, RuntimeError) as found:  # it does not even fit
        assert str(found)
    else:
        assert error > 1e-6


def test_without_a_defect_the_same_masks_pass() -> None:
    """So that the test above tests the defects."""
    model = square()
    masks = dead(model, {"0": [0, 1], "3": [1], "5": [2, 3]})
    reference = run(masked(model, masks), image(9))
    speedup = engine.ModelSpeedup(model, image(), masks)
    speedup.speedup_model()
    assert speedup.plan.folds and relative_error(reference, run(model, image(9))) < 1e-9


def test_a_repair_that_does_nothing_is_noticed() -> None:
    """If repair gave its input back, constants and disagreements would be left."""

    def left(fix: Any) -> tuple[int, bool]:
        model = residual_net()
        masks = fix(dead(model, {"stem": [0, 1], "branch": [0, 1]}), model, image())
        speedup = engine.ModelSpeedup(model, image(), masks)
        speedup.speedup_model()
        return model.stem.out_channels, speedup.certificate.exact_in_train

    assert left(engine.fix_mask_conflict) == (4, True)
    assert left(lambda masks, *a: masks) != (4, True)


# ---------------------------------------------------------------- functions that replace modules


class Shifted(nn.Module):
    """An activation of one's own with a parameter per channel: a dead channel does not leave it at zero."""

    def __init__(self, slope: torch.Tensor) -> None:
        super().__init__()
        self.slope = nn.Parameter(slope.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Point by point."""
        return torch.sigmoid(x) * self.slope[:, None, None]


class Dense(nn.Module):
    """A layer of one's own that mixes channels, in the code of einsum."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``y_o = tanh(sum_i w_oi x_i)``."""
        return torch.tanh(torch.einsum("oi,bihw->bohw", self.weight, x))


def channels(mask: torch.Tensor) -> torch.Tensor:
    """Which channels stay, of a mask in the shape of an image."""
    assert bool(((mask == 0) | (mask == 1)).all()) and mask.dtype == torch.float32
    return mask[0, :, 0, 0].bool()


def smaller_shifted(module: nn.Module, masks: Any) -> nn.Module:
    """Keep what stays of the slope."""
    in_mask, out_mask, weight_mask = masks
    assert torch.equal(in_mask, out_mask) and weight_mask["slope"].shape == module.slope.shape
    return Shifted(module.slope.data[channels(out_mask)])


def smaller_dense(module: nn.Module, masks: Any) -> nn.Module:
    """Keep rows and columns."""
    in_mask, out_mask, _ = masks
    return Dense(module.weight.data[channels(out_mask)][:, channels(in_mask)])


SHIFTED = {"Shifted": smaller_shifted}
DENSE = {"Dense": smaller_dense}


def with_own(kind: str) -> nn.Module:
    """A network around one of the modules."""
    forwards: dict[str, Any] = {
        "shifted": lambda m, x: m.b(m.own(m.a(x))),
        "dense": lambda m, x: m.b(m.own(torch.relu(m.norm(m.a(x))))),
        "twice": lambda m, x: m.b(m.own(m.c(m.own(m.a(x))))),
        "residual": lambda m, x: m.b(m.a(x) + m.own(m.c(m.a(x)))),
        "dense residual": lambda m, x: m.b(m.a(x) + m.own(m.c(m.a(x)))),
    }
    parts = {"a": nn.Conv2d(3, 6, 1), "b": nn.Conv2d(6, 5, 3, padding=1), "c": nn.Conv2d(6, 6, 1)}
    own = Dense(torch.randn(6, 6)) if "dense" in kind else Shifted(torch.rand(6) + 0.5)
    return randomised(
        Net(
            lambda m, x: m.head(torch.relu(forwards[kind](m, x)).mean((2, 3))),
            own=own,
            norm=nn.BatchNorm2d(6),
            head=nn.Linear(5, 2),
            **parts,
        )
    )


def own_masks(model: nn.Module, kind: str) -> Any:
    """Masks under which the module gets smaller."""
    masks = dead(model, {"a": [0, 1, 2], "c": [0, 1, 2]}, bias=True)
    if "dense" in kind:
        rows = torch.ones(6, 6)
        rows[[0, 1, 4]] = 0
        gamma = torch.tensor([0.0, 0, 0, 1, 1, 1])
        masks |= {"own": {"weight": rows}, "norm": {"weight": gamma, "bias": gamma}}
    return masks


@pytest.mark.parametrize("kind", ["shifted", "dense", "twice", "residual", "dense residual"])
def test_functions_make_modules_smaller(kind: str) -> None:
    """The network is the masked one, the module that the function returned stands in its place, and it is verified."""
    model = with_own(kind)
    masks = own_masks(model, kind)
    reference, old = run(masked(model, masks), image(9)), model.own
    model.own.train()
    functions = DENSE if "dense" in kind else SHIFTED
    speedup = engine.ModelSpeedup(model, image(), masks, customized_replace_func=functions)
    speedup.speedup_model()
    assert model.own is not old and model.own.training and model.a.out_channels < 6
    assert speedup.certificate.verified and relative_error(reference, run(model, image(9))) < 1e-9
    shape = tuple(next(model.own.parameters()).shape)
    widths = {"shifted": (4,), "dense": (3, 3), "twice": (4,), "residual": (4,), "dense residual": (4, 3)}
    assert shape == widths[kind]
    assert "own" in str(speedup.plan) and any("is replaced" in note for note in speedup.certificate.notes)


def test_a_module_that_changes_its_input_and_one_at_two_names() -> None:
    """What reads the input afterwards sees the change; the new module stands at both names."""

    class InPlace(Shifted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sigmoid_().mul_(self.slope[:, None, None])

    def smaller(module: nn.Module, masks: Any) -> nn.Module:
        return InPlace(module.slope.data[channels(masks[0])])

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        y = m.a(x)
        return m.head((m.own(y) + y).mean((2, 3)))

    own = InPlace(torch.rand(6))
    model = randomised(Net(forward, a=nn.Conv2d(3, 6, 1), own=own, again=own, head=nn.Linear(6, 2)))
    masks = dead(model, {"a": [0, 1]}, bias=True)
    reference = run(masked(model, masks), image(9))
    engine.ModelSpeedup(model, image(), masks, customized_replace_func={"InPlace": smaller}).speedup_model()
    assert model.own is model.again and len(model.own.slope) == 4 == model.a.out_channels
    assert relative_error(reference, run(model, image(9))) < 1e-9


def test_a_float32_model_with_a_function() -> None:
    """Verified in float64 like any other."""
    model = with_own("dense").float()
    masks = own_masks(model, "dense")
    speedup = engine.ModelSpeedup(model, image(dtype=torch.float32), masks, customized_replace_func=DENSE)
    speedup.speedup_model()
    assert speedup.certificate.dtype == "float64" and next(model.own.parameters()).dtype == torch.float32


def wrong_numbers(module: nn.Module, masks: Any) -> nn.Module:
    """The right shape only."""
    return Shifted(module.slope.data[~channels(masks[0])][: int(channels(masks[0]).sum())].repeat(2)[:4])


def wrong_shape(module: nn.Module, masks: Any) -> nn.Module:
    """Forgets to cut."""
    return Shifted(module.slope.data)


def fails(module: nn.Module, masks: Any) -> nn.Module:
    """Spoils what it was given first."""
    module.slope.data.zero_()
    raise ZeroDivisionError("no luck")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (wrong_numbers, "differs from the masked one"),
        (wrong_shape, "does not run.*'own'"),
        (fails, "failed at 'own'.*ZeroDivisionError: no luck"),
        (lambda module, masks: None, "returned a NoneType for 'own'"),
    ],
)
def test_a_function_that_does_wrong_is_noticed(function: Any, message: str) -> None:
    """The model is bit for bit as it was, with the old module in place."""
    model = with_own("shifted")
    state, old = snapshot(model), model.own
    masks = own_masks(model, "shifted")
    with pytest.raises(EngineError, match=message):
        engine.ModelSpeedup(model, image(), masks, customized_replace_func={"Shifted": function}).speedup_model()
    assert unchanged(model, state) and model.own is old


def test_an_optimizer_cannot_follow_a_function() -> None:
    """It would go on with the parameters of the old module; where nothing is replaced it is not a hindrance."""
    model = with_own("shifted")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state, masks = snapshot(model), own_masks(model, "shifted")
    with pytest.raises(PlanError, match="'own'.*without the optimizer"):
        engine.ModelSpeedup(model, image(), masks, customized_replace_func=SHIFTED).speedup_model(optimizer)
    assert unchanged(model, state)
    engine.ModelSpeedup(model, image(), {}, customized_replace_func=SHIFTED).speedup_model(optimizer)
    assert unchanged(model, state)


def test_unknown_classes_and_no_functions_are_refused() -> None:
    """With the name."""
    with pytest.raises(InputError, match="'Nothing'"):
        engine.ModelSpeedup(plain(), image(), {}, customized_replace_func={"Nothing": smaller_dense})
    with pytest.raises(InputError, match="`customized_replace_func` maps"):
        engine.ModelSpeedup(plain(), image(), {}, customized_replace_func={"Conv2d": 3})


def test_a_module_of_torch_may_be_replaced_too() -> None:
    """A convolution under a function of the user gets its masks, and the numbers are the same."""

    def smaller(module: nn.Module, masks: Any) -> nn.Module:
        rows, columns = channels(masks[1]), channels(masks[0])
        made = nn.Conv2d(int(columns.sum()), int(rows.sum()), module.kernel_size, padding=module.padding)
        made.weight.data = module.weight.data[rows][:, columns]
        made.bias.data = module.bias.data[rows]
        return made

    model = plain()
    masks = dead(model, {"0": [0, 1], "3": [0, 1]}, bias=True)
    for norm, width in (("1", 6), ("4", 5)):
        kept = torch.ones(width)
        kept[:2] = 0
        masks[norm] = {"weight": kept, "bias": kept}
    reference = run(masked(model, masks), image(9))
    engine.ModelSpeedup(model, image(), masks, customized_replace_func={"_ConvNd": smaller}).speedup_model()
    assert model[0].out_channels == 4 == model[3].in_channels and model[3].out_channels == 3
    assert relative_error(reference, run(model, image(9))) < 1e-9


def test_a_graph_without_the_functions_modules_is_recorded_again() -> None:
    """It shows ops that are not to be looked at."""
    model = with_own("shifted")
    graph = engine.trace(model, image())
    masks = own_masks(model, "shifted")
    speedup = engine.ModelSpeedup(model, None, masks, customized_replace_func=SHIFTED, graph=graph)
    speedup.speedup_model()
    assert len(model.own.slope) == 4


def test_a_plan_needs_the_functions_again() -> None:
    """It holds none. A fresh model takes it with them, or with the small module in place already."""
    model = with_own("shifted")
    fresh, ready, masks = copy.deepcopy(model), copy.deepcopy(model), own_masks(model, "shifted")
    speedup = engine.ModelSpeedup(model, image(), masks, customized_replace_func=SHIFTED)
    speedup.speedup_model()
    plan = engine.Plan.from_state_dict(speedup.plan.state_dict()).structure()
    state = snapshot(fresh)
    with pytest.raises(PlanError, match="'own'.*Pass the same `customized_replace_func`"):
        plan.apply(fresh)
    assert unchanged(fresh, state)
    ready.own = copy.deepcopy(model.own)
    for other in (plan.apply(fresh, customized_replace_func=SHIFTED), plan.apply(ready)):
        other.load_state_dict(model.state_dict())
        assert relative_error(run(model, image()), run(other, image())) == 0


class Norm(nn.Module):
    """A batch norm of one's own, which counts its batches."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.rand(channels) + 0.5), nn.Parameter(torch.randn(channels))
        self.register_buffer("mean", torch.randn(channels))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shift and scale."""
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 2, 3)), 0.1)
        self.batches += 1
        shift, gamma, beta = (t[:, None, None] for t in (self.mean, self.gamma, self.beta))
        return (x - shift) * gamma + beta


def smaller_norm(module: nn.Module, masks: Any) -> nn.Module:
    """Keep what stays of each vector."""
    stays = channels(masks[1])
    made = Norm(int(stays.sum()))
    made.load_state_dict({k: v[stays] if v.ndim else v for k, v in module.state_dict().items()})
    return made.to(module.mean.dtype)


def test_constants_go_through_a_norm_of_ones_own() -> None:
    """What it leaves of a dead channel is carried over the border, or folded; its buffers are not touched."""
    model = randomised(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            Norm(8),
            nn.Conv2d(8, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            Norm(6),
            nn.Conv2d(6, 4, 1),
            Mean(),
            nn.Linear(4, 2),
        )
    )
    masks = dead(model, {"0": [0, 1, 2, 3], "2": [0, 1]}, bias=True)
    reference = run(masked(model, masks), image(9))
    mean, batches = model[1].mean.clone(), int(model[1].batches)
    speedup = engine.ModelSpeedup(model, image(), masks, customized_replace_func={"Norm": smaller_norm})
    speedup.speedup_model()
    assert [len(model[k].gamma) for k in (1, 5)] == [5, 4] and {f.name for f in speedup.plan.folds} == {
        "2.weight",
        "6.bias",
    }
    assert torch.equal(model[1].mean[1:], mean[4:]) and int(model[1].batches) == batches
    assert not speedup.certificate.exact_in_train and relative_error(reference, run(model, image(9))) < 1e-9


class Tokens(nn.Module):
    """A linear layer of one's own over tokens."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix the last dimension."""
        return torch.einsum("btc,oc->bto", x, self.weight)


def test_channels_may_be_the_last_dimension() -> None:
    """Of tokens: the layer's inputs and outputs go there, and positions stay; a function may return what it got."""

    def smaller(module: nn.Module, masks: Any) -> nn.Module:
        columns, rows = (mask[0, 0].bool() for mask in masks[:2])
        return Tokens(module.weight.data[rows][:, columns])

    model = nn.Sequential(nn.Linear(5, 8), nn.SiLU(), Tokens(torch.randn(7, 8)), nn.Linear(7, 3)).double()
    weight = torch.ones(7, 8)
    weight[[1, 2]] = 0
    masks = dead(model, {"0": [0, 1, 2]}, bias=True) | {"2": {"weight": weight}}
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    reference = run(masked(model, masks), x)
    functions = {"Tokens": smaller, "SiLU": lambda module, masks: module}
    engine.ModelSpeedup(model, x, masks, customized_replace_func=functions).speedup_model()
    assert model[2].weight.shape == (5, 5) and relative_error(reference, run(model, x)) < 1e-9


def test_a_model_that_trains_on_must_be_exact_in_train_mode() -> None:
    """A norm that is not masked leaves a shift that is still being trained: refused, unless it is repaired."""
    model = plain()
    masks = dead(model, {"0": [0, 1]}, bias=True)
    before = snapshot(model)
    with pytest.raises(VerificationError, match="leave constants behind"):
        engine.ModelSpeedup(model, image(), masks).speedup_model(training=True)
    assert unchanged(model, before)
    repaired = engine.fix_mask_conflict(masks, model, image())
    engine.ModelSpeedup(model, image(), repaired).speedup_model(training=True)
    assert model[0].weight.shape[0] == 4


def test_it_is_analysed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether training may go on is asked of the same analysis."""
    model = plain()
    calls: list[nn.Module] = []
    analyse = engine.speedup.analyse

    def counted(model: nn.Module, *rest: Any) -> Any:
        calls.append(model)
        return analyse(model, *rest)

    monkeypatch.setattr("engine.speedup.analyse", counted)
    speedup = engine.ModelSpeedup(model, image(), dead(model, {"0": [0, 1]}, bias=True))
    speedup.speedup_model()
    assert calls == [model] and speedup.certificate.verified


@pytest.mark.parametrize("optimizer", ["adam", torch.optim.SGD, [3]])
def test_what_is_no_optimizer_is_named(optimizer: Any) -> None:
    """A name, a class, or a number in a list; the model is as before."""
    model = plain()
    before = snapshot(model)
    with pytest.raises(InputError, match="`optimizer` must be an optimizer"):
        engine.ModelSpeedup(model, image(), dead(model, {"0": [1]})).speedup_model(optimizer)
    assert unchanged(model, before)


def test_a_batch_dimension_that_is_not_there() -> None:
    """It was taken to be any."""
    with pytest.raises(InputError, match="`batch_dim` is 7, but the first input has the shape"):
        engine.ModelSpeedup(plain(), image(), {}, batch_dim=7)

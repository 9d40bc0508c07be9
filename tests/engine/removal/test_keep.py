"""Which slots stay."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.analysis.constants import Constants
from engine.analysis.constraints import closed
from engine.analysis.use import Use
from engine.removal.keep import _cover, alive, consumers, decide
from tests.engine.exactness import KINDS, check_exact, masked, norm_outputs, randomised, relative_error, run
from tests.engine.nets import Mean, Net, analysis_of, constants_of, dead, image, plain, residual_net, structure


def parts(model: nn.Module, masks: dict[str, dict[str, Tensor]]) -> tuple[object, Constants, Use]:
    """Structure, constants and use of a masked model."""
    found, constants = structure(model, image()), constants_of(model, image(), masks)
    return found, constants, Use(found, constants)


def test_consumers_see_their_inputs() -> None:
    """Constants, use, whether a border disturbs, and where constants can go without a carrier."""
    model = plain()
    found, constants, use = parts(model, dead(model, {"0": [0, 1]}))
    conv, linear = consumers(found, constants, use)
    assert (conv.node.module, linear.node.module) == ("3", "7")
    assert conv.bordered and conv.carried and not linear.bordered and linear.sink.name == "7.bias"
    assert (~conv.constants.isnan()).nonzero()[:, 0].tolist() == [0, 1] and conv.used.all()
    keep = torch.ones(len(found.roots), dtype=torch.bool)
    keep[conv.slots[0]] = False
    assert conv.removed(keep).nonzero()[:, 0].tolist() in ([0], [])


def test_what_varies_and_is_used_is_alive() -> None:
    """Dead channels are not, channels that nobody reads are not, outputs of the model are."""
    model = plain()
    mask = torch.ones(5, 6, 3, 3)
    mask[:, 5] = 0
    found, constants, use = parts(model, dead(model, {"0": [0, 1]}) | {"3": {"weight": mask}})
    keep = alive(found, consumers(found, constants, use), use)
    assert keep[found.along(found.graph.stored["0.weight"], 0)].tolist() == [False, False, True, True, True, False]
    assert keep[found.along(found.graph.stored["7.weight"], 0)].all()


def test_a_module_called_on_different_constants_keeps_them() -> None:
    """One weight can be folded once only: where two calls meet different constants nothing is folded."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head((m.conv(x) + m.conv(torch.sigmoid(x))).mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 6, 1), conv=nn.Conv2d(6, 4, 3), head=nn.Linear(4, 2)))
    masks = dead(model, {"stem": [0, 1, 2]})
    plan = check_exact(model, masks, image(), image(9))
    assert "stem.weight" not in plan.slices


@pytest.mark.parametrize("bias", [True, False])
def test_a_module_called_with_and_without_a_border(bias: bool) -> None:
    """What is zero is zero at a border, too, and goes; another constant that only one call sees at a border stays."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head(m.shared(F.pad(x, (1, 1))).tanh().mean((2, 3)) + m.shared(x).tanh().mean((2, 3)))

    model = randomised(
        Net(forward, stem=nn.Conv2d(3, 6, 1), shared=nn.Conv2d(6, 4, 1, bias=False), head=nn.Linear(4, 2))
    )
    plan = check_exact(model, dead(model, {"stem": [0, 3]}, bias=bias), image())
    assert ("stem.weight" in plan.slices and plan.slices["stem.weight"].shape[0] == 4) == bias


def test_a_carrier_is_constant_at_each_call_of_a_weight() -> None:
    """What one call sees as a constant may vary at another, and carries nothing then."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head((m.conv(x).tanh() + m.conv(x + m.extra(x))).mean((2, 3)))

    model = randomised(
        Net(
            forward,
            stem=nn.Conv2d(3, 6, 1),
            extra=nn.Conv2d(6, 6, 1),
            conv=nn.Conv2d(6, 4, 3, padding=1),
            head=nn.Linear(4, 2),
        )
    )
    for varying, left in ((2, 5), (3, 4)):
        masks = dead(model, {"stem": [0, 1, 2]}) | dead(model, {"extra": range(varying)}, bias=True)
        plan = check_exact(copy.deepcopy(model), masks, image(), image(9))
        assert plan.slices["stem.weight"].shape[0] == left


def test_a_weight_with_a_bias_at_one_of_its_calls() -> None:
    """The bias takes up no constants, as the other call would miss them."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x, layer = m.stem(x).mean((2, 3)), m.layer
        return m.head(F.linear(x, layer.weight, layer.bias).tanh() + F.linear(x, layer.weight))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 6, 1), layer=nn.Linear(6, 4), head=nn.Linear(4, 2)))
    plan = check_exact(model, dead(model, {"stem": [0, 1]}), image(), image(9))
    assert plan.slices["stem.weight"].shape[0] == 5 and [fold.name for fold in plan.folds] == ["layer.weight"]


def test_a_removed_live_channel_would_show() -> None:
    """The decision is tight: removing one channel more changes the output."""
    model = randomised(
        nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Tanh(), nn.Conv2d(6, 4, 3), Mean(), nn.Linear(4, 2))
    )
    masks = dead(model, {"0": [0, 1]}, bias=True)
    analysis = analysis_of(model, image(), masks)
    cut = analysis.plan.slices["0.weight"].cuts[0].index.tolist()
    for channel in set(cut) - {0, 1}:
        more = copy.deepcopy(masks)
        more["0"]["weight"][channel] = 0
        assert relative_error(run(masked(model, masks), image()), run(masked(model, more), image())) > 1e-6


def test_a_layer_that_dies_completely() -> None:
    """One channel stays, and at most a carrier: it runs, shrinks and is exact, for every layer in turn and for all."""
    model = plain()
    for layers in (["0"], ["3"], ["0", "3"]):
        rows = {name: range(len(model.get_submodule(name).weight)) for name in layers}
        for bias in (False, True):
            plan = check_exact(model, dead(model, rows, bias), image(), image(9))
            assert all(plan.slices[f"{name}.weight"].shape[0] <= 2 for name in layers)


def test_a_dead_residual_branch() -> None:
    """A branch whose norm is masked goes nearly completely; the trunk stays."""
    model = residual_net()
    masks = dead(model, {"branch": range(6)}, bias=True)
    check_exact(model, masks, image(), image(9))
    check_exact(model, dead(model, {"stem": range(6), "branch": range(6)}), image(), image(9))


def test_closing_ends_and_only_adds() -> None:
    """Constraints hold afterwards, and what was kept stays kept."""
    model = randomised(nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=2), Mean(), nn.Linear(8, 2)))
    found = structure(model, image())
    keep = torch.zeros(len(found.roots), dtype=torch.bool)
    keep[found.along(found.graph.stored["0.weight"], 0)[0]] = True
    before = keep.clone()
    after = closed(found.constraints, keep, lambda: torch.zeros(len(keep)))
    assert (after | ~before).all()
    assert all(len(c.missing(after, torch.zeros(len(after)))) == 0 for c in found.constraints)


def test_the_greedy_cover_serves_everyone() -> None:
    """Each need has one of its own, the most wanted slot first."""
    needs = [torch.tensor(n) for n in ([1, 2], [2, 3], [2, 4], [5], [6, 5])]
    chosen = _cover(needs)
    assert chosen == [2, 5] and all(set(n.tolist()) & set(chosen) for n in needs)
    assert _cover([]) == []


def test_one_carrier_serves_several_consumers() -> None:
    """The same dead channel carries for both convolutions that read it."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head((m.one(x) * m.two(x)).mean((2, 3)))

    model = randomised(
        Net(
            forward,
            stem=nn.Conv2d(3, 6, 1),
            one=nn.Conv2d(6, 4, 3, padding=1),
            two=nn.Conv2d(6, 4, 3, padding=1),
            head=nn.Linear(4, 2),
        )
    )
    plan = check_exact(model, dead(model, {"stem": [0, 1, 2, 3]}), image(), image(9))
    assert plan.slices["stem.weight"].shape[0] == 3 and len(plan.folds) == 2
    kept = analysis_of(model, image(), dead(model, {"stem": [0, 1, 2, 3]})).kept
    assert len(kept.carriers) == 1


def test_decide_keeps_the_analyses() -> None:
    """The decision can be looked into."""
    model = plain()
    found, constants, use = parts(model, dead(model, {"0": [0]}))
    kept = decide(found, constants, use)
    assert kept.constants is constants and kept.use is use


def test_norms_inside_are_the_same_too() -> None:
    """Not only the output: each norm puts out the same on the channels that stay."""
    model = plain()
    for seed, kind in enumerate(KINDS):
        masks = KINDS[kind](model, seed)
        small = copy.deepcopy(model)
        speedup = engine.ModelSpeedup(small, image(), masks, confidence=1)
        speedup.speedup_model()
        old, new = norm_outputs(masked(model, masks), image(9)), norm_outputs(small, image(9))
        for name, bn in (("1", "0.weight"), ("4", "3.weight")):
            rows = speedup.plan.slices[bn].cuts if bn in speedup.plan.slices else ()
            index = next((c.index for c in rows if c.dims == (0,)), torch.arange(old[name].shape[1]))
            shared = old[name][:, index]
            if not any(fold.name.startswith(("0", "3")) or "running" in fold.name for fold in speedup.plan.folds):
                torch.testing.assert_close(new[name], shared)


def test_norms_of_several_sizes_in_one_module() -> None:
    """A forward that calls ``F.layer_norm`` itself, over channels that stay whole: they are not calls of one norm."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = F.layer_norm(m.first(x), [6])
        return m.last(F.layer_norm(m.hidden(m.middle(x).relu()), [8]))

    layers = {"first": nn.Linear(5, 6), "middle": nn.Linear(6, 9), "hidden": nn.Linear(9, 8), "last": nn.Linear(8, 3)}
    model = randomised(Net(forward, **layers))
    masks = dead(model, {"first": [0], "middle": [1, 2], "hidden": [3]}, bias=True)
    plan = check_exact(model, masks, torch.randn(2, 5).double())
    assert plan.slices["middle.weight"].shape == (7, 6) and "hidden.weight" in plan.slices


class _Settled(nn.Module):
    """Branches that cannot run, in the ways of timm's networks."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = nn.Linear(6, 8), nn.Linear(8, 12), nn.Linear(12, 3)
        self.way, self.second = way, None

    def reset(self) -> None:
        """Build the second head anew, if there is one."""
        if self.second is not None:
            self.second = nn.Linear(12, 3)

    def drop(self) -> None:
        """Remove it."""
        self.second = None

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        h = torch.relu(self.enter(x))
        if self.way == "type":
            h = h[-1].flip(1) if isinstance(h, (list, tuple)) else h
        elif self.way == "none":
            v = h * 2.0
            h = v if v is not None else h.flip(1)
        elif self.way == "absent":
            h = h if self.second is None else h.flip(1)
        return self.leave(self.inner(h) if self.way != "literal" else self.inner(h).view(-1, 3, 4).flatten(1))


@pytest.mark.parametrize("way", ["type", "none", "absent", "literal"])
def test_what_code_reads_that_cannot_run_goes(way: str) -> None:
    """A type that no op gives, a value that is never None, a part that stays None; a layer's results stay instead."""
    groups = engine.dependency_groups(_Settled(way).eval(), torch.zeros(2, 6))
    reasons = {group.name: group.reason for group in groups}
    assert reasons["enter"] is None
    assert "is given the size 4" in str(reasons["inner"])  # in one of the ways

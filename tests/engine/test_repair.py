"""Masks that contradict each other."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from engine.errors import InputError
from tests.engine.exactness import channel_masks, check_exact, element_masks, masked, randomised, run
from tests.engine.nets import Mean, Net, dead, image, plain, residual_net, snapshot, unchanged


def closed(masks: dict[str, dict[str, Tensor]], layer: str) -> list[int]:
    """Outputs that a layer's masks close."""
    weight = masks[layer]["weight"]
    return (~weight.flatten(1).bool().any(1)).nonzero()[:, 0].tolist()


def test_a_residual_with_disagreeing_masks() -> None:
    """``union`` keeps what either branch keeps, ``intersection`` what both keep; norms follow; each is exact."""
    model = residual_net()
    masks = dead(model, {"stem": [0, 1, 2], "branch": [1, 2, 3]})
    union = engine.fix_mask_conflict(masks, model, image())
    both = engine.fix_mask_conflict(masks, model, image(), "intersection")
    for fixed, gone in ((union, [1, 2]), (both, [0, 1, 2, 3])):
        assert closed(fixed, "stem") == closed(fixed, "branch") == gone
        for layer in ("stem", "branch", "norm"):
            assert (fixed[layer]["bias"] == 0).nonzero()[:, 0].tolist() == gone
        plan = check_exact(model, fixed, image(), image(9))
        assert plan.slices["stem.weight"].shape[0] == 6 - len(gone) and plan.folds == ()
    check_exact(model, masks, image(), image(9))  # without repair it is exact too, only larger


def test_score_keeps_the_mean_count_of_the_best() -> None:
    """As many units as the masked layers keep on average, those with the largest weights."""
    model = residual_net()
    with torch.no_grad():
        for layer in (model.stem, model.branch):
            layer.weight.copy_(torch.arange(1.0, 7).view(6, 1, 1, 1).expand_as(layer.weight))
    masks = dead(model, {"stem": [3, 4, 5], "branch": [2, 3, 4, 5, 0]})
    fixed = engine.fix_mask_conflict(masks, model, image(), "score")
    assert closed(fixed, "stem") == [0, 1, 2, 3]
    check_exact(model, fixed, image(), image(9))


def test_a_gate_does_not_block() -> None:
    """The SE gate of a dead channel multiplies zero: it has no say, so the channel goes with the gate's own row."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = torch.relu(m.norm(m.conv(x)))
        gate = torch.sigmoid(m.up(torch.relu(m.down(x.mean((2, 3), keepdim=True)))))
        return m.head((x * gate).mean((2, 3)))

    model = randomised(
        Net(
            forward,
            conv=nn.Conv2d(3, 6, 1),
            norm=nn.BatchNorm2d(6),
            down=nn.Conv2d(6, 2, 1),
            up=nn.Conv2d(2, 6, 1),
            head=nn.Linear(6, 2),
        )
    )
    fixed = engine.fix_mask_conflict(dead(model, {"conv": [0, 3]}), model, image())
    assert closed(fixed, "conv") == [0, 3] == closed(fixed, "up")
    plan = check_exact(model, fixed, image(), image(9))
    assert plan.slices["up.weight"].shape == (4, 2, 1, 1) and plan.slices["down.weight"].shape == (2, 4, 1, 1)


def test_masks_reach_every_member_but_no_consumer() -> None:
    """Bias, norm and depthwise convolution behind are masked; columns of what reads the channel are not."""
    model = randomised(
        nn.Sequential(
            nn.Conv2d(3, 6, 1),
            nn.BatchNorm2d(6),
            nn.Conv2d(6, 6, 3, padding=1, groups=6),
            nn.BatchNorm2d(6),
            nn.Conv2d(6, 4, 1),
            Mean(),
            nn.Linear(4, 2),
        )
    )
    masks = dead(model, {"0": [1, 5]})
    fixed = engine.fix_mask_conflict(masks, model, image())
    assert set(fixed) == {"0", "1", "2", "3"} and set(fixed["2"]) == {"weight", "bias"}
    for name in ("0", "1", "2", "3"):
        for mask in fixed[name].values():
            assert (~mask.flatten(1).bool().any(1) if mask.ndim > 1 else mask == 0).nonzero()[:, 0].tolist() == [1, 5]
    small = masked(model, fixed)
    inner = small[:4]
    assert not run(inner, image())[0][:, [1, 5]].any()
    assert check_exact(model, fixed, image(), image(9)).folds == ()


def test_what_stays_gets_back_and_keeps_its_pattern() -> None:
    """A layer that closed a channel which another keeps gets all of it; single entries stay masked."""
    model = residual_net()
    masks = element_masks(model, 3)
    masks = {"stem": masks["stem"], "branch": masks["branch"]}
    masks["stem"]["weight"][2] = 0
    masks["branch"]["weight"][2] = 1
    fixed = engine.fix_mask_conflict(masks, model, image())
    assert fixed["stem"]["weight"][2].all()
    others = [n for n in range(6) if n != 2 and masks["branch"]["weight"][n].any()]
    assert torch.equal(fixed["branch"]["weight"][others], masks["branch"]["weight"][others])
    check_exact(model, fixed, image(), image(9))


def test_grouped_convolutions_are_balanced() -> None:
    """Two masked rows in one group and one in the other: one more is found, or one given back, as the policy says."""
    model = randomised(nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=2), Mean(), nn.Linear(8, 2)))
    fixed = engine.fix_mask_conflict(dead(model, {"1": [0, 1, 4]}), model, image())
    rows = closed(fixed, "1")
    assert len([r for r in rows if r < 4]) == len([r for r in rows if r >= 4]) == 1
    plan = check_exact(model, fixed, image(), image(9))
    assert plan.slices["1.weight"].shape[0] == 6


@pytest.mark.parametrize("policy", ["union", "intersection", "score"])
def test_repair_is_idempotent_and_leaves_its_input_alone(policy: str) -> None:
    """Repaired masks need no repair; the given ones, the model and its mode are untouched."""
    model = plain().train()
    masks = channel_masks(model, 5)
    before, state = copy.deepcopy(masks), snapshot(model)
    fixed = engine.fix_mask_conflict(masks, model, image(), policy)
    again = engine.fix_mask_conflict(fixed, model, image(), policy)
    assert fixed.keys() == again.keys()
    for name, entries in fixed.items():
        assert all(torch.equal(again[name][key], mask) for key, mask in entries.items())
    assert all(torch.equal(before[k][n], t) for k, e in masks.items() for n, t in e.items())
    assert unchanged(model, state) and model.training


def test_the_modules_given_are_returned_in_their_dtype() -> None:
    """Full shape, dtype as given; parameters that had no mask get the default dtype."""
    model = plain()
    masks = {"0": {"weight": dead(model, {"0": [0]})["0"]["weight"].to(torch.int32)}}
    fixed = engine.fix_mask_conflict(masks, model, image())
    assert fixed["0"]["weight"].dtype == torch.int32 and fixed["0"]["weight"].shape == (6, 3, 3, 3)
    assert fixed["1"]["weight"].dtype == torch.float32
    whole = engine.fix_mask_conflict({"7": {"weight": torch.ones(3, 5)}}, model, image())
    assert list(whole) == ["7"]


def test_a_frozen_group_gets_its_masks_back() -> None:
    """What must stay whole is not closed: the output layer's rows, and channels behind an unknown size."""
    model = plain()
    fixed = engine.fix_mask_conflict(dead(model, {"7": [0], "0": [1]}), model, image(), "intersection")
    assert closed(fixed, "0") == [1]
    check_exact(model, fixed, image())


def test_the_report_says_what_was_done() -> None:
    """A line per group with masks."""
    model = residual_net()
    fixed = engine.fix_mask_conflict(dead(model, {"stem": [0, 1, 2], "branch": [1, 2, 3]}), model, image())
    assert fixed.report.policy == "union"
    assert fixed.report.rows == (("stem", 6, {"stem": 3, "branch": 3}, 4),)
    assert "stem: 4 of 6 units stay (masks kept: stem 3, branch 3)" in str(fixed.report)


def test_a_report_that_is_stored_is_worked_out_first() -> None:
    """A report holds the graph until it is read; a pickle or a copy of it holds what it says."""
    model = residual_net()
    fixed = engine.fix_mask_conflict(dead(model, {"stem": [0, 1, 2], "branch": [1, 2, 3]}), model, image())
    for again in (pickle.loads(pickle.dumps(fixed.report)), copy.deepcopy(fixed).report):
        assert str(again) == str(fixed.report) and again.channels == fixed.report.channels != {}
        assert again.macs == fixed.report.macs != {}


def test_empty_masks_stay_empty() -> None:
    """Nothing to repair."""
    fixed = engine.fix_mask_conflict({}, plain(), image())
    assert fixed == {} and fixed.report.rows == ()


@pytest.mark.parametrize("policy", ["max", "", None, "Union"])
def test_an_unknown_policy_is_refused(policy: str) -> None:
    """With the ones that there are."""
    model = plain()
    state = snapshot(model)
    with pytest.raises(InputError, match=f"union, intersection, score; got {policy!r}"):
        engine.fix_mask_conflict({}, model, image(), policy)
    assert unchanged(model, state)


def test_a_wholly_masked_layer_is_no_error() -> None:
    """One channel stays, with its parameters."""
    model = plain()
    fixed = engine.fix_mask_conflict(dead(model, {"0": range(6)}), model, image())
    plan = check_exact(model, fixed, image(), image(9))
    assert plan.slices["0.weight"].shape[0] == 1


@pytest.mark.parametrize("policy", ["union", "intersection", "score"])
def test_columns_of_a_table_go(policy: str) -> None:
    """An embedding has a say in its own columns: what is masked there stays masked, and goes."""
    parts = {"table": nn.Embedding(7, 6), "layer": nn.GRU(6, 4, batch_first=True), "out": nn.Linear(4, 2)}
    model = Net(lambda m, ids: m.out(m.layer(m.table(ids))[0]), **parts).double().eval()
    kept = torch.tensor([1, 0, 1, 1, 0, 1.0])
    with torch.no_grad():
        model.table.weight[:, kept == 0] *= 0.1
    ids = torch.tensor([[0, 3, 6]])
    fixed = engine.fix_mask_conflict({"table": {"weight": kept.expand(7, 6)}}, model, ids, policy=policy)
    assert fixed["table"]["weight"][0].tolist() == kept.tolist()
    assert engine.ModelSpeedup(model, ids, fixed).speedup_model().layer.input_size == 4


class _Slice(nn.Linear):
    """A linear layer of which a method chooses how much of it runs, as in slimmable networks."""

    share = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight[:, : int(self.in_features * self.share)], self.bias)


class _Slimmable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), _Slice(8, 2)

    def set_share(self, share: float) -> None:
        self.head.share = share

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu()[:, : int(8 * self.head.share)])


def test_a_layer_that_is_empty_in_another_recording() -> None:
    """At a share of 0, the layer has no weights; masks are repaired nevertheless, and the channels stay."""
    model = randomised(_Slimmable())
    masks = engine.fix_mask_conflict(channel_masks(model, 0), model, torch.randn(3, 4).double())
    reference = masked(model, masks)
    engine.ModelSpeedup(model, torch.randn(3, 4).double(), masks).speedup_model()
    for share in (1.0, 0.5, 0.0):
        x = torch.randn(5, 4).double()
        for net in (reference, model):
            net.set_share(share)
        assert torch.allclose(reference(x), model(x), rtol=1e-9, atol=0)

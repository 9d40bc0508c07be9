"""Point-wise rules against running the ops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.ops.pointwise import CHOICES, COMBINING, COMPARISONS, OPAQUE, PRODUCTS, QUOTIENTS, UNARY
from engine.ops.samples import Apply
from tests.engine.exactness import check_exact, randomised
from tests.engine.nets import Mean, Net, constants_of, dead, image, structure
from tests.engine.ops.brute import check_constants, check_labels, check_macs, check_use, labels_of, stem_slots, stems

# Ops of the list that need another call than f(x).
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda x: x.clamp(-0.2, 0.2),
    "clamp_max": lambda x: x.clamp_max(0.1),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "negative": torch.negative,
    "rrelu": F.rrelu,
    "rsub": lambda x: torch.rsub(x, 1),
    "threshold": lambda x: F.threshold(x, 0.1, 2.0),
    "log_sigmoid": F.logsigmoid,
    "hardshrink": F.hardshrink,
}
# These are undefined for some numbers, or do not depend on the exact number: the domain is moved, the label test left.
POSITIVE = {"acosh", "log", "log10", "log1p", "log2", "rsqrt", "sqrt", "reciprocal"}
BOUNDED = {"acos", "asin", "atanh", "logit"}


def unary(name: str) -> Callable[[Tensor], Tensor]:
    """Return a call of a unary op on a domain where it is defined."""
    f = CALLS.get(name) or getattr(torch, name, None) or getattr(F, name)
    if name in POSITIVE:
        return lambda x: f(x * x + 1.5)
    if name in BOUNDED:
        return lambda x: f(torch.sigmoid(x) * 0.8 + 0.1)
    return f


@pytest.mark.parametrize("name", UNARY)
def test_a_unary_function_of_a_constant_is_that_constant(name: str) -> None:
    """Dead channels put out f(bias), at any resolution; channels that vary are not predicted."""
    check_constants(unary(name), constant=[0, 1, 2, 3])


@pytest.mark.parametrize("name", ["relu", "sigmoid", "abs", "hardswish", "log", "threshold"])
def test_a_unary_function_keeps_channels(name: str) -> None:
    """Each channel of the output hangs on the same channel of the input only."""
    check_labels(unary(name), classes=8)


@pytest.mark.parametrize(
    "f",
    [
        torch.add,
        torch.sub,
        torch.maximum,
        torch.fmin,
        torch.hypot,
        torch.atan2,
        torch.copysign,
        lambda x, y: torch.lerp(x, y, 0.25),
        lambda x, y: torch.addcmul(x, x, y, value=0.5),
        lambda x, y: torch.addcdiv(x, y, 1 + y * y),
        lambda x, y: x / (1 + y * y),
        lambda x, y: torch.remainder(x, 1 + y * y),
        lambda x, y: torch.fmod(x, 1 + y * y),
        lambda x, y: torch.floor_divide(x, 1 + y * y),
        lambda x, y: (1 + x * x) ** y,
        lambda x, y: torch.xlogy(x, 1 + y * y),
    ],
)
def test_combining_two_constants_gives_one_and_ties_their_channels(f: Callable[..., Tensor]) -> None:
    """Only where both operands are constant the result is; equal places go together."""
    check_constants(f, constant=[1, 2], count=2, closed=[[0, 1, 2], [1, 2, 3]])
    labels = check_labels_tied(f)
    assert labels == 8


def check_labels_tied(f: Callable[..., Tensor]) -> int:
    """Return the number of classes over two stems of eight channels."""
    labels = labels_of(stems(f, 2))
    first, second = (labels.slots.find(row) for row in stem_slots(labels))
    assert torch.equal(first, second)
    return len(first.unique())


def test_labels_of_an_addition() -> None:
    """What is added goes together, and nothing else does."""
    check_labels(torch.add, classes=8, count=2)


def test_a_product_is_zero_where_either_factor_is() -> None:
    """``mul``: a masked factor decides, whatever the other is."""

    def f(m: Net, x: Tensor) -> Tensor:
        return x * m.gate(x)

    gate = nn.Conv2d(8, 8, 1, bias=False)
    model = Net(lambda m, x: f(m, m.stem(x)), stem=nn.Conv2d(3, 8, 1), gate=gate).double().eval()
    masks = dead(model, {"gate": [0, 5]})
    constants = constants_of(model, image(), masks)
    found = constants.along(constants.graph.outputs[0], 1)
    assert found[[0, 5]].tolist() == [0, 0] and found.isnan().sum() == 6
    with torch.no_grad():
        gate.weight.mul_(masks["gate"]["weight"])
        assert not model(image())[:, [0, 5]].any()


def test_a_quotient_of_two_numbers() -> None:
    """Nothing among its arguments is a tensor."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(m.stem(x).mean((2, 3))) * torch.div(x.size(2), 2, rounding_mode="trunc")

    model = randomised(Net(forward, stem=nn.Conv2d(3, 8, 1), head=nn.Linear(8, 2)))
    assert check_exact(model, dead(model, {"stem": [0, 1]}, bias=True), image()).slices["stem.weight"].shape[0] == 6


def test_use_of_factors() -> None:
    """A channel is unused where what it is multiplied with is certainly zero, or the product is not looked at."""
    zeros = torch.ones(1, 8, 1, 1).index_fill(1, torch.tensor([3]), 0).double()
    check_use(lambda x: x * zeros, [], [3])
    check_use(lambda x: x * torch.sigmoid(x), [1, 2], [1, 2])
    check_use(lambda x: x * x, [4], [4])


def test_use_of_operands_follows_the_result() -> None:
    """What is combined into a column that nobody reads is unused."""
    check_use(lambda x: torch.relu(x) + x.mean((2, 3), keepdim=True), [0, 7], [0, 7])
    check_use(lambda x: F.glu(x, 1), [1], [1, 5])


def test_sigmoid_of_zero_is_not_lost() -> None:
    """A dead gate channel without a bias multiplies by one half: that half must survive compaction."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(torch.sigmoid(m.gate(x)).mean((2, 3)))

    model = randomised(Net(forward, gate=nn.Conv2d(3, 6, 3, padding=1, bias=False), head=nn.Linear(6, 2)))
    masks = dead(model, {"gate": [0, 2, 3]})
    plan = check_exact(model, masks, image(), image(9))
    assert plan.slices["gate.weight"].shape[0] == 3
    gated = Net(
        lambda m, x: m.head((m.stem(x) * torch.sigmoid(m.gate(x))).mean((2, 3))),
        stem=nn.Conv2d(3, 6, 1),
        gate=nn.Conv2d(3, 6, 1, bias=False),
        head=nn.Linear(6, 2),
    )
    gated = randomised(gated)
    check_exact(gated, dead(gated, {"gate": [0, 2, 3]}), image(), image(9))


def test_prelu_meets_dimension_one() -> None:
    """One weight per channel belongs to the channels, not to the last dimension."""
    model = Net(
        lambda m, x: m.head(m.act(m.stem(x))), stem=nn.Conv2d(3, 4, 1), act=nn.PReLU(4), head=nn.Conv2d(4, 2, 1)
    )
    found = structure(model, torch.randn(2, 3, 4, 4))
    weight = found.graph.stored["act.weight"]
    stem = next(n for n in found.graph.nodes if n.module == "stem")
    assert torch.equal(found.along(weight, 0), found.along(stem.output, 1))
    check_constants(lambda m, x: m.act(x), constant=[0, 1, 2, 3], act=nn.PReLU(8))
    check_use(lambda m, x: m.act(x), [2, 6], [2, 6], act=nn.PReLU(8))


@pytest.mark.parametrize("op", COMPARISONS)
def test_comparisons_are_constants_of_zeros_alone(op: str) -> None:
    """A NaN compares as False, which would be a wrong constant; so may what rounding makes of a number."""
    check_constants(lambda x: getattr(torch, op)(x, 0.1).to(x), constant=[])
    check_constants(lambda x: getattr(torch, op)(x * 0, 0.1).to(x), constant=[0, 1, 2, 3])
    check_constants(lambda x: getattr(torch, op)(x * 0, 1e-9).to(x), constant=[])
    check_constants(lambda x: getattr(torch, op)(x * 0, x).to(x), constant=[])


def test_choices_are_constants_where_both_entries_are_the_same() -> None:
    """The condition may vary where the operands do not."""
    check_constants(lambda x: torch.where(x > 0, x, -x), constant=[])
    check_constants(lambda x: torch.where(x.flip(1) > 0, x, x), constant=[0, 1, 2, 3])
    check_constants(lambda x: torch.where(x > 0, x * 0, 0.0), constant=[0, 1, 2, 3])
    check_constants(lambda x: x.masked_fill(x > 0, 1.0), constant=[])
    check_constants(lambda x: (x * 0).masked_fill(x > 0, 0.0), constant=[0, 1, 2, 3])
    check_constants(lambda x: (x * 0).masked_fill(x > 0, torch.zeros(()).to(x)), constant=[0, 1, 2, 3])


def test_filled_tensors_are_constants_and_use_nothing() -> None:
    """``zeros_like`` and ``fill_`` lend a shape only: the number is known, the input unused."""
    check_constants(lambda x: torch.zeros_like(x).fill_(2.0), constant=range(8))
    check_constants(lambda x: x.new_full(x.shape, 0.5), constant=range(8))
    check_use(lambda x: torch.ones_like(x), [], range(8))


def test_dropout_is_the_identity_in_eval_mode() -> None:
    """Constants pass, and channels stay apart."""
    check_constants(lambda x: F.dropout(x, 0.5, training=False), constant=[0, 1, 2, 3])
    check_labels(lambda x: F.dropout(x, 0.5, training=False), classes=8)


def test_dropout_in_train_mode_keeps_only_zero() -> None:
    """Dropout that is always on scales at random: a constant that is not zero varies behind it."""
    model = Net(lambda m, x: F.dropout2d(m.stem(x), 0.5, training=True), stem=nn.Conv2d(3, 4, 1, bias=True)).double()
    with torch.no_grad():
        model.stem.bias.copy_(torch.tensor([0.0, 1.0, 2.0, 0.0]))
    constants = constants_of(model, image(), dead(model, {"stem": [0, 1]}))
    found = constants.along(constants.graph.outputs[0], 1)
    assert found[0] == 0 and found[1:].isnan().all()


def test_broadcasting_labels() -> None:
    """A per-channel parameter takes the channels' slots; a constant of the code freezes what it meets."""
    model = Net(
        lambda m, x: m.head(m.stem(x) * m.scale.bias.view(-1, 1, 1)),
        stem=nn.Conv2d(3, 4, 1),
        scale=nn.Linear(1, 4),
        head=nn.Conv2d(4, 2, 1),
    )
    found = structure(model, torch.randn(2, 3, 4, 4))
    slots = found.along(next(n for n in found.graph.nodes if n.module == "stem").output, 1)
    assert found.free()[slots].all()
    assert torch.equal(found.along(found.graph.stored["scale.bias"], 0), slots)
    fixed = Net(
        lambda m, x: m.head(m.stem(x) * torch.arange(4.0).view(4, 1, 1)),
        stem=nn.Conv2d(3, 4, 1),
        head=nn.Conv2d(4, 2, 1),
    )
    groups = engine.dependency_groups(fixed, torch.randn(2, 3, 4, 4))
    assert "fixed size" in groups[0].reason


def test_glu_ties_a_gate_and_what_it_gates() -> None:
    """Channel i and channel i + half go together."""
    labels = check_labels(lambda x: F.glu(x, 1), classes=4)
    assert labels.graph.outputs[0].shape[1] == 4


def test_glu_of_a_dead_pair_is_zero_and_compacts() -> None:
    """What is gated decides: zero whatever the gate; a pair that is masked goes, a dead gate alone is not a reason."""
    model = randomised(nn.Sequential(nn.Conv2d(3, 8, 1), nn.GLU(1), nn.Conv2d(4, 2, 1)))
    assert (
        engine.count_flops_params(model, image(), verbose=False, masks=dead(model, {"0": [1, 5]}))[1] == 3 * 6 + 6 + 8
    )
    check_exact(model, dead(model, {"0": [1, 5]}), image(), image(8))
    check_exact(model, dead(model, {"0": [1]}), image(), image(8))
    check_exact(model, dead(model, {"0": [5]}), image(), image(8))


def test_point_wise_ops_are_counted_in_full_mode_only() -> None:
    """The default counts contractions; ``full`` adds one operation per element."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    x = torch.randn(1, 3, 5, 5)
    assert check_macs(model, x) == 3 * 4 * 25
    assert engine.count_flops_params(model, x, verbose=False, mode="full")[0] == 3 * 4 * 25 + 4 * 25


def test_the_lists_name_ops_that_exist_once() -> None:
    """Every name is an op of aten, and no name is on two lists."""
    names = [*UNARY, *COMBINING, *PRODUCTS, *QUOTIENTS, *COMPARISONS, *CHOICES, *OPAQUE]
    assert len(set(names)) == len(names)
    assert not [n for n in names if not hasattr(torch.ops.aten, n)]


def test_a_dead_channel_behind_an_in_place_activation() -> None:
    """In-place forms have the same rule."""
    model = randomised(
        nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(True), Apply(lambda x: (x + 0).mul_(2).add_(1)), Mean())
    )
    model.append(nn.Linear(6, 2).double())
    check_exact(model, dead(model, {"0": [1, 2]}), image(), image(8))


def test_an_op_with_out() -> None:
    """``torch.add(x, 1, out=y)`` writes y: it is an addition like any other."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        with torch.no_grad():
            y = torch.empty_like(x)
            torch.add(x.detach(), 1, out=y)
        return m.head((x + y).mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 6, 1), head=nn.Linear(6, 2)))
    check_exact(model, dead(model, {"stem": [0, 1]}), image(), image(8))


def test_where_of_a_condition_alone() -> None:
    """It gives indices, as many as the data has: what it looks at stays, and nothing meets what it gives."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        large = x.mean((2, 3)).sigmoid() > 0.5
        rows, _ = torch.where(large)
        return m.head(torch.relu(m.body(x)).mean((2, 3)))[rows[: len(rows.topk(min(len(rows), 3))[0])]]

    parts = {"stem": nn.Conv2d(3, 6, 1), "body": nn.Conv2d(6, 8, 1), "head": nn.Linear(8, 2)}
    model = randomised(Net(forward, **parts))
    reasons = {g.name: g.reason for g in engine.dependency_groups(model, image())}
    assert "counts its entries" in str(reasons["stem"]) and reasons["body"] is None
    plan = check_exact(model, dead(model, {"stem": [0, 1], "body": [0, 1]}, bias=True), image())
    assert plan.slices["body.weight"].shape == (6, 6, 1, 1)


class Cosine(nn.Module):
    """Attention by the angle between queries and keys, as in Swin v2."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.head = 4, nn.Linear(12, 36), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of tokens."""
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        weights = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)).softmax(-1)
        found: Tensor = self.head((weights @ v).transpose(1, 2).reshape(b, n, c))
        return found


def test_queries_and_keys_of_length_one() -> None:
    """``F.normalize`` expands the length of each query to its entries: heads go as a whole."""
    model = randomised(nn.Sequential(nn.Linear(6, 12), Cosine()))
    tokens = torch.randn(2, 5, 6, dtype=torch.float64)
    (group,) = [g for g in engine.dependency_groups(model, tokens) if g.name == "1.qkv"]
    masks = engine.group_masks([group], {group.name: torch.arange(group.size) < 2})
    plan = check_exact(model, masks, tokens, tokens[:, :3])
    assert plan.slices["1.qkv.weight"].shape == (18, 12) and plan.slices["1.head.weight"].shape == (2, 6)


@pytest.mark.parametrize("fixed", [False, True])
def test_expanded_as_another(fixed: bool) -> None:
    """What is expanded goes along with what gives the size, which stays where the other one does."""

    def forward(m: Net, x: Tensor) -> Tensor:
        y = m.stem(x)
        gate = torch.ones(8, 1, 1, dtype=x.dtype) if fixed else m.gate(x).mean((2, 3), keepdim=True)
        return m.head(torch.relu(gate.expand_as(y) + y.mean((2, 3), keepdim=True)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 8, 1), gate=nn.Conv2d(3, 8, 1), head=nn.Conv2d(8, 2, 1)))
    reasons = {g.name: g.reason for g in engine.dependency_groups(model, image())}
    assert ("fixed size" in str(reasons["stem"])) is fixed
    plan = check_exact(model, dead(model, {"stem": [0, 4], "gate": [0, 4]}, bias=True), image())
    assert ("stem.weight" in plan.slices) is not fixed

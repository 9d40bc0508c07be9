"""The self-check of rules finds wrong ones, and passes all that the engine ships."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torchvision
from torch import Tensor, nn

import engine
from engine.checking.check import RuleReport
from engine.checking.freed import Freed
from engine.ops import HEAD_DIMENSIONS, dimensions
from engine.ops.shape import through
from engine.program.graph import Node
from engine.rule import Rule, Sample
from tests.engine.nets import Net
from tests.engine.test_samples import built

# An example may have registered a rule of its own in this process.
OURS = [rule for rule in engine.RULES.distinct() if rule.labels.__module__.startswith("engine.")]
SHIPPED = [rule for rule in OURS if any(True for _ in rule.samples())]
# Ops that no sample can call by itself, and why.
UNSEEN = {
    "_grouped_mm": "its kernel takes no float64; the tests of products try the rule on its fallback",
    "_has_compatible_shallow_copy_type": "puts nothing out that could be compared; the tests of weights try it",
    "_reshape_alias": "reached only while training",
    "_softmax": "the same op under another name, where autograd runs",
    "_to_copy": "the same op under another name, where autograd runs",
    "_upsample_lanczos2d_aa": "versions of torch before 2.15 lack it; the tests of interpolation try it",
    "_unsafe_view": "the same op under another name, where autograd runs",
    "alias": "gives its input back",
    "contiguous": "gives its input back",
    "dot": "torch computes a spectral norm with it, or with `vdot`",
    "dropout": "random in train mode, not called in eval mode",
    "engine::module": "does what the user's module does, which is tried when it is met",
    "engine::spread": "stands in a network that was compacted, where its tests try it",
    "feature_dropout": "random in train mode, not called in eval mode",
    "grid_sampler_2d": "the same op under another name, where autograd runs",
    "grid_sampler_3d": "the same op under another name, where autograd runs",
    "lift_fresh": "gives its input back",
    "torchvision::nms": "freezes all that it is given",
    "torchvision::roi_align": "of a package that need not be there",
    "torchvision::roi_pool": "of a package that need not be there",
    "transformers::grouped_mm_fallback": "of a package that need not be there",
    "type_as": "gives its input back",
    "vdot": "torch computes a spectral norm with it, or with `dot`",
    **dict.fromkeys(
        ["addbmm", "addmv", "addr", "bilinear", "conv_tbc", "ger", "inner", "linalg_vecdot", "outer", "tensordot"],
        "freezes all that it is given",
    ),
    **dict.fromkeys(["bernoulli", "binomial", "normal", "poisson"], "draws from parameters; the tests of noise try it"),
    **dict.fromkeys(
        ["cauchy", "exponential", "geometric", "log_normal", "rand_like", "randint_like", "random", "uniform"],
        "draws as `randn_like` does; the tests of noise try it",
    ),
}
CHECKED = [rule.ops[0] for rule in OURS if not set(rule.ops) <= set(UNSEEN)]
TABLE = Path(__file__).parents[3] / "docs" / "frozen-axes.md"


def _deformed() -> nn.Module:
    """A convolution that reads at places of its own."""
    offsets = torch.linspace(-0.7, 0.8, 18).view(1, 18, 1, 1).double()
    layers = {"first": nn.Conv2d(3, 6, 1), "layer": torchvision.ops.DeformConv2d(6, 4, 3, padding=1)}

    def forward(m: Net, x: Tensor) -> Tensor:
        places = offsets.expand(len(x), -1, *x.shape[2:]).to(x)
        return m.last(torch.relu(m.layer(torch.relu(m.first(x)), places)))

    return Net(forward, **layers, last=nn.Conv2d(4, 2, 1))


EXTRA = {
    "torchvision::deform_conv2d": [Sample(_deformed, (2, 3, 5, 5), "deformed")],
    "bmm": [through("bmm", lambda x: torch.bmm(x.flatten(2), x.flatten(2).mT).mean(2)[..., None, None] * x)],
    "einsum": [through("einsum", lambda x: torch.einsum("nchw,nkhw->nc", x, x.sigmoid())[:, :, None, None] * x)],
    "softmax": [through("log_softmax", lambda x: x.flatten(2).log_softmax(-1).view(x.shape) + x.softmax(3))],
}


@functools.cache
def shared() -> dict[str, list[Sample]]:
    """For each rule without samples of its own, by its first op: the samples of other rules that call it."""
    alone = [rule for rule in OURS if rule not in SHIPPED and rule.ops[0] not in EXTRA]
    owners = {op: rule.ops[0] for rule in alone for op in rule.ops if op not in UNSEEN}
    found: dict[str, list[Sample]] = {}
    for sample in (sample for rule in SHIPPED for sample in rule.samples()):
        if not owners:
            break
        called = {node.op for node in engine.trace(built(sample)[0], torch.zeros(sample.shape).double()).nodes}
        for op in called & set(owners):  # those that no earlier sample calls
            found.setdefault(owners.pop(op), []).append(sample)
    return found


@functools.cache
def report_of(op: str) -> RuleReport:
    """The report of the rule of an op; made once."""
    rule = engine.RULES[op]
    return engine.check_rule(rule, EXTRA.get(op, ()) or (() if rule in SHIPPED else shared()[op]))


def untried(rules: Iterable[Rule]) -> set[str]:
    """Names of rules, by their first op, of which no sample calls any op."""
    tried = {rule.ops[0] for rule in SHIPPED} | set(EXTRA) | set(shared())
    found = {
        rule.ops[0] for rule in rules if not set(rule.ops) <= set(UNSEEN) and not any(True for _ in rule.samples())
    }
    return found - tried


def test_every_rule_has_samples() -> None:
    """Its own, those of another rule that call its ops, or ones of this file; a rule that nothing tries is found."""
    assert untried(OURS) == untried(HEAD_DIMENSIONS.distinct()) == set()
    forgotten = Rule(("mine::forgotten",), lambda node, labels: None)
    assert untried([*OURS, forgotten]) == {"mine::forgotten"}


@pytest.mark.parametrize("op", CHECKED)
def test_every_rule_that_is_shipped(op: str) -> None:
    """Each passes on its own samples, call by call and in whole networks, and the samples call all of its ops.

    Each axis that the brute force frees is in one row of the page of frozen axes, with its reason.
    """
    report = report_of(op)
    assert all(error <= 1e-9 for *_, error in report.rows) and "Checked" in str(report)
    assert set(report.missing) <= set(UNSEEN) and report.calls
    for axis in report.freed:
        rows = rows_that_name(axis)
        assert len(rows) == 1, f"{axis} is in {len(rows)} rows of {TABLE.name}"


@pytest.mark.slow
@pytest.mark.parametrize("op", [r.ops[0] for r in dimensions.RULES if r is not engine.RULES[r.ops[0]]])
def test_rules_for_head_dimensions(op: str) -> None:
    """They pass too; what they keep are heads and positions."""
    own = list(engine.RULES[op].samples()) or list(engine.RULES["matmul"].samples())
    report = engine.check_rule(HEAD_DIMENSIONS[op], [*EXTRA.get(op, ()), *own], HEAD_DIMENSIONS)
    assert all(error <= 1e-9 for *_, error in report.rows) and report.calls
    freed = {found.reason.partition(" ")[2] for found in report.freed}
    assert op in ("mean", "sum", "linalg_norm", "linalg_vector_norm") or all(
        "keeps its heads and its positions" in r for r in freed
    )


@functools.cache
def rows_of_the_page() -> list[list[str]]:
    """(op, axes, where, reason) of each row of the page."""
    rows = [line.strip("| \n").split(" | ") for line in TABLE.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip("`") for cell in row] for row in rows]


def rows_that_name(axis: Freed) -> list[int]:
    """Numbers of the rows of the page that an axis is in."""
    key = (axis.op, axis.axes, "zeros" if axis.zero else "any")
    return [i for i, row in enumerate(rows_of_the_page()) if all(map(fnmatch.fnmatchcase, key, row))]


def test_no_row_of_the_page_is_left_over() -> None:
    """Each names an axis that could go, with a reason; only the rules of ops that rows name can free one of them."""
    rows = rows_of_the_page()
    named = [op for op in CHECKED if any(fnmatch.fnmatchcase(o, row[0]) for o in engine.RULES[op].ops for row in rows)]
    matched = {row for op in named for axis in report_of(op).freed for row in rows_that_name(axis)}
    assert [row for i, row in enumerate(rows) if i not in matched] == []
    assert all(len(reason) > 20 for *_, reason in rows)


def test_wrong_constants_are_found() -> None:
    """A function that is said to put out zero where it puts out one half."""
    sigmoid = Sample(
        lambda: nn.Sequential(nn.Conv2d(3, 6, 1), nn.Sigmoid(), nn.Conv2d(6, 2, 1)), (2, 3, 4, 4), "sigmoid"
    )

    def zero(node: Node, constants: object) -> list[Tensor]:
        known = constants[node.inputs[0]]  # type: ignore[index]
        return [torch.where(known.isnan(), known, 0.0)]

    good = engine.RULES["sigmoid"]
    wrong = replace(good, ops=("sigmoid",), constants=zero, samples=lambda: [sigmoid])
    others = engine.Registry(
        replace(r, ops=tuple(op for op in r.ops if op != "sigmoid")) for r in engine.RULES.distinct()
    )
    with pytest.raises(engine.errors.RuleError, match="sigmoid"):
        engine.check_rule(wrong, rules=others)


def test_wrong_labels_are_found() -> None:
    """A flip that is said to leave channels where they are."""
    good = engine.RULES["flip"]
    flipped = through("flip", lambda x: x.flip(1))
    wrong = replace(
        good,
        ops=("flip",),
        labels=lambda node, labels: labels.pass_on(*node.inputs, node.output),
        samples=lambda: [flipped],
    )
    others = engine.Registry(replace(r, ops=tuple(op for op in r.ops if op != "flip")) for r in engine.RULES.distinct())
    with pytest.raises(engine.errors.RuleError, match="flip"):
        engine.check_rule(wrong, rules=others)


def test_what_is_left_whole_is_reported() -> None:
    """With the reason."""
    report = engine.check_rule(engine.RULES["softmax"], [through("softmax", lambda x: x.softmax(1))])
    assert "sums over it" in report.frozen["softmax"][0]


def test_a_rule_without_samples_is_an_error() -> None:
    """Nothing can be said about it."""
    with pytest.raises(engine.errors.RuleError, match="no samples"):
        engine.check_rule(engine.RULES["softmax"])

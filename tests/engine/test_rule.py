"""Rules, their registry, and ops without a rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import RuleError
from engine.rule import UNKNOWN, Registry, Rule
from tests.engine.exactness import check_exact, masked, randomised, relative_error, run
from tests.engine.nets import Net, dead, image


@torch.library.custom_op("engine_tests::swap_halves", mutates_args=())
def swap_halves(x: Tensor) -> Tensor:
    """Exchange the halves of the channels."""
    return torch.cat([x[:, x.shape[1] // 2 :], x[:, : x.shape[1] // 2]], 1)


@swap_halves.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


swap_halves.register_autograd(lambda context, gradient: swap_halves(gradient))


def net() -> nn.Module:
    """A network with an op that nobody knows."""
    return randomised(
        Net(
            lambda m, x: m.head(swap_halves(m.second(torch.relu(m.first(x)))).mean((2, 3))),
            first=nn.Conv2d(3, 4, 1),
            second=nn.Conv2d(4, 6, 1),
            head=nn.Linear(6, 2),
        )
    )


def test_an_unknown_op_freezes_its_axes_with_a_reason() -> None:
    """Never guessed: what it reads and makes stays; what does not touch it still goes, and the result is exact."""
    model = net()
    reasons = {g.name: g.reason for g in engine.dependency_groups(model, image())}
    assert reasons["first"] is None
    assert "engine_tests::swap_halves has no rule" in reasons["second"] and "test_rule.py:" in reasons["second"]
    plan = check_exact(model, dead(model, {"first": [0], "second": [1, 2]}, bias=True), image(), image(9))
    assert plan.slices["first.weight"].shape[0] == 3 and plan.slices["second.weight"].shape == (6, 3, 1, 1)


def test_a_rule_of_the_users_own() -> None:
    """``RULES + [rule]`` is a new registry; with it the op's axes are free, and the certificate holds it to account."""

    def swapped(node: object, array: Tensor) -> Tensor:
        return torch.cat(array.chunk(2, 1)[::-1], 1) if array.size(1) > 1 else array

    def labels(node: engine.Node, labels: object) -> None:
        for layer in labels.layers(node.inputs[0]):
            first, second = layer.chunk(2, 1)
            labels.slots.union(first, second)
            labels.add(node.output, swapped(node, layer))

    good = engine.Rule(
        ("engine_tests::swap_halves",), labels, lambda node, constants: [swapped(node, constants[node.inputs[0]])]
    )
    rules = engine.RULES + [good]
    assert "engine_tests::swap_halves" in rules and "engine_tests::swap_halves" not in engine.RULES
    model = net()
    masks = dead(model, {"second": [1, 4]}, bias=True)
    reference = run(masked(model, masks), image(9))
    engine.ModelSpeedup(model, image(), masks, rules=rules).speedup_model()
    assert model.second.out_channels == 4
    assert relative_error(reference, run(model, image(9))) < 1e-9


def test_a_wrong_rule_of_the_users_own_is_noticed() -> None:
    """An op that is said to keep channels in place, but does not, ends in an error and leaves the model as it was."""
    wrong = engine.Rule(
        ("engine_tests::swap_halves",),
        lambda node, labels: labels.pass_on(node.inputs[0], node.output),
        lambda node, constants: [constants[node.inputs[0]]],
        lambda node, use: use.add(node.inputs[0], use[node.output]),
    )
    model = net()
    before = run(model, image())
    with pytest.raises(engine.errors.VerificationError):
        engine.ModelSpeedup(
            model, image(), dead(model, {"second": [1, 2]}, bias=True), rules=engine.RULES + [wrong]
        ).speedup_model()
    assert all(torch.equal(a, b) for a, b in zip(before, run(model, image()), strict=True))


def test_two_rules_for_one_op_are_an_error() -> None:
    """Ambiguity is refused, with the op named."""
    relu = engine.RULES["relu"]
    with pytest.raises(RuleError, match="'relu'"):
        engine.RULES + [engine.Rule(("relu",), relu.labels)]


def test_a_registry_is_a_mapping() -> None:
    """Rules by op name; each rule once; an unknown op has the rule that freezes."""
    assert len(engine.RULES) == len(list(engine.RULES)) > len(engine.RULES.distinct())
    assert engine.RULES.rule("no::such") is UNKNOWN
    assert len(engine.Registry(engine.RULES.distinct())) == len(engine.RULES)


def test_what_a_rule_leaves_out_is_the_safe_answer() -> None:
    """Nothing known, everything used, nothing counted, nothing demanded."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    graph = engine.trace(model, image().float())
    node = graph.nodes[-1]
    rule = engine.Rule(("any",), lambda node, labels: None)
    assert rule.constants(node, None) is None and rule.macs(node, lambda v: v.shape) == 0
    assert tuple(rule.demands(node, None, None)) == () and rule.attributes(node, None) == {}
    assert rule.contraction is None and rule.rare.absorbs is None and tuple(rule.samples()) == ()


def test_registered_rules_serve_who_holds_the_registry() -> None:
    """In place; a second rule for an op is an error that adds nothing."""

    def nothing(node: Any, labels: Any) -> None:
        pass

    registry = Registry()
    registry.register(Rule(("one::op",), nothing))
    held = registry
    registry.register(Rule(("other::op",), nothing))
    assert list(held) == ["one::op", "other::op"]
    with pytest.raises(RuleError, match="one::op"):
        registry.register(Rule(("third::op",), nothing), Rule(("one::op",), nothing))
    assert list(held) == ["one::op", "other::op"]


def test_a_rule_can_be_read_at_a_glance() -> None:
    """What few ops need is in a part of its own."""
    assert len(dataclasses.fields(engine.Rule)) <= 15


ALONG_A_NUMBER: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(-1),
    "prod": lambda x: x.prod(0),
    "amax": lambda x: x.amax(-1),
    "argmax": lambda x: x + x.argmax(0),
    "all": lambda x: x * (x > 0).all(0),
    "norm": lambda x: x.norm(dim=-1),
    "std": lambda x: x.std(0, correction=0),
    "softmax": lambda x: x.softmax(0) + x,
    "logsumexp": lambda x: x.logsumexp(0),
    "cumsum": lambda x: x.cumsum(0),
    "max": lambda x: x.max(0)[0],
    "sort": lambda x: x.sort(-1)[0],
    "topk": lambda x: x.topk(1, dim=-1)[0],
    "median": lambda x: x.median(0)[0],
    "flip": lambda x: x.flip(0),
    "transpose": lambda x: x.transpose(0, -1),
    "index_select": lambda x: x.index_select(0, torch.tensor([0])),
    "gather": lambda x: x.gather(0, torch.tensor(0)),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "stack": lambda x: torch.stack([x, x], 0),
}


@pytest.mark.parametrize("name", ALONG_A_NUMBER)
def test_a_dimension_of_a_single_number(name: str) -> None:
    """torch takes one, as of a loss over a batch of one."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return ALONG_A_NUMBER[name](m.second(torch.relu(m.first(x))).square().mean())

    model = randomised(Net(forward, first=nn.Conv2d(3, 4, 1), second=nn.Conv2d(4, 2, 1)))
    check_exact(model, dead(model, {"first": [0, 2]}, bias=True), image(), image(5))
    assert engine.dependency_groups(model, image())[0].reason is None

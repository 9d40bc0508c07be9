"""Layers that are written as products with a stored matrix, or with one of a stack: mixtures of experts."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.errors import RuleError
from engine.ops.products import Experts, Product, in_float64
from tests.engine.exactness import KINDS, check_exact, masked, randomised, relative_error, run
from tests.engine.experts import Sparse
from tests.engine.language import sentence
from tests.engine.nets import Net, dead, structure

CPU = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="grouped products came with torch 2.10")


def halved(model: nn.Module, x: Any) -> tuple[dict[str, dict[str, Tensor]], dict[str, engine.Group]]:
    """Mask the first half of every group that may lose units."""
    groups = engine.dependency_groups(model, x)
    free = {g.name: torch.arange(g.size) >= g.size // 2 for g in groups if g.reason is None}
    return engine.group_masks(groups, free), {g.name: g for g in groups}


@pytest.mark.parametrize("shared", [0, 6], ids=["Mixtral", "Qwen"])
@pytest.mark.parametrize("how", ["batched", "loop"])
def test_neurons_of_experts_and_the_stream_go(how: str, shared: int) -> None:
    """A neuron is the same one in all experts; what the router chooses among stays, with the reason."""
    torch.manual_seed(0)
    model = Sparse(how, shared=shared).double().eval()
    masks, groups = halved(model, sentence())
    assert groups["embed"].size == 16 and groups["embed"].reason is None
    assert [(m.role, m.parameter) for m in groups["blocks.0.experts"].members] == [
        ("out", "blocks.0.experts.gate_up_proj"),
        ("in", "blocks.0.experts.down_proj"),
    ]
    assert "softmax" in str(groups["blocks.0.gate"].reason)
    full, small = copy.deepcopy(model), model
    before = engine.count_flops_params(model, sentence(), verbose=False)
    speedup = engine.ModelSpeedup(model, sentence(), masks)
    speedup.speedup_model()
    assert small.blocks[1].experts.gate_up_proj.shape == (4, 8, 8)  # type: ignore[union-attr, index]
    assert small.blocks[1].experts.down_proj.shape == (4, 8, 4)  # type: ignore[union-attr, index]
    assert speedup.certificate.max_error < 1e-9 and speedup.certificate.verified
    assert speedup.certificate.compared > 6
    after = engine.count_flops_params(small, sentence(), verbose=False)
    # per token: the router, two experts of three products of 16 x 8, and the scores
    assert before[0] == 5 * (2 * (4 * 16 + 2 * 3 * 16 * 8 + (shared * 32 + 16 if shared else 0)) + 11 * 16)
    assert after[0] == 5 * (2 * (4 * 8 + 2 * 3 * 8 * 4 + (shared * 8 + 8 if shared else 0)) + 11 * 8)
    for seed in (1, 2, 3):  # other words, which go to other experts
        words = sentence(3, 7, seed=seed)
        assert relative_error(run(masked(full, masks), words), run(small, words)) < 1e-9


@CPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sorted_tokens_times_the_matrices_of_their_experts(dtype: torch.dtype) -> None:
    """Rows in memory stay multiples of 16 bytes: of four neurons in float32, of eight in bfloat16."""
    torch.manual_seed(0)
    model = Sparse("grouped", width=32, neurons=24).to(dtype).eval()
    x = sentence()
    masks, groups = halved(model, x)
    assert groups["embed"].reason is None and groups["blocks.0.experts"].size == 24
    macs = engine.count_flops_params(model, x, verbose=False)[0]
    assert macs == 5 * (2 * (4 * 32 + 2 * 3 * 32 * 24) + 11 * 32)
    speedup = engine.ModelSpeedup(model, x, masks)
    speedup.speedup_model()
    neurons = 12 if dtype == torch.float32 else 16
    assert model.blocks[0].experts.gate_up_proj.shape == (4, 2 * neurons, 16)  # type: ignore[union-attr, index]
    assert speedup.certificate.verified and speedup.certificate.dtype == "float64"  # for which there is no kernel
    assert speedup.certificate.max_error < 1e-9 and not speedup.certificate.notes


@CPU
def test_a_grouped_product_in_float64_is_that_of_the_kernel() -> None:
    """With experts that have no tokens; what no kernel takes otherwise is left to the op."""
    x, weight = torch.randn(6, 8), torch.randn(4, 8, 12)
    offsets = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    wide = in_float64(
        torch.ops.aten._grouped_mm.default, (x.double(), weight.double()), {"offs": offsets, "bias": None}
    )
    assert wide is not None and torch.allclose(wide.float(), F.grouped_mm(x, weight, offs=offsets), atol=1e-5)
    left = torch.randn(5, 6).double()
    each = in_float64(torch.ops.aten._grouped_mm.default, (left, x.double(), offsets), {})
    assert each is not None and each.shape == (4, 5, 8) and not each[1].any()
    assert torch.allclose(each.sum(0), left @ x.double())
    assert in_float64(torch.ops.aten._grouped_mm.default, (x, weight, offsets), {}) is None
    assert in_float64(torch.ops.aten.mm.default, (x.double(), x.double().mT), {}) is None
    assert (
        in_float64(
            torch.ops.aten._grouped_mm.default, (x.double(), weight.double(), offsets), {"out_dtype": torch.float32}
        )
        is None
    )


@CPU
def test_without_data_a_grouped_product_is_planned_in_bfloat16() -> None:
    """As for a model that is too large to be loaded."""
    with torch.device("meta"):
        model = Sparse("grouped", width=32, neurons=16).bfloat16().eval()
    x = torch.zeros(1, 5, dtype=torch.long, device="meta")
    masks, groups = halved(model, x)
    assert {g.size for g in groups.values() if g.reason is None} == {32, 16}
    engine.ModelSpeedup(model, x, masks, confidence=0).speedup_model()
    assert model.blocks[0].experts.down_proj.shape == (4, 16, 8)  # type: ignore[union-attr, index]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["batched", "loop"])
def test_any_masks_of_experts_compact_exactly(how: str, kind: str) -> None:
    """Single entries, columns and channels of each layer by itself."""
    torch.manual_seed(1)
    model = randomised(Sparse(how, depth=1, shared=4))
    check_exact(model, KINDS[kind](model, 2), sentence(), sentence(3))


def test_a_neuron_goes_only_where_all_experts_have_lost_it() -> None:
    """What one expert keeps stays in all of them."""
    torch.manual_seed(0)
    model = Sparse("batched", depth=1).double().eval()
    mask = torch.ones(4, 16, 16)
    mask[:, [0, 8]], mask[:3, [1, 9]] = 0, 0
    plan = check_exact(model, {"blocks.0.experts": {"gate_up_proj": mask}}, sentence(), sentence(3))
    assert plan.slices["blocks.0.experts.down_proj"].shape == (4, 16, 7)


def test_a_constant_neuron_is_carried_by_another_one() -> None:
    """Each expert adds another share of it, so no bias can take it up: one constant neuron stays for all."""

    class Picked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 8), nn.Linear(6, 3)
            self.weight = nn.Parameter(torch.randn(4, 6, 8))

        def forward(self, x: Tensor) -> Tensor:
            expert = x.abs().argmax(-1) % 4
            y = torch.bmm(self.weight[expert], torch.sigmoid(self.first(x))[:, :, None])[:, :, 0]
            found: Tensor = self.last(torch.tanh(y))
            return found

    torch.manual_seed(0)
    model = Picked().double()
    plan = check_exact(model, dead(model, {"first": [1, 2, 5]}), torch.randn(9, 5).double(), torch.randn(4, 5).double())
    assert plan.slices["weight"].shape == (4, 6, 6)  # three are constant, of which one carries the others


def test_what_only_decides_which_row_is_picked_is_used() -> None:
    """Channels that reach nothing but an index stay."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(m.table.weight[m.router(torch.tanh(m.stem(x))).argmax(-1)])

    parts = {"stem": nn.Linear(5, 8), "router": nn.Linear(8, 4), "table": nn.Embedding(4, 6), "head": nn.Linear(6, 3)}
    model = randomised(Net(forward, **parts))
    plan = check_exact(model, dead(model, {"stem": [1, 2]}, bias=True), torch.randn(40, 5).double())
    assert plan.slices["stem.weight"].shape == (6, 5)


def test_experts_that_did_not_run_stay_fit_for_use() -> None:
    """Of a list of modules, which the data choose from, only some run on the example."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = torch.tanh(m.stem(x))
        chosen, y = m.router(x).argmax(-1), torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            tokens = (chosen == expert).nonzero()[:, 0]
            y = y.index_add(0, tokens, m.experts[expert](x[tokens]))
        return m.head(x + y)

    experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    parts = {"stem": nn.Linear(5, 8), "router": nn.Linear(8, 4), "experts": experts, "head": nn.Linear(8, 3)}
    torch.manual_seed(0)
    model = randomised(Net(forward, **parts))
    one, many = torch.randn(1, 5).double(), torch.randn(60, 5).double()
    masks = dead(model, {"stem": [1, 2], **{f"experts.{k}": [1, 2] for k in range(4)}}, bias=True)
    reason = engine.dependency_groups(model, one)[0].reason
    assert reason is not None and "did not run on the example" in reason
    for example in (one, many):
        small = copy.deepcopy(model)
        speedup = engine.ModelSpeedup(small, example, masks)
        speedup.speedup_model()
        assert relative_error(run(masked(model, masks), many), run(small, many)) < 1e-9
        assert ("stem.weight" in speedup.plan.slices) == (example is many)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("front", [False, True])
def test_matrices_in_any_order(turned: bool, front: bool) -> None:
    """Stored with inputs or outputs first, in front of the tokens or behind them."""
    torch.manual_seed(0)
    model = randomised(Experts(6, 4, turned, front))
    x = torch.randn(5, 5).double()
    masks, groups = halved(model, x)
    assert groups[""].size == 4 and groups["first"].size == 6
    plan = check_exact(model, masks, x, torch.randn(7, 5).double())
    assert plan.slices["down_proj"].shape == ((4, 2, 3) if turned else (4, 3, 2))


def test_the_samples_of_a_product_have_stacks_of_matrices() -> None:
    """On them the test of all rules tries labels, constants and use by brute force, and whole networks."""
    names = {sample.name for sample in engine.RULES["bmm"].samples()}
    assert names >= {"experts, outputs first, behind", "a matrix per head", "layer by mm with a transpose"}


def _sorted(x: Tensor, weight: Tensor) -> Tensor:
    offsets = torch.arange(1, len(weight) + 1, dtype=torch.int32) * len(x) // len(weight)
    found: Tensor = torch.ops.transformers.grouped_mm_fallback(x, weight, offsets)
    return found


class Sorted(nn.Module):
    """Samples in order of their experts, through the product that transformers falls back to."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.first, self.last, self.turned = nn.Linear(5, 6), nn.Linear(4, 3), turned
        self.weight = nn.Parameter(torch.randn(3, 4, 6) if turned else torch.randn(3, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, (samples, 3)."""
        weight = self.weight.transpose(-2, -1) if self.turned else self.weight
        found: Tensor = self.last(torch.tanh(_sorted(self.first(x).relu(), weight)))
        return found


def test_the_rule_of_a_grouped_product_holds_by_brute_force() -> None:
    """In float64, which the kernel itself does not take: its fallback has the same rule."""
    pytest.importorskip("transformers.integrations.moe")
    samples = [engine.Sample(lambda t=t: Sorted(t), (7, 5), f"turned {t}") for t in (False, True)]  # type: ignore[misc]
    report = engine.check_rule(engine.RULES["transformers::grouped_mm_fallback"], samples)
    assert report.calls and all(error < 1e-9 for *_, error in report.rows)
    assert all(after < before for _, kind, before, after, _ in report.rows if kind == "whole groups")


def test_matrices_that_are_computed_stay() -> None:
    """A stack that is not a parameter says of no entry whether it matters."""
    pytest.importorskip("transformers.integrations.moe")
    model = Sorted(False)
    model.forward = lambda x: model.last(_sorted(model.first(x), model.weight * 2))  # type: ignore[method-assign]
    reason = engine.dependency_groups(model, torch.randn(7, 5))[0].reason
    assert reason is not None and "are computed" in reason


WAYS = [
    "x @ w.T",
    "x.matmul(w.t())",
    "x @ w.transpose(0, 1)",
    "x @ w.mT",
    "F.linear(x, w)",
    "torch.einsum('bti,oi->bto', x, w)",
    "torch.einsum('oi,...i->...o', w, x)",
    "torch.einsum('bti,io->tbo', x, w.T).transpose(0, 1)",
]


@pytest.mark.parametrize("write", WAYS)
def test_a_layer_by_any_way_of_turning_its_matrix(write: str) -> None:
    """Its outputs and inputs go, and it is listed under its module."""
    code = compile(write, "<layer>", "eval")

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(torch.tanh(m.middle(torch.tanh(m.stem(x)))))

    class Middle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 8))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = eval(code, {"F": F, "torch": torch}, {"x": x, "w": self.weight})
            return found

    model = randomised(Net(forward, stem=nn.Linear(5, 8), middle=Middle(), head=nn.Linear(6, 3)))
    x = torch.randn(2, 4, 5).double()
    dependency = engine.ChannelDependency(model, x)
    assert dependency.channels["middle"] == 6 and {"middle"} in dependency.dependency_sets
    assert engine.count_flops_params(model, x, verbose=False)[0] == 4 * (40 + 48 + 18)
    masks = dead(model, {"stem": [1, 2]})  # constants go into the bias of the next layer, or stay: there is none
    masks["middle"] = {"weight": torch.ones(6, 8).index_fill(0, torch.tensor([0, 3, 4]), 0)}
    plan = check_exact(model, masks, x, torch.randn(3, 4, 5).double())
    assert plan.slices["middle.weight"].shape == (3, 7)


@pytest.mark.parametrize(
    "equation", ["bti,ti->bt", "bti,oi->bo", "bti,oj->btj", "bti,tio->bo", "bti,bti->bi", "bti,oi"], ids=str
)
def test_an_einsum_that_is_no_layer(equation: str) -> None:
    """What is summed over beside one letter, or not at all, is none; nothing in front of it goes wrong."""
    shapes = {"ti": (4, 8), "oi": (6, 8), "oj": (6, 8), "tio": (4, 8, 6), "bti": (2, 4, 8)}
    weight = nn.Parameter(torch.randn(shapes[equation.partition(",")[2].partition("->")[0]]))
    stem = nn.Linear(5, 8)
    stem.register_parameter("other", weight)
    model = randomised(Net(lambda m, x: torch.einsum(equation, m.stem(x), m.stem.other), stem=stem))
    x = torch.randn(2, 4, 5).double()
    layers = [node.op for node, _ in structure(model, x).contractions()]
    assert layers == ["linear"]
    check_exact(model, dead(model, {"stem": [1, 2]}, bias=True), x)


def test_a_turned_matrix_that_something_else_reads_takes_up_no_constant() -> None:
    """The table of words is the head as well."""

    def forward(m: Net, x: Tensor) -> Tensor:
        words = (x.abs() * 3).long() % 7
        return torch.tanh(m.table(words)) + torch.sigmoid(m.stem(x[..., None])) @ m.table.weight.T @ m.table.weight

    parts = {"table": nn.Embedding(7, 6), "stem": nn.Linear(1, 6)}
    model = randomised(Net(forward, **parts))
    check_exact(model, dead(model, {"stem": [1, 2]}), torch.randn(2, 4).double(), torch.randn(3, 4).double())


def test_a_wrong_rule_of_experts_is_found() -> None:
    """If a neuron went wherever one expert has lost it, the numbers would tell."""
    rule = engine.RULES["bmm"]
    careless = replace(rule, use=lambda node, use: None)
    with pytest.raises(RuleError):
        engine.check_rule(careless)


def test_a_product_written_as_a_layer_runs() -> None:
    """The samples' own layer."""
    assert Product(4, 6, "mm", turned=True)(torch.randn(2, 4)).shape == (2, 6)

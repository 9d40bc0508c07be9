"""Dimensions of heads go, in place of heads: exactly, the same in all heads, with the factor of the scores kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from tests.engine.attentions import Attention, ByFunction, Rewritten, ScaledByWidth, stored, tokens
from tests.engine.exactness import KINDS, check_exact, masked, randomised, relative_error, run
from tests.engine.language import Language, RootMeanSquare, sentence

WIDTH, HEADS = 12, 2


class Projected(nn.Module):
    """Queries, keys and values from layers of their own; the fused op, with the scale that it computes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(WIDTH // HEADS, eps=1e-6), nn.RMSNorm(WIDTH // HEADS, eps=1e-6)

    def product(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what heads put out, all (batch, heads, tokens, entries)."""
        return F.scaled_dot_product_attention(q, k, v)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        q, k, v = (f(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(self.product(q, k, v).transpose(1, 2).flatten(2))


class Einsum(Projected):
    """Both products as equations."""

    def product(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what heads put out."""
        return torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v)


class Scaled(Projected):
    """The fused op, given a scale that is computed from a size, by its name and among others."""

    def product(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what heads put out."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=q.shape[-1] ** -1.0)


class Normed(Projected):
    """The fused op behind norms over the entries of a head."""

    def product(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what heads put out."""
        return F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)


class NormedByHand(Normed):
    """Norms over the entries of a head that are written in single ops."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = RootMeanSquare(WIDTH // HEADS), RootMeanSquare(WIDTH // HEADS)


class Linear(Projected):
    """Attention without a softmax: keys meet values first."""

    def product(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what heads put out."""
        return q @ (k.transpose(-2, -1) @ v)


class Passed(Projected):
    """A call that is handed the scale in a way that cannot be edited."""

    def product(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what heads put out."""
        options = {"is_causal": True}
        return F.scaled_dot_product_attention(q, k, v, **options)


class Fused(nn.Module):
    """`nn.MultiheadAttention`."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention, self.need_weights = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), need_weights

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


BODIES: dict[str, Callable[[], nn.Module]] = {
    "fused projection": lambda: Attention(WIDTH, HEADS),
    "fused projection, unpacked by hand": lambda: Rewritten(WIDTH, HEADS),
    "a scale computed from the width": lambda: ScaledByWidth(WIDTH, HEADS),
    "split by a function": lambda: ByFunction(WIDTH, HEADS),
    "einsum": Einsum,
    "fused": Projected,
    "fused and scaled": Scaled,
    "norms on queries and keys": Normed,
    "norms by hand on queries and keys": NormedByHand,
    "without a softmax": Linear,
    "passed": Passed,
    "multi-head attention": lambda: Fused(False),
    "multi-head attention that puts weights out": lambda: Fused(True),
}


def network(name: str) -> nn.Module:
    """Attention between two layers."""
    torch.manual_seed(0)
    return randomised(nn.Sequential(nn.Linear(5, WIDTH), BODIES[name](), nn.Linear(WIDTH, 3)))


def half_of_each(model: nn.Module, example: Tensor) -> dict[str, dict[str, Tensor]]:
    """Mask the first half of each group."""
    groups = engine.dependency_groups(model, example, rules=engine.HEAD_DIMENSIONS)
    free = [g for g in groups if g.reason is None]
    return engine.group_masks(free, {g.name: torch.arange(g.size) >= g.size // 2 for g in free})


@pytest.mark.parametrize("name", [name for name in BODIES if name != "passed"])
def test_half_of_the_entries_go(name: str) -> None:
    """Half of each head and of the tokens' width: the function stays, and so does the number of heads."""
    model = network(name)
    plan = check_exact(model, half_of_each(model, tokens()), tokens(), tokens(3, 7), rules=engine.HEAD_DIMENSIONS)
    shapes = {n: cut.shape for n, cut in plan.slices.items() if n.startswith("1.") and n.endswith("weight")}
    small = {n: shape for n, shape in shapes.items() if "norm" not in n}
    assert sum(shape[0] * shape[1] for shape in small.values()) == WIDTH * WIDTH  # a quarter of each of the four


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BODIES)
def test_any_masks(name: str, kind: str) -> None:
    """Masks that heads contradict each other in cost nothing but size."""
    model = network(name)
    check_exact(model, KINDS[kind](model, 1), tokens(), tokens(3, 7), rules=engine.HEAD_DIMENSIONS)


def test_one_side_is_enough() -> None:
    """An entry that is zero in the queries is not used in the keys."""
    model, kept = network("fused"), torch.arange(WIDTH) % (WIDTH // HEADS) > 1
    masks = {"1.q": {"weight": kept[:, None].expand(WIDTH, WIDTH), "bias": kept}}
    plan = check_exact(model, masks, tokens(), rules=engine.HEAD_DIMENSIONS)
    assert plan.slices["1.k.weight"].shape == (WIDTH - 2 * HEADS, WIDTH) and "1.v.weight" not in plan.slices


def test_a_constant_entry_is_no_zero() -> None:
    """A query's bias meets all keys, so that its entry stays."""
    model, kept = network("fused"), torch.arange(WIDTH) % (WIDTH // HEADS) > 1
    plan = check_exact(
        model, {"1.q": {"weight": kept[:, None].expand(WIDTH, WIDTH)}}, tokens(), rules=engine.HEAD_DIMENSIONS
    )
    assert "1.k.weight" not in plan.slices


def test_a_scale_that_cannot_be_kept() -> None:
    """Queries and keys stay then, with the line; values go."""
    model = network("passed")
    unsafe = engine.not_safe_to_prune(model, tokens(), rules=engine.HEAD_DIMENSIONS)
    assert list(unsafe) == ["1.q", "1.k"] and "test_dimensions.py:" in unsafe.reasons["1.q"]
    plan = check_exact(model, KINDS["everything"](model, 1), tokens(), rules=engine.HEAD_DIMENSIONS)
    assert plan.slices["1.v.weight"].shape[0] == HEADS and plan.slices["1.q.weight"].shape[0] == WIDTH


@pytest.mark.parametrize("fused", [False, True])
def test_rotary_positions_and_grouped_queries(fused: bool) -> None:
    """Entries that are rotated into each other go together, in all heads and layers that share the angles."""
    torch.manual_seed(0)
    model = randomised(Language(width=32, heads=4, fused=fused))
    masks = half_of_each(model, sentence())
    plan = check_exact(model, masks, sentence(), sentence(3, 7), rules=engine.HEAD_DIMENSIONS)
    assert plan.slices["blocks.0.attention.q_proj.weight"].shape == (16, 16)
    assert plan.slices["blocks.1.attention.k_proj.weight"].shape == (8, 16)


def test_heads_and_then_their_dimensions() -> None:
    """Two compactions, one under each registry, remove both; their plans apply to a model as it was."""
    model = network("multi-head attention")
    heads = torch.arange(3 * WIDTH) % WIDTH >= WIDTH // HEADS
    masks = {"1.attention": {"in_proj_weight": heads[:, None].expand(-1, WIDTH), "in_proj_bias": heads}}
    expected = masked(model, masks)
    first = engine.ModelSpeedup(model, tokens(), masks)
    small = first.speedup_model()
    more = half_of_each(small, tokens())
    expected_small = run(masked(small, more), tokens(3, 7))
    second = engine.ModelSpeedup(small, tokens(), more, rules=engine.HEAD_DIMENSIONS)
    second.speedup_model()
    assert relative_error(expected_small, run(small, tokens(3, 7))) < 1e-9
    assert small[1].attention.in_proj_weight.shape == (3 * WIDTH // HEADS // 2, WIDTH // 2)
    both = stored(first.plan.then(second.plan))
    both.apply(expected)
    assert relative_error(run(small, tokens()), run(expected, tokens())) < 1e-9


def test_the_plan_is_applied_to_a_fresh_model() -> None:
    """From a file, with the scale of the heads as they were made."""
    model = network("multi-head attention")
    masks = half_of_each(model, tokens())
    fresh = masked(model, masks)
    speedup = engine.ModelSpeedup(model, tokens(), masks, rules=engine.HEAD_DIMENSIONS)
    speedup.speedup_model()
    stored(speedup.plan).apply(fresh)
    assert relative_error(run(model, tokens()), run(fresh, tokens())) == 0
    assert fresh[1].attention.head_dim == WIDTH // HEADS // 2 and fresh[1].attention.num_heads == HEADS

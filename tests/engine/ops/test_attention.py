"""Attention and its parts, against running them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.analysis.constants import Constants
from engine.ops.attention import Attention, Biased
from tests.engine.attentions import tokens, without_heads
from tests.engine.exactness import KINDS, check_exact, randomised
from tests.engine.language import Language, sentence
from tests.engine.nets import Net, constants_of, dead, image
from tests.engine.ops.brute import check_labels, check_macs, check_use, counter_knows_attention


def rows(x: Tensor) -> Tensor:
    """Channels before positions: (batch, channels, positions)."""
    return x.flatten(2)


def columns(x: Tensor) -> Tensor:
    """Positions before channels: (batch, positions, channels)."""
    return x.flatten(2).transpose(1, 2)


FIXED = torch.linspace(-1, 1, 128, dtype=torch.float64).view(8, 4, 4)
LABELS: dict[str, tuple[Callable[..., Any], int, int]] = {
    # function, operands, classes that are left free
    "matmul, channels in the batch": (torch.matmul, 2, 8),
    "matmul, one broadcast": (lambda a: a @ a.new_ones(1, 1, 4, 5), 1, 8),
    "matmul, a fixed factor per channel": (lambda a: a @ FIXED, 1, 0),
    "einsum, a fixed factor per channel": (lambda a: torch.einsum("nchw,cwv->nchv", a, FIXED), 1, 0),
    "attention, a fixed mask per head": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=FIXED),
        3,
        0,
    ),
    "matmul, channels as rows": (lambda a, b: rows(a) @ columns(b), 2, 16),
    "matmul, channels contracted": (lambda a, b: columns(a) @ rows(b), 2, 0),
    "bmm, rows and columns": (lambda a, b: torch.bmm(rows(a), columns(b)), 2, 16),
    "bmm, contracted": (lambda a, b: torch.bmm(columns(a), rows(b)), 2, 0),
    "einsum, two channels": (lambda a, b: torch.einsum("nchw,ndhw->ncd", a, b), 2, 16),
    "einsum, one channel": (lambda a, b: torch.einsum("nchw,nchw->nch", a, b), 2, 8),
    "einsum, contracted": (lambda a, b: torch.einsum("nchw,nchw->nhw", a, b), 2, 0),
    "einsum, permuted": (lambda a: torch.einsum("nchw -> hnwc", a), 1, 8),
    "einsum, implicit output": (lambda a, b: torch.einsum("nahw,nbhw", a, b), 2, 16),
    "einsum, three operands": (lambda a, b, c: torch.einsum("nchw,nchw,nchw->nchw", a, b, c), 3, 8),
    "einsum, ellipsis": (lambda a: torch.einsum("n...->n...", a), 1, 8),
    "einsum, ellipsis in front": (lambda a, b: torch.einsum("...h,...h", a, b), 2, 8),
    "matmul, a vector": (lambda a: a @ torch.arange(1, 5, dtype=a.dtype), 1, 8),
    "einsum, diagonal": (lambda a: torch.einsum("nchh->nch", a), 1, 0),
    "softmax over positions": (lambda a: a.softmax(-1), 1, 8),
    "softmax over channels": (lambda a: a.softmax(1), 1, 0),
    "log softmax": (lambda a: F.log_softmax(a, 2), 1, 8),
    "attention, channels as heads": (F.scaled_dot_product_attention, 3, 8),
    "attention, channels as values": (
        lambda q, k, v: F.scaled_dot_product_attention(columns(q), columns(k), columns(v)),
        3,
        8,
    ),
    "attention, channels as tokens": (
        lambda q, k, v: F.scaled_dot_product_attention(rows(q), rows(k), rows(v)),
        3,
        0,
    ),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels(name: str) -> None:
    """What is tied is what depends on a channel; what is contracted or summed over stays whole."""
    f, count, classes = LABELS[name]
    check_labels(f, classes, count)


def zeroed(f: Callable[..., Tensor], count: int, closed: Iterable[int], which: int) -> Tensor:
    """What is known of the output's channels when one stem's are zero."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return f(*(getattr(m, f"stem{k}")(x) for k in range(count)))

    model = randomised(Net(forward, **{f"stem{k}": nn.Conv2d(3, 8, 1) for k in range(count)}))
    masks = dead(model, {f"stem{which}": closed}, bias=True)
    constants: Constants = constants_of(model, image(4), masks)
    return constants.along(constants.graph.outputs[0], 1)


ZEROS: dict[str, tuple[Callable[..., Tensor], int, int, list[int]]] = {
    # function, operands, which has the zeros, where zeros come out
    "matmul, left": (torch.matmul, 2, 0, [1, 3]),
    "matmul, right": (torch.matmul, 2, 1, [1, 3]),
    "matmul, rows": (lambda a, b: rows(a) @ columns(b), 2, 0, [1, 3]),
    "matmul, other rows": (lambda a, b: rows(a) @ columns(b), 2, 1, []),
    "einsum, one of two": (lambda a, b: torch.einsum("nchw,nchw->nchw", a, b), 2, 1, [1, 3]),
    "einsum, contracted": (lambda a, b: torch.einsum("nchw,ndhw->ncd", a, b), 2, 0, [1, 3]),
    "einsum, the other": (lambda a, b: torch.einsum("nchw,ndhw->ncd", a, b), 2, 1, []),
    "attention, values": (F.scaled_dot_product_attention, 3, 2, [1, 3]),
    "attention, queries": (F.scaled_dot_product_attention, 3, 0, []),
    "attention, keys": (F.scaled_dot_product_attention, 3, 1, []),
    "softmax": (lambda a: a.softmax(-1), 1, 0, []),
}


@pytest.mark.parametrize("name", ZEROS)
def test_constants(name: str) -> None:
    """A factor or values of zero give zero; queries of zero average the values; a softmax is never zero."""
    f, count, which, expected = ZEROS[name]
    known = zeroed(f, count, [1, 3], which)
    assert (known == 0).nonzero()[:, 0].tolist() == expected and known[known != 0].isnan().all()


@pytest.mark.parametrize(
    "f",
    [
        lambda m, x: x @ x,
        lambda m, x: F.scaled_dot_product_attention(x, x, x),
        lambda m, x: x.softmax(-1),
        lambda m, x: F.scaled_dot_product_attention(x, x, x, attn_mask=m.bias.weight.view(8, 1, 1)),
    ],
    ids=["matmul", "attention", "softmax", "masked attention"],
)
def test_use(f: Callable[..., Tensor]) -> None:
    """A head that nobody reads is unused, with all that goes into it."""
    check_use(f, [1, 6], [1, 6], bias=nn.Linear(1, 8).double())


def test_use_within_a_softmax() -> None:
    """All that is summed over has an influence on each entry."""
    check_use(lambda x: x.softmax(1), [1, 6], [])


PRODUCTS: dict[str, Callable[[Tensor], Tensor]] = {
    "matmul": lambda x: x @ x.transpose(-2, -1),
    "matmul, broadcast": lambda x: x @ x[:1, :1].transpose(-2, -1),
    "bmm": lambda x: torch.bmm(x[0], x[1].transpose(1, 2)),
    "einsum": lambda x: torch.einsum("nhqd,nhkd->nhqk", x, x),
    "einsum, two letters": lambda x: torch.einsum("nhqd,nhkd->nqk", x, x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x[:, :, :3], x[:, :, :3]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_multiply_accumulates(name: str) -> None:
    """Half of what torch's own counter finds, for products of activations."""

    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return PRODUCTS[name](x)

    if name == "attention" and not counter_knows_attention():
        pytest.skip("this version's counter does not see fused attention on the CPU")
    assert check_macs(Product(), torch.randn(2, 3, 5, 4, dtype=torch.float64)) > 0


def test_multiply_accumulates_with_a_vector() -> None:
    """Each entry of the vector is multiplied once per row."""

    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x[0, 0]

    assert engine.count_flops_params(Product(), torch.randn(2, 3, 4), verbose=False, batch_dim=None)[0] == 2 * 3 * 4


@pytest.mark.parametrize("fused", [True, False])
def test_multiply_accumulates_of_attention(fused: bool) -> None:
    """Projections, scores and averages: ``n t (3 c² + c²) + 2 n t² c``."""
    if fused and not counter_knows_attention():
        pytest.skip("this version's counter does not see fused attention on the CPU")
    x = torch.randn(2, 5, 8)
    assert check_macs(Attention(8, 4, fused), x) == 2 * 5 * 4 * 64 + 2 * 2 * 25 * 8


def test_softmax_counts_in_full_mode() -> None:
    """One operation per element, and none in the default mode."""
    x = torch.randn(2, 3, 4)
    net = nn.Softmax(-1)
    assert engine.count_flops_params(net, x, verbose=False)[0] == 0
    assert engine.count_flops_params(net, x, verbose=False, mode="full")[0] == 12


def net(attention: nn.Module) -> nn.Module:
    """A projection, attention, and two layers behind it."""
    return randomised(nn.Sequential(nn.Linear(5, 8), attention, nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 3)))


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_heads_go_with_their_bias(fused: bool, biased: bool) -> None:
    """A mask with one entry per head loses it with the head; other batches and lengths fit."""
    model = net(Attention(8, 4, fused, biased))
    plan = check_exact(model, {"1.qkv": without_heads(model[1].qkv, [0, 3])}, tokens(), tokens(1, 1), tokens(3, 7))
    assert plan.slices["1.qkv.weight"].shape == (12, 8) and plan.slices["1.out.weight"].shape == (8, 4)
    assert not biased or plan.slices["1.bias"].shape == (2, 1, 1)


@pytest.mark.parametrize("biased", ["heads", "all", "table"])
def test_heads_whose_scores_are_added_to_a_bias(biased: str) -> None:
    """As Bloom writes them: they go with an entry each of the bias, or with none; a fixed table keeps them."""
    bias = {"heads": torch.randn(4, 1, 3), "all": torch.randn(1, 3), "table": torch.randn(4, 1, 3)}[biased]
    model = net(Biased(8, 4, bias))
    if biased == "table":
        del model[1].bias
        model[1].bias = bias.double()
    x = torch.randn(1, 3, 5).double()
    plan = check_exact(model, {"1.qkv": without_heads(model[1].qkv, [0, 3])}, x)
    assert plan.is_empty == (biased == "table")
    assert biased != "heads" or plan.slices["1.bias"].shape == (2, 1, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_between_channels(kind: str) -> None:
    """Cross-covariance attention (XCiT): a head's channels attend to each other; whole heads go, and any masks fit."""
    model = net(Attention(8, 4, fused=False, across=True))
    plan = check_exact(model, {"1.qkv": without_heads(model[1].qkv, [0, 3])}, tokens(), tokens(1, 1), tokens(3, 7))
    assert plan.slices["1.qkv.weight"].shape == (12, 8) and plan.slices["1.out.weight"].shape == (8, 4)
    check_exact(model, KINDS[kind](model, 3), tokens(), tokens(3, 6))


@pytest.mark.parametrize("fused", [True, False])
def test_only_the_values_of_a_head_are_dead(fused: bool) -> None:
    """Then its queries and keys do nothing, and the head goes; a head of dead queries still averages its values."""
    model = net(Attention(8, 4, fused))
    for part, heads in ((2, 3), (0, 4), (1, 4)):
        mask = torch.ones(3, 4, 2)
        mask[part, 1] = 0
        masks = {"1.qkv": {"weight": mask.reshape(-1, 1).expand(24, 8), "bias": mask.reshape(-1)}}
        plan = check_exact(model, masks, tokens(), tokens(3, 7))
        found = plan.slices["1.qkv.weight"].shape[0] if "1.qkv.weight" in plan.slices else 24
        assert found == 6 * heads


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused", [True, False])
def test_any_masks(fused: bool, kind: str) -> None:
    """Channels, elements, columns: the result is exact."""
    model = net(Attention(8, 4, fused, biased=True))
    check_exact(model, KINDS[kind](model, 3), tokens(), tokens(3, 6))


@pytest.mark.parametrize("closed", [[], [0, 1, 2, 3]])
def test_all_heads_or_none(closed: list[int]) -> None:
    """Nothing to do, or one head that has to stay; the result is exact."""
    model = net(Attention(8, 4, fused=True))
    plan = check_exact(model, {"1.qkv": without_heads(model[1].qkv, closed)}, tokens(), tokens(3, 7))
    assert plan.is_empty or "1.qkv.weight" not in plan.slices or plan.slices["1.qkv.weight"].shape[0] >= 6


def grouped_net(shared: int) -> nn.Module:
    """Four heads that share keys and values, between two layers."""

    def forward(m: Net, x: Tensor) -> Tensor:
        q, k, v = (f(m.stem(x)).unflatten(-1, (-1, 2)).transpose(1, 2) for f in (m.q, m.k, m.v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return m.head(y.transpose(1, 2).flatten(2))

    parts = {"q": nn.Linear(8, 8), "k": nn.Linear(8, 8 // shared), "v": nn.Linear(8, 8 // shared)}
    return randomised(Net(forward, stem=nn.Linear(5, 8), **parts, head=nn.Linear(8, 3)))


def test_heads_that_share_keys_and_values_go_together() -> None:
    """Two heads of the queries with the one of keys and values that they share; a query alone stays."""
    model = grouped_net(2)
    assert {g.name: g.size for g in engine.dependency_groups(model, tokens()) if g.reason is None} == {
        "stem": 8,
        "q": 2,
    }
    together = dead(model, {"q": [4, 5, 6, 7], "k": [2, 3], "v": [2, 3]}, bias=True)
    plan = check_exact(model, together, tokens(), tokens(3, 6))
    assert [plan.slices[f"{name}.weight"].shape[0] for name in "qkv"] == [4, 2, 2]
    alone = check_exact(model, dead(model, {"q": [0, 1]}, bias=True), tokens(), tokens(3, 6))
    assert not {"q.bias", "k.bias", "v.bias"} & set(alone.slices)


def test_all_heads_share_one() -> None:
    """Multi-query attention: no head can go without the only one of the keys."""
    model = grouped_net(4)
    assert {g.name for g in engine.dependency_groups(model, tokens()) if g.reason is None and g.size > 1} == {"stem"}
    check_exact(model, dead(model, {"q": [0, 1, 2, 3], "stem": [1]}, bias=True), tokens(), tokens(3, 6))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["groups", "channels", "columns", "elements"])
def test_a_language_model(kind: str, fused: bool) -> None:
    """Grouped queries under rotary positions: heads that share go with their keys, neurons with their gates."""
    model = randomised(Language(fused=fused))
    groups = [g for g in engine.dependency_groups(model, sentence()) if g.reason is None]
    sizes = {g.name: g.size for g in groups}
    assert sizes["blocks.0.attention.q_proj"] == 2 and sizes["blocks.1.gate"] == 12 and sizes["embed"] == 16
    masks = KINDS[kind](model, 1) if kind != "groups" else engine.group_masks(groups, halves(groups))
    plan = check_exact(model, masks, sentence(), sentence(1, 9, seed=1))
    if kind == "groups":
        assert plan.slices["blocks.0.attention.q_proj.weight"].shape[0] == 8
        assert plan.slices["blocks.0.attention.k_proj.weight"].shape[0] == 4
        assert plan.slices["blocks.1.down.weight"].shape == (8, 6) and plan.slices["embed.weight"].shape == (11, 8)


@pytest.mark.parametrize("repaired", [True, False])
def test_a_language_model_whose_table_is_tied_to_its_head(repaired: bool) -> None:
    """The residual stream goes: the table puts its columns out, though the head reads them."""
    model = Language()
    model.head.weight = model.embed.weight
    model = randomised(model)
    groups = [g for g in engine.dependency_groups(model, sentence()) if g.reason is None]
    masks = engine.group_masks(groups, halves(groups))
    if repaired:  # from what one layer of each group says
        masks = {g.layers[-1]: {"weight": masks[g.layers[-1]]["weight"]} for g in groups}
        masks = engine.fix_mask_conflict(masks, model, sentence(), "intersection")
    plan = check_exact(model, masks, sentence(), sentence(1, 9, seed=1))
    assert plan.slices["embed.weight"].shape == (11, 8)


def halves(groups: Iterable[engine.Group]) -> dict[str, Tensor]:
    """Keep every other unit."""
    return {g.name: torch.arange(g.size) % 2 == 0 for g in groups}


@pytest.mark.parametrize("causal", [True, False])
def test_a_mask_over_tokens(causal: bool) -> None:
    """Which tokens are seen does not touch heads, be it a flag or a tensor."""

    def forward(m: Net, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in (m.q(x), m.k(x), m.v(x)))
        seen = None if causal else torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal)
        return m.head(y.transpose(1, 2).flatten(2))

    parts = {name: nn.Linear(5, 8) for name in "qkv"}
    model = randomised(Net(forward, **parts, head=nn.Linear(8, 3)))
    masks = dead(model, {name: [2, 3, 6, 7] for name in "qkv"}, bias=True)
    plan = check_exact(model, masks, tokens(), tokens(3, 6))
    assert {name: plan.slices[f"{name}.weight"].shape[0] for name in "qkv"} == {"q": 4, "k": 4, "v": 4}


@pytest.mark.parametrize("fast", [True, False])
def test_attention_of_torch_stays_whole(fast: bool) -> None:
    """Sizes in torch's own code are not pinned: nothing inside goes, what is around it does, exactly."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head(torch.tanh(m.inner(m.attention(x, x, x, need_weights=not fast)[0])))

    attention = nn.MultiheadAttention(8, 4, batch_first=True)
    model = randomised(
        Net(forward, stem=nn.Linear(5, 8), attention=attention, inner=nn.Linear(8, 6), head=nn.Linear(6, 3))
    )
    masks = dead(model, {"stem": [0, 1], "inner": [0, 1]}, bias=True)
    plan = check_exact(model, masks, tokens(), tokens(3, 6))
    assert plan.slices["inner.weight"].shape[0] == 4 and "attention.out_proj.weight" not in plan.slices


def test_vectors_are_frozen() -> None:
    """A product with a vector is not attention: what goes in stays whole, and the result is exact."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head(x * (x @ m.key.weight[0])[..., None])

    model = randomised(Net(forward, stem=nn.Linear(5, 8), key=nn.Linear(8, 1), head=nn.Linear(8, 3)))
    plan = check_exact(model, dead(model, {"stem": [0, 1]}, bias=True), tokens(), tokens(3, 6))
    assert "stem.weight" not in plan.slices


def test_an_einsum_with_a_parameter() -> None:
    """A stored factor loses what its partner loses; what is contracted stays whole."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
            self.scale = nn.Parameter(torch.randn(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.einsum("ntc,ck->ntc", self.stem(x), self.scale))

    model = randomised(Mixed())
    masks = dead(model, {"stem": [0, 1]}, bias=True)
    masks["head"] = {"weight": torch.ones(3, 8).index_fill(1, torch.tensor([0, 1]), 0)}
    plan = check_exact(model, masks, tokens(), tokens(3, 6))
    assert plan.slices["stem.weight"].shape[0] == 6 and plan.slices["scale"].shape == (6, 4)


def test_the_sample_itself() -> None:
    """With one set of weights the fused form is the one by hand, with and without biases."""
    for biased in (True, False):
        fused = Attention(8, 4, fused=True, biased=biased).double()
        by_hand = copy.deepcopy(fused)
        by_hand.fused = False
        x = torch.randn(2, 5, 8, dtype=torch.float64)
        torch.testing.assert_close(fused(x), by_hand(x), rtol=1e-9, atol=1e-12)

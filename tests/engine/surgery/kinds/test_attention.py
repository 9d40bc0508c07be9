"""Multi-head attention without fixed sizes: the same numbers as torch's module, and heads and width that can go."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.surgery.kinds.attention import Headwise, HeadwiseAttention, headwise, shape_free
from engine.surgery.spans import weights_of
from tests.engine.exactness import check_exact, randomised, relative_error, run

MASKS = ["none", "boolean", "additive", "per head", "padding", "causal", "causal and padding"]
FORMS = [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 6}, {"vdim": 5, "bias": False}]
FORMS += [{"kdim": 6, "vdim": 5, "add_bias_kv": True, "add_zero_attn": True}]


def mask_arguments(kind: str, batch: int, heads: int, queries: int, keys: int) -> dict[str, Any]:
    """Return the mask arguments of a call."""
    if kind == "boolean":
        closed = torch.rand(queries, keys) < 0.3
        closed[:, 0] = False
        return {"attn_mask": closed}
    if kind == "additive":
        return {"attn_mask": torch.randn(queries, keys).double()}
    if kind == "per head":
        return {"attn_mask": torch.randn(batch * heads, queries, keys).double()}
    found: dict[str, Any] = {}
    if "causal" in kind:
        found |= {"attn_mask": torch.ones(queries, keys, dtype=torch.bool).triu(1), "is_causal": True}
    if "padding" in kind:
        closed = torch.zeros(batch, keys, dtype=torch.bool)
        closed[0, -1] = True
        found |= {"key_padding_mask": closed}
    return found


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("batch_first", "weights", "average"), list(itertools.product((True, False), repeat=3)))
@pytest.mark.parametrize("cross", [True, False])
def test_it_computes_what_torchs_module_computes(
    mask: str, batch_first: bool, weights: bool, average: bool, cross: bool
) -> None:
    """Outputs and attention weights agree for every kind of call."""
    torch.manual_seed(0)
    plain = randomised(nn.MultiheadAttention(8, 2, batch_first=batch_first))
    queries, keys = 4, 5 if cross else 4
    q = torch.randn(3, queries, 8).double()
    k = torch.randn(3, keys, 8).double() if cross else q
    v = torch.randn(3, keys, 8).double() if cross else q
    if not batch_first:
        flipped = q.transpose(0, 1)
        q, k, v = (flipped, k.transpose(0, 1), v.transpose(0, 1)) if cross else (flipped, flipped, flipped)
    more = mask_arguments(mask, 3, 2, queries, keys)
    free = copy.deepcopy(plain)
    with headwise(free), torch.no_grad():
        found = [m(q, k, v, need_weights=weights, average_attn_weights=average, **more) for m in (plain, free)]
    assert relative_error([found[0][0]], [found[1][0]]) <= 1e-12
    assert (found[0][1] is None) == (found[1][1] is None)
    if weights:
        assert relative_error([found[0][1]], [found[1][1]]) <= 1e-12


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_keys_of_other_widths_and_more_keys(form: dict[str, Any], weights: bool, mask: str) -> None:
    """Attention with other widths of keys and values, learned keys and a key of zeros computes what torch's does."""
    torch.manual_seed(0)
    plain = randomised(nn.MultiheadAttention(8, 2, batch_first=True, **form))
    sizes = (8, form.get("kdim", 8), form.get("vdim", 8))
    q, k, v = (torch.randn(3, n, size).double() for n, size in zip((4, 5, 5), sizes, strict=True))
    more = mask_arguments(mask, 3, 2, 4, 5)
    with torch.no_grad():
        expected = plain(q, k, v, need_weights=weights, **more)
        with headwise(plain):
            found = plain(q, k, v, need_weights=weights, **more)
    for one, other in zip(expected, found, strict=True):
        assert (one is None and other is None) or relative_error([one], [other]) <= 1e-12


class Crossed(nn.Module):
    """Attention from an embedding to features of another width."""

    def __init__(self, form: dict[str, Any]) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.keys, self.values = nn.Linear(5, form.get("kdim", 8)), nn.Linear(5, form.get("vdim", 8))
        self.attend = nn.MultiheadAttention(8, 4, batch_first=True, **form)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, (batch, tokens, 3)."""
        y = self.embed(x)
        scores: Tensor = self.head(y + self.attend(y, self.keys(x), self.values(x), need_weights=False)[0])
        return scores


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_their_heads_and_widths_go(form: dict[str, Any]) -> None:
    """Half of the heads, of the queries' width and of the keys' and values' widths go, and the function stays."""
    torch.manual_seed(0)
    model = randomised(Crossed(form))
    x = torch.randn(2, 4, 5).double()
    plan = check_exact(model, group_wise(model, x), x, torch.randn(3, 7, 5).double())
    small = plan.apply(copy.deepcopy(model)).attend
    assert (small.num_heads, small.embed_dim) == (2, 4)
    assert (small.kdim, small.vdim) == tuple(-(-form.get(name, 8) // 2) for name in ("kdim", "vdim"))
    assert small.bias_k is None or small.bias_k.shape == (1, 1, 4)
    assert torch.jit.script(small)


def test_heads_go_where_nobody_reads_the_weights() -> None:
    """Their mean over the heads is computed by default, and then dropped."""

    class Pooled(Crossed):
        def forward(self, x: Tensor) -> Tensor:
            y = self.embed(x)
            scores: Tensor = self.head(self.attend(y[:, :1], y, y)[0])
            return scores

    torch.manual_seed(0)
    model, x = randomised(Pooled({})), torch.randn(2, 4, 5).double()
    plan = check_exact(model, group_wise(model, x), x, torch.randn(3, 7, 5).double())
    assert plan.apply(copy.deepcopy(model)).attend.num_heads == 2


def test_an_exchanged_one_is_recorded_like_that_of_torch() -> None:
    """A probability of zero in a layer of torch is no switch that somebody may set; it is none in what replaces it."""

    class Asks(Crossed):
        def forward(self, x: Tensor) -> Tensor:
            y = self.embed(x)
            scores: Tensor = self.head(y + self.attend(y, y, y)[0])
            return scores.relu() if self.training else scores

    torch.manual_seed(0)
    model, x = randomised(Asks({})), torch.randn(2, 4, 5).double()
    plan = check_exact(model, group_wise(model, x), x, torch.randn(3, 7, 5).double())
    assert plan.apply(copy.deepcopy(model)).attend.num_heads == 2


def test_an_unbatched_call() -> None:
    """A sequence without a batch dimension comes back without one."""
    plain = randomised(nn.MultiheadAttention(8, 2))
    x = torch.randn(4, 8).double()
    with torch.no_grad():
        expected = plain(x, x, x)
        with headwise(plain):
            found = plain(x, x, x)
    assert all(relative_error([a], [b]) <= 1e-12 for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("mask", ["none", "per head", "padding"])
def test_an_empty_batch(mask: str) -> None:
    """A batch without samples comes back as one: its masks have no entries to tell a size from."""
    plain = randomised(nn.MultiheadAttention(8, 2, batch_first=True))
    x = torch.zeros(0, 4, 8).double()
    more = {"key_padding_mask": torch.zeros(0, 4, dtype=torch.bool)} if mask == "padding" else {}
    more |= {"attn_mask": torch.zeros(0, 4, 4).double()} if mask == "per head" else {}
    results = [plain(x, x, x, **more)]  # with gradients, as torch has another path without
    with headwise(plain):
        results.append(plain(x, x, x, **more))
    assert [[t.shape for t in result] for result in results] == [[(0, 4, 8), (0, 4, 4)]] * 2


def test_what_cannot_take_the_form() -> None:
    """A subclass may have code of its own, and is left as it is."""
    assert shape_free(nn.MultiheadAttention(8, 2))
    assert not shape_free(type("Mine", (nn.MultiheadAttention,), {})(8, 2))


def test_the_class_comes_back() -> None:
    """After recording, the module is torch's own again, also when the body fails."""
    model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    with pytest.raises(KeyError), headwise(model) as names:
        assert names == {"1.self_attn"} and type(model[1].self_attn) is HeadwiseAttention
        raise KeyError
    engine.trace(model, torch.randn(2, 4, 8))
    assert type(model[1].self_attn) is nn.MultiheadAttention


class Encoder(nn.Module):
    """Two encoder layers between an embedding and a head."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        layer = nn.TransformerEncoderLayer(8, 4, 12, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, (batch, 3)."""
        scores: Tensor = self.head(self.layers(self.embed(x)).mean(1))
        return scores


def group_wise(model: nn.Module, x: Tensor, names: str = "") -> dict[str, dict[str, Tensor]]:
    """Mask half of the units of each group whose name holds ``names``."""
    groups = [g for g in engine.dependency_groups(model, x) if g.reason is None and names in g.name]
    return engine.group_masks(groups, {g.name: torch.arange(g.size) % 2 == 0 for g in groups})


@pytest.mark.parametrize("norm_first", [True, False])
def test_heads_neurons_and_width_go(norm_first: bool) -> None:
    """An encoder loses half of its heads, neurons and residual stream and computes what the masked one computed."""
    torch.manual_seed(0)
    model = randomised(Encoder(norm_first))
    x = torch.randn(2, 4, 5).double()
    plan = check_exact(model, group_wise(model, x), x, torch.randn(3, 7, 5).double())
    assert [e.module for e in plan.of(Headwise)] == ["layers.layers.0.self_attn", "layers.layers.1.self_attn"]
    small = plan.apply(copy.deepcopy(model))
    attention = small.layers.layers[0].self_attn
    assert (attention.num_heads, attention.embed_dim, attention.in_proj_weight.shape) == (2, 4, (12, 4))
    assert set(weights_of(small)) == set(model.state_dict())


def test_only_heads_go() -> None:
    """Heads alone, at full width."""
    torch.manual_seed(0)
    model = randomised(Encoder(True))
    x = torch.randn(2, 4, 5).double()
    plan = check_exact(model, group_wise(model, x, "self_attn"), x)
    assert plan.slices["layers.layers.0.self_attn.in_proj_weight"].shape == (12, 8)


def test_a_plan_survives_and_is_refused_elsewhere() -> None:
    """The plan gives a fresh model the same small attention; a model without such a module is refused, unchanged."""
    torch.manual_seed(0)
    model = randomised(Encoder(True))
    x = torch.randn(2, 4, 5).double()
    speedup = engine.ModelSpeedup(copy.deepcopy(model), x, group_wise(model, x))
    small = speedup.speedup_model()
    fresh = engine.Plan.from_state_dict(speedup.plan.structure().state_dict()).apply(Encoder(True).double())
    fresh.load_state_dict(small.state_dict())
    assert relative_error(run(small, x), run(fresh, x)) == 0.0
    other = Encoder(True)
    other.layers.layers[0].self_attn.__class__ = type("Mine", (nn.MultiheadAttention,), {})
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(engine.errors.PlanError, match="self_attn"):
        speedup.plan.apply(other)
    assert all(torch.equal(before[k], v) for k, v in other.state_dict().items())

"""Plans whose numbers do not follow from what they narrow: sealed again as an attacker can, and refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import CheckpointError, PlanError
from engine.files.checkpoint import KEY, content_of, load_compacted_state, seal
from tests.engine.attentions import without_heads
from tests.engine.exactness import randomised
from tests.engine.files.hostile import state_of


class Heads(nn.Module):
    """Attention over heads whose number is an attribute; where ``x`` has more dimensions, it cannot be pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = 4, nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens; the first size of the view is a product with the batch."""
        q, k, v = (self.parted(part) for part in self.qkv(x).chunk(3, -1))
        y = (q @ k.transpose(-2, -1) / 2).softmax(-1) @ v
        return self.out(y.reshape(len(x), self.heads, x.shape[1], -1).transpose(1, 2).flatten(2))

    def parted(self, x: Tensor) -> Tensor:
        """Return the parts of the heads, ``(batch * heads, tokens, size)``."""
        b, n, d = x.shape
        return x.view(b, n, self.heads, d // self.heads).transpose(1, 2).reshape(b * self.heads, n, -1)


class Net(nn.Module):
    """Numbers of all kinds: of convolutions with groups, norms, recurrent layers, attention, and the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.batch, self.group, self.mixing = nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 1)
        self.first, self.second, self.wide = Heads(), Heads(), nn.MultiheadAttention(8, 4, batch_first=True)
        self.layer, self.recurrent, self.last = nn.LayerNorm(8), nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        x = self.mixing(self.group(self.batch(self.depthwise(self.stem(x)))).relu()).flatten(2).transpose(1, 2)
        x = self.second(self.first(x))
        x = self.layer(self.wide(x, x, x, need_weights=False)[0])
        return self.last(self.recurrent(x)[0])


@functools.cache
def checkpoint() -> dict[str, Any]:
    """What the network's compaction leaves, with half of most things removed, and the second attention whole."""
    model, half = randomised(Net()), torch.arange(8) % 4 < 2
    heads, units = without_heads(nn.Linear(8, 24), [1, 2]), torch.arange(24) % 6 > 2
    masks = {
        "stem": {"weight": half.view(8, 1, 1, 1).expand(8, 3, 1, 1), "bias": half},
        "depthwise": {"weight": half.view(8, 1, 1, 1).expand(8, 1, 3, 3), "bias": half},
        "batch": {"weight": half, "bias": half},
        "group": {"weight": half, "bias": half},
        "first.qkv": heads,
        "wide": {"in_proj_weight": heads["weight"], "in_proj_bias": heads["bias"]},
        "recurrent": {"weight_ih_l0": units.view(24, 1).expand(24, 8), "bias_ih_l0": units, "bias_hh_l0": units},
    }
    masks["recurrent"]["weight_hh_l0"] = units.view(24, 1).expand(24, 6)
    engine.ModelSpeedup(model, torch.randn(2, 3, 3, 3).double(), masks).speedup_model()
    return {"state_dict": model.state_dict(), KEY: content_of(model)}


def loaded(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> nn.Module:
    """The network after a file with a changed plan, which is sealed again, was loaded into it."""
    content = copy.deepcopy(checkpoint())
    change(content[KEY]["compacted"][""]["plans"][0])
    torch.save(seal(content), tmp_path / "sealed.ckpt")
    model = Net().double()
    before = state_of(model)
    try:
        return load_compacted_state(model, tmp_path / "sealed.ckpt")
    except CheckpointError:
        after = state_of(model)
        assert all(torch.equal(v, after[k]) if isinstance(v, Tensor) else v == after[k] for k, v in before.items())
        raise


def exchange(plan: Mapping[str, Any], kind: str) -> Any:
    """The exchange of a kind in a stored plan."""
    return next(own for own in plan["exchanges"] if own["kind"] == kind)


def test_the_plan_has_every_kind_of_number(tmp_path: Path) -> None:
    """And loads as it is."""
    plan = checkpoint()[KEY]["compacted"][""]["plans"][0]
    assert {"stem", "depthwise", "batch", "recurrent", "wide", "first"} <= plan["attributes"].keys()
    assert {own["kind"] for own in plan["exchanges"]} >= {"norm", "attention"}
    small = loaded(tmp_path, lambda plan: None)
    assert small.first.heads == 2 and small.second.heads == 4 and small.depthwise.groups < 8


ATTACKS = [
    ("second", "heads", 2),  # over weights that stay whole
    ("first", "heads", 3),
    ("first", "heads", 1),
    ("stem", "out_channels", 3),
    ("stem", "in_channels", 1),
    ("depthwise", "groups", 2),
    ("depthwise", "groups", 1),
    ("depthwise", "in_channels", 2),
    ("batch", "num_features", 2),
    ("recurrent", "hidden_size", 2),
    ("recurrent", "input_size", 4),
    ("last", "out_features", 1),
    ("last", "in_features", 1),
    ("wide", "num_heads", 1),
    ("wide", "head_dim", 1),
    ("wide", "num_heads", None),
    ("recurrent", "hidden_size", None),
    ("depthwise", "groups", None),
    ("mixing", "groups", 0),
    ("second.qkv", "out_features", 12),
]


@pytest.mark.parametrize(("module", "name", "value"), ATTACKS)
def test_other_numbers_over_the_same_weights(tmp_path: Path, module: str, name: str, value: int | None) -> None:
    """Are refused by the names of module and number; nothing is changed."""

    def change(plan: dict[str, Any]) -> None:
        own = plan["attributes"].setdefault(module, {})
        own.pop(name, None)
        if value is not None:
            own[name] = value

    with pytest.raises(CheckpointError, match=rf"(?s)`{name}` of '{module}'|'{module}'.*`{name}`|kept.*{module}"):
        loaded(tmp_path, change)


@pytest.mark.parametrize("change", [{"size": 9}, {"kept": 3}, {"kept": 7}, {"groups": 4}], ids=str)
def test_norms_that_keep_something_else(tmp_path: Path, change: dict[str, int]) -> None:
    """Than their weights."""
    with pytest.raises(CheckpointError, match="group|layer"):
        loaded(tmp_path, lambda plan: exchange(plan, "norm").update(change))


def test_a_number_that_counts_nothing_in_the_model() -> None:
    """Is none that a compaction sets."""
    net = Net()
    net.other = 7  # type: ignore[assignment]
    with pytest.raises(PlanError, match=r"`other` of '' \(Net\) to 3"):
        engine.Plan(attributes={"": {"other": 3}}).apply(net)
    assert net.other == 7

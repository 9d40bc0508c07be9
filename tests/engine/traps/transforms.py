"""Traps: functions that `torch.func` transforms, which hand the code tensors that stand for others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from engine.running import provenance
from tests.engine.traps.padding import trap
from tests.engine.traps.trap import Ablation

__all__ = ["ABLATIONS", "TRAPS"]


def _by_sample(x: Tensor) -> Tensor:
    return torch.vmap(lambda one: one.relu() * 2)(x)


def _by_channel(x: Tensor) -> Tensor:
    return torch.vmap(lambda one: one * one.sigmoid(), in_dims=1, out_dims=1)(x)


def _counting(x: Tensor) -> Tensor:
    return torch.vmap(lambda one: one / one.shape[0])(x)


def _average(x: Tensor) -> Tensor:
    return torch.vmap(lambda one: one - one.mean(0, keepdim=True))(x)


def _masked(x: Tensor) -> Tensor:
    allowed = x.detach().abs().sum((1, 2)) >= 0

    def mask(sample: Tensor, column: Tensor) -> Tensor:
        return allowed[sample, column] & (column < 5)

    with TransformGetItemToIndex():
        columns = torch.vmap(torch.vmap(mask, (None, 0)), (0, None))
        keep = columns(torch.arange(x.shape[0]), torch.ones_like(x[0, 0, 0]).cumsum(0).long() - 1)
    return x * keep[:, None, None]


def _after_a_read(x: Tensor) -> Tensor:
    width = int((x.detach().sum() > 1e9).item()) + 5
    columns = torch.ones_like(x[0, 0, 0]).cumsum(0).long() - 1
    with TransformGetItemToIndex():
        keep = torch.vmap(lambda column: (column < width).to(column.device))(columns)
    return x * keep


TRAPS = [
    trap("a function of one sample", "torch.func: vmap(f)(x)", _by_sample),
    trap("a function of one channel", "torch.func: vmap(f, in_dims=1)(x)", _by_channel),
    trap("a function of one sample counts channels", "torch.func: vmap(lambda x: x / x.shape[0])", _counting,
         shrinks=False, refused="differs from the masked one"),
    trap("a function of one sample averages over channels", "torch.func: vmap(lambda x: x - x.mean(0))", _average,
         shrinks=False, kept="mean", refused="mean"),
    trap("a mask by position", "transformers masking_utils.py sdpa_mask: _vmap_for_bhqkv(mask_function)", _masked,
         shrinks=False),
    trap("a function of numbers that were read", "transformers masking_utils.py: kv_idx > q_idx - sliding_window",
         _after_a_read, shrinks=False, kept="Nothing was removed"),
]  # fmt: skip


def _as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "_unwrapped", lambda tensor: tensor)


ABLATIONS = [
    Ablation("a tensor that stands for another is that one", _as_it_comes, "a function of numbers that were read"),
]

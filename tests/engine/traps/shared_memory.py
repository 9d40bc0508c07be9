"""Traps: parameters and buffers that are different objects, and share memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine.speedup
from engine.compaction.compact import Compaction
from tests.engine.exactness import Masks
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS"]


class _Tied(nn.Module):
    """Layers whose weights are tied through ``data``; copies are tied in the same way."""

    def __init__(self, tie: Callable[[Any], None], between: bool) -> None:
        super().__init__()
        self.tie, self.between = tie, between
        self.encoder, self.decoder = nn.Linear(5, 8), nn.Linear(8, 5)
        self.middle = nn.Linear(8, 8) if between else nn.Identity()
        self.double()
        tie(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Tied:
        other = _Tied(self.tie, self.between)
        other.load_state_dict(self.state_dict())
        return other

    def forward(self, x: Tensor) -> Tensor:
        y = self.middle(self.encoder(x).relu()).relu()
        return self.decoder(y)  # type: ignore[no-any-return]


def _transposed(net: _Tied) -> None:
    net.decoder.weight.data = net.encoder.weight.data.t()


def _kept_beside(net: _Tied) -> None:
    net.register_buffer("shadow", net.encoder.weight.data)


def _in_one_block(net: _Tied) -> None:
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    start = 0
    for parameter in net.parameters():
        parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    net.flat = flat


def _halves(model: nn.Module, seed: int) -> Masks:
    """Mask half of the encoder's units, and what is the same memory in the decoder; and other units between."""
    stays = torch.arange(8) > 3
    masks = {"encoder": {"weight": stays[:, None].expand(8, 5).double(), "bias": stays.double()}}
    masks["decoder"] = {"weight": stays.expand(5, 8).double()}
    if isinstance(model.middle, nn.Linear):
        other = (torch.arange(8) % 2).double()
        masks["middle"] = {"weight": other[:, None].expand(8, 8), "bias": other}
    return masks


def _stepped(model: nn.Module) -> Any:
    """Train for some steps with plain SGD, and return what the model computes afterwards."""
    optimizer, x = torch.optim.SGD(model.parameters(), 0.05), torch.randn(4, 5, dtype=torch.float64)
    for _ in range(3):
        optimizer.zero_grad()
        model.train()(x).square().mean().backward()
        optimizer.step()
    return model.eval()(x)


def _steps(model: nn.Module) -> Any:
    torch.manual_seed(3)
    return _stepped(model)


def _trap(name: str, source: str, tie: Callable[[Any], None], between: bool = False, **more: Any) -> Trap:
    uses: Sequence[Use] = [once(3, 5), once(1, 5, seed=2)]
    return Trap(
        name,
        source,
        lambda: _Tied(tie, between),
        lambda _: torch.zeros(2, 5).double(),
        uses,
        trains=[_steps],
        shrinks=True,
        masks=_halves,
        **more,
    )


TRAPS = [
    _trap("an autoencoder tied through data", "decoder.weight.data = encoder.weight.data.t()", _transposed),
    _trap(
        "an autoencoder tied through data with a layer between",
        "decoder.weight.data = encoder.weight.data.t()",
        _transposed,
        between=True,
        kept="share memory",
        exact_in_train=False,
    ),
    _trap(
        "a weight beside its memory",
        "register_buffer('shadow', weight.data)",
        _kept_beside,
        between=True,
        kept="share memory",
        exact_in_train=False,
    ),
    _trap(
        "parameters in one block",
        "flat master parameters, apex",
        _in_one_block,
        kept="share memory",
        exact_in_train=False,
    ),
]


def _no_sharing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Compaction, "_share", lambda self: None)


def _no_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine.speedup, "separated", lambda *args: [])


ABLATIONS = [
    Ablation("tensors share memory again", _no_sharing, "an autoencoder tied through data", repaired=True),
    Ablation(
        "tensors that no longer share memory",
        _no_check,
        "an autoencoder tied through data with a layer between",
        repaired=True,
    ),
]

"""Traps: what a call finds that an earlier one, or somebody outside, has left."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.alternatives import mutable_state
from engine.alternatives.mutable_state import MutableState
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS"]


def _noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _zeros(*shape: int) -> Callable[[nn.Module], Tensor]:
    return lambda model: torch.zeros(shape, dtype=torch.float64)


def _calls(*shapes: tuple[int, ...], train: bool = False) -> Use:
    """Return a use that calls the network several times in a row, and looks at what is left."""

    def use(model: nn.Module) -> Any:
        model.train(train)
        with torch.no_grad():
            outputs = [model(_noise(*shape, seed=n)) for n, shape in enumerate(shapes)]
        model.eval()
        return outputs

    return use


def _after(change: Callable[[nn.Module], None], *shape: int) -> Use:
    """Return a use that changes the network's state first, as a callback would."""

    def use(model: nn.Module) -> Any:
        with torch.no_grad():
            change(model)
        return once(*shape)(model)

    return use


class _Net(nn.Module):
    """A stem, a body and a head; what lies between is the trap's."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.inner, self.head = nn.Conv2d(width, width, 1), nn.Conv2d(width, 4, 1)

    def branch(self, x: Tensor) -> Tensor:
        """Return what a gate closes."""
        return self.inner(self.body(x).relu())  # type: ignore[no-any-return]


class _Gate(_Net):
    """A residual branch behind a buffer that is zero at first."""

    def __init__(self, value: float = 0.0, shape: tuple[int, ...] = (1,), persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("alpha", torch.full(shape, value), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        return self.head(y + self.alpha * self.branch(y))  # type: ignore[no-any-return]


def _open(model: nn.Module) -> None:
    model.alpha.fill_(0.7)  # type: ignore[union-attr, operator]


class _Fade(nn.Module):
    """Two resolutions blended by a coefficient."""

    def __init__(self) -> None:
        super().__init__()
        self.old, self.new, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        self.register_buffer("fade", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.lerp(self.old(x).relu(), self.new(x).relu(), self.fade))  # type: ignore[no-any-return]


class _Shift(_Net):
    """A scale that is one and a shift that is zero, until statistics of the data are known."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1, 8, 1, 1))
        self.register_buffer("shift", torch.zeros(1, 8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x).relu() * self.scale + self.shift).relu())  # type: ignore[no-any-return]

    def calibrate(self, scale: float) -> None:
        """Set statistics."""
        self.scale.mul_(scale)
        self.shift.sub_(scale)


class _Codebook(nn.Module):
    """A codebook that a training step moves."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(5, 8), nn.Linear(4, 3)
        self.project = nn.Linear(8, 4)
        self.register_buffer("codes", torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
        self.register_buffer("counts", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        z = self.project(self.encoder(x).relu())
        picked = F.one_hot(torch.cdist(z, self.codes).argmin(-1), 6).to(z)
        if self.training:
            self.counts.mul_(0.9).add_(picked.sum(0), alpha=0.1)
            self.codes.lerp_(picked.T @ z / picked.sum(0).clamp(min=1)[:, None], 0.1)
        return self.decoder(picked @ self.codes)  # type: ignore[no-any-return]


class _Queue(nn.Module):
    """Keys of earlier batches as negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.project = nn.Linear(5, 8), nn.Linear(8, 4)
        self.register_buffer("queue", F.normalize(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        q = F.normalize(self.project(self.body(x).relu()), dim=1)
        logits = q @ self.queue.clone().detach()
        at = int(self.pointer)
        self.queue[:, at : at + 2] = q[:2].T
        self.pointer[0] = (at + 2) % 6
        return logits  # type: ignore[no-any-return]


class _Hidden(nn.Module):
    """The last hidden state is where the next sequence starts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Linear(3, 8), nn.GRUCell(8, 6), nn.Linear(6, 2)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.state is None:
            self.state = x.new_zeros(x.size(0), 6)
        self.state = self.cell(self.embed(x).relu(), self.state)
        return self.head(self.state)  # type: ignore[no-any-return]


class _Streaming(nn.Module):
    """A causal convolution that keeps the end of the last piece."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.stem, self.conv, self.head = nn.Conv1d(3, 8, 1), nn.Conv1d(8, 6, 3), nn.Conv1d(6, 2, 1)
        self.how, self.past = how, None
        self.pieces: dict[str, Tensor] = {}
        self.line: deque[Tensor] = deque(maxlen=1)

    def _last(self, x: Tensor) -> Tensor:
        if self.how == "attribute":
            return x.new_zeros(x.size(0), 8, 2) if self.past is None else self.past
        if self.how == "dict":
            return self.pieces.get("conv", x.new_zeros(x.size(0), 8, 2))
        return self.line[-1] if self.line else x.new_zeros(x.size(0), 8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        y = torch.cat([self._last(y), y], 2)
        if self.how == "attribute":
            self.past = y[..., -2:]  # type: ignore[assignment]
        elif self.how == "dict":
            self.pieces["conv"] = y[..., -2:]
        else:
            self.line.append(y[..., -2:])
        return self.head(self.conv(y).relu())  # type: ignore[no-any-return]


class _KeyValues:
    """Keys and values of a layer."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append, and return all."""
        self.keys = k if self.keys is None else torch.cat([self.keys, k], 1)
        self.values = v if self.values is None else torch.cat([self.values, v], 1)  # type: ignore[list-item]
        return self.keys, self.values


class _Attention(nn.Module):
    """One head that attends to earlier calls as well."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(6, 4)
        self.head = nn.Linear(4, 2)
        self.cache = _KeyValues()

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.cache.update(self.k(x), self.v(x))
        scores = torch.softmax(self.q(x) @ k.mT, -1)
        return self.head(self.out(scores @ v).relu())  # type: ignore[no-any-return]


class _Memory(nn.Module):
    """Hidden states of the last segment are read by the next."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.mix, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.mems: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inp(x).tanh()
        seen = torch.cat([*self.mems, hidden], 1)
        self.mems[:] = [hidden]
        return self.head(self.mix(seen).relu().mean(1))  # type: ignore[no-any-return]


class _Normaliser(nn.Module):
    """Observations are whitened by what was seen so far."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 2)
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("var", torch.ones(5))
        self.register_buffer("count", torch.tensor(1e-4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            delta, total = x.mean(0) - self.mean, self.count + len(x)
            self.mean = self.mean + delta * len(x) / total
            self.var = self.var * 0.9 + 0.1 * x.var(0)
            self.count = total
        return self.head(self.body((x - self.mean) / (self.var + 1e-8).sqrt()).relu())  # type: ignore[no-any-return]


class _Whitening(nn.Module):
    """Features are centred by a mean that eval mode moves as well."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.next, self.head = nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(6, 2)
        self.register_buffer("center", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        out = self.head(self.next((y - self.center).tanh()).relu())
        self.center.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return out  # type: ignore[no-any-return]


class _ActNorm(nn.Module):
    """Scale and shift come from the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.next, self.head = nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(6, 2)
        self.register_buffer("loc", torch.zeros(8))
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.initialized.item() == 0:
            self.loc.copy_(-y.mean(0))
            self.scale.copy_(1 / (y.std(0) + 1e-6))
            self.initialized.fill_(1)
        return self.head(self.next((self.scale * (y + self.loc)).tanh()))  # type: ignore[no-any-return]


class _Masks(nn.Module):
    """Masks by size, made once."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.v, self.head = nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(6, 2)
        self.cached: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        n = x.size(1)
        if n not in self.cached:
            self.cached[n] = torch.full((n, n), float("-inf"), dtype=x.dtype).triu(1)
        q, v = self.q(x), self.v(x)
        return self.head(torch.softmax(q @ q.mT + self.cached[n], -1) @ v)  # type: ignore[no-any-return]


class _Positions(nn.Module):
    """A table of positions that grows on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Linear(3, 8), nn.Linear(8, 6), nn.Linear(6, 2)
        self.table = self._make(4)

    def _make(self, n: int) -> Tensor:
        return torch.sin(torch.arange(n, dtype=torch.float64)[:, None] * torch.arange(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if x.size(1) > len(self.table):
            self.table = self._make(x.size(1))
        return self.head(self.mix(self.embed(x) + self.table[: x.size(1)]).relu())  # type: ignore[no-any-return]


class _CachedWeight(nn.Module):
    """A standardised weight is kept in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.conv, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 3), nn.Conv2d(6, 2, 1)
        self.cached: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.cached is None:
            w = self.conv.weight
            self.cached = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return self.head(F.conv2d(self.body(x).relu(), self.cached, self.conv.bias).relu())  # type: ignore[no-any-return]


class _Observer(nn.Module):
    """Rounds to steps of a range that is observed."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.next, self.head = nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(6, 2)
        self.register_buffer("low", torch.tensor(0.0))
        self.register_buffer("high", torch.tensor(1.0))
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        if self.training and self.enabled:
            self.low.copy_(torch.minimum(self.low, y.min()))
            self.high.copy_(torch.maximum(self.high, y.max()))
        return self.head(self.next(y.clamp(self.low, self.high)).relu())  # type: ignore[no-any-return]


def _observe(model: nn.Module) -> None:
    model.low.fill_(-0.8)  # type: ignore[union-attr, operator]
    model.high.fill_(0.4)  # type: ignore[union-attr, operator]


def _calibrated(scale: float) -> Callable[[nn.Module], None]:
    return lambda model: model.calibrate(scale)  # type: ignore[operator]


class _PlainGate(_Net):
    """A gate that no module registers."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = torch.zeros(1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).relu()
        return self.head(y + self.alpha * self.branch(y))  # type: ignore[no-any-return]


def _image(*size: int) -> tuple[int, ...]:
    return (2, 3, *size)


TRAPS = [
    Trap(
        name="a gate in a buffer that is zero",
        source="ReZero (arXiv 2003.04887), SkipInit, with a gate set from outside: register_buffer('scale', …)",
        make=_Gate,
        example=_zeros(2, 3, 6, 6),
        uses=[_after(_open, *_image(5, 7))],
        shrinks=True,
    ),
    Trap(
        name="a gate per channel that is zero",
        source="LayerScale (arXiv 2103.17239) as a buffer; timm.layers",
        make=lambda: _Gate(0.0, (8, 1, 1)),
        example=_zeros(2, 3, 6, 6),
        uses=[_after(_open, *_image(5, 7))],
        shrinks=True,
    ),
    Trap(
        name="a coefficient that no checkpoint holds",
        source="schedules that set register_buffer('alpha', …, persistent=False)",
        make=lambda: _Gate(1.0, (), persistent=False),
        example=_zeros(2, 3, 6, 6),
        uses=[_after(_open, *_image(5, 7))],
        shrinks=True,
    ),
    Trap(
        name="a gate that no module registers",
        source="attributes such as self.alpha = torch.zeros(1), moved by callbacks",
        make=_PlainGate,
        example=_zeros(2, 3, 6, 6),
        uses=[_after(_open, *_image(5, 7))],
        shrinks=True,
    ),
    Trap(
        name="a blend of two resolutions",
        source="progressive growing of GANs (arXiv 1710.10196), the alpha of facebookresearch/pytorch_GAN_zoo",
        make=_Fade,
        example=_zeros(2, 3, 6, 6),
        uses=[_after(lambda model: model.fade.fill_(0.3), *_image(5, 7)), once(*_image(7, 4))],  # type: ignore[union-attr, operator]
    ),
    Trap(
        name="statistics that a method sets",
        source="calibration of features, as in PatchCore and anomalib's normalisation buffers",
        make=_Shift,
        example=_zeros(2, 3, 6, 6),
        uses=[_after(_calibrated(0.3), *_image(5, 7))],
        shrinks=True,
    ),
    Trap(
        name="a codebook that a training step moves",
        source="VQ-VAE with EMA (arXiv 1711.00937), lucidrains/vector-quantize-pytorch",
        make=_Codebook,
        example=_zeros(7, 5),
        uses=[_calls((9, 5), (4, 5), train=True), once(3, 5)],
        refused=r"codes|counts",
    ),
    Trap(
        name="a queue of keys",
        source="MoCo (arXiv 1911.05722), facebookresearch/moco",
        make=_Queue,
        example=_zeros(4, 5),
        uses=[_calls((4, 5), (4, 5), (4, 5))],
        shrinks=True,
    ),
    Trap(
        name="a hidden state on the module",
        source="stateful recurrence in reinforcement learning (r2d2 actors)",
        make=_Hidden,
        example=_zeros(4, 3),
        uses=[_calls((4, 3), (4, 3), (4, 3))],
        shrinks=True,
    ),
    *(
        Trap(
            name=f"the end of the last piece in a {how}",
            source="streaming convolutions (facebookresearch/encodec StreamableConv1d, wav2letter streaming)",
            make=lambda how=how: _Streaming(how),  # type: ignore[misc]
            example=_zeros(2, 3, 6),
            uses=[_calls((2, 3, 6), (2, 3, 5), (2, 3, 1))],
            shrinks=True,
        )
        for how in ("attribute", "dict", "deque")
    ),
    Trap(
        name="keys and values of earlier calls",
        source="KV caches as objects on a module (karpathy/llm.c ports, Llama reference cache_k)",
        make=_Attention,
        example=_zeros(2, 3, 5),
        uses=[_calls((2, 3, 5), (2, 1, 5), (2, 1, 5))],
        shrinks=True,
    ),
    Trap(
        name="memories of the last segment",
        source="Transformer-XL mems (arXiv 1901.02860)",
        make=_Memory,
        example=_zeros(2, 3, 4),
        uses=[_calls((2, 3, 4), (2, 5, 4), (2, 1, 4))],
        shrinks=True,
    ),
    Trap(
        name="a normaliser of observations",
        source="running mean and variance of observations (openai/baselines RunningMeanStd, rl_games)",
        make=_Normaliser,
        example=_zeros(4, 5),
        uses=[_calls((6, 5), (3, 5), train=True), once(3, 5)],
        shrinks=True,
    ),
    Trap(
        name="a centre that moves in eval mode",
        source="the centre of DINO's teacher (arXiv 2104.14294)",
        make=_Whitening,
        example=_zeros(4, 5),
        uses=[_calls((6, 5), (3, 5), (2, 5))],
        shrinks=True,
    ),
    Trap(
        name="a norm that the first batch initialises",
        source="ActNorm of Glow (arXiv 1807.03039), CompVis/taming-transformers",
        make=_ActNorm,
        example=_zeros(4, 5),
        uses=[_calls((6, 5), (3, 5), (4, 5))],
        shrinks=True,
    ),
    Trap(
        name="masks that are made once per size",
        source="cached attention masks (google-research/vision_transformer ports)",
        make=_Masks,
        example=_zeros(2, 4, 5),
        uses=[_calls((2, 4, 5), (2, 6, 5), (2, 4, 5))],
        shrinks=True,
    ),
    Trap(
        name="a table of positions that grows",
        source="fairseq's SinusoidalPositionalEmbedding",
        make=_Positions,
        example=_zeros(2, 4, 3),
        uses=[_calls((2, 4, 3), (2, 7, 3), (2, 4, 3))],
        shrinks=True,
    ),
    Trap(
        name="a weight that is kept in eval mode",
        source="weight standardisation with a cached weight (google-research/big_transfer ports)",
        make=_CachedWeight,
        example=_zeros(*_image(6, 6)),
        uses=[_calls(_image(6, 6), _image(5, 7))],
    ),
    Trap(
        name="a range that is observed",
        source="torch.ao.quantization MinMaxObserver, LSQ-style fake quantisation",
        make=_Observer,
        example=_zeros(4, 5),
        uses=[_after(_observe, 3, 5), _calls((4, 5), (4, 5), train=True)],
        shrinks=True,
    ),
]


def _all_constant(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MutableState, "_may_change", lambda self, module, name: False)
    patch.setattr(mutable_state, "_suggests_change", lambda tensor, derived: False)
    patch.setattr(MutableState, "add_written", lambda self, written, aliases: set())


ABLATIONS = [
    Ablation("buffers that may change are inputs", _all_constant, "a gate in a buffer that is zero"),
]

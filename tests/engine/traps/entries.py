"""Traps: networks that are run in more ways than by forward: training steps, penalties, methods that users call."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine import tracer
from engine.flow.coverage import CoverageTracer
from engine.recording.entry_recorder import EntryRecorder
from engine.recording.gradients import GradientRequests
from tests.engine.exactness import Masks
from tests.engine.traps.trap import Ablation, Trap, once
from tests.engine.traps.trap import Use as Way

__all__ = ["ABLATIONS", "TRAPS"]


class _Net(nn.Module):
    """Three convolutions; `step` runs more than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 8, 3, bias=False)
        self.head = nn.Conv2d(8, 4, 1)
        self.more()

    def more(self) -> None:
        """Add what only `step` uses."""

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what lies inside."""
        first = self.stem(x).relu()
        return first, self.mid(first).relu()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        return self.head(self.features(x)[1])

    def step(self, x: Tensor) -> Any:
        """Run it in another way."""
        raise NotImplementedError


def _noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _step(*shape: int, seed: int = 1, times: int = 1) -> Way:
    """Call the entry on noise, several times in a row, and differentiate with respect to the input."""

    def use(model: Any) -> Any:
        results = []
        for turn in range(times):
            x = _noise(*shape, seed=seed + turn).requires_grad_(True)
            out = model.eval().step(x)
            tensors = list(out.values()) if isinstance(out, dict) else list(out) if isinstance(out, tuple) else [out]
            total = sum((t.sum() for t in tensors if isinstance(t, Tensor) and t.requires_grad), torch.zeros(()))
            slope = torch.autograd.grad(total, x, allow_unused=True)[0] if total.requires_grad else None
            results.append([t.detach() if isinstance(t, Tensor) else t for t in tensors])
            results.append([slope])
        return results

    return use


def _options(training: bool) -> Callable[[nn.Module], dict[str, Any]]:
    def options(model: Any) -> dict[str, Any]:
        return {"entries": {"step": engine.Entry(model.step, (_noise(2, 3, 8, 8, seed=9),), training=training)}}

    return options


def _trap(
    name: str,
    source: str,
    make: type[_Net],
    *,
    training: bool = True,
    times: int = 1,
    uses: Sequence[Way] | None = None,
    **more: Any,
) -> Trap:
    return Trap(
        name=name,
        source=source,
        make=make,
        example=lambda model: torch.zeros(2, 3, 8, 8, dtype=torch.float64),
        uses=[once(3, 3, 9, 7), _step(3, 3, 10, 9, times=times)] if uses is None else uses,
        trace=_options(training),
        **more,
    )


class _AuxiliaryHead(_Net):
    def more(self) -> None:
        self.aux = nn.Conv2d(8, 5, 1)

    def step(self, x: Tensor) -> Any:
        first, second = self.features(x)
        return self.head(second).mean() + 0.4 * self.aux(first).pow(2).mean()


class _OuterHead(_Net):
    def more(self) -> None:
        head = nn.Conv2d(8, 5, 1).double()
        self.probe = lambda h: head(h)  # not registered: a linear probe beside the network

    def step(self, x: Tensor) -> Any:
        return self.probe(self.features(x)[0]).pow(2).mean()


class _Projection(_Net):
    def more(self) -> None:
        self.project = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 6))

    def step(self, x: Tensor) -> Any:
        z = F.normalize(self.project(self.features(x)[1].mean((2, 3))), dim=1)
        logits = z @ z.T / 0.5
        return F.cross_entropy(logits, torch.arange(len(x)).roll(1))


class _MeanAbsolute(_Net):
    def step(self, x: Tensor) -> Any:
        return self(x).mean() + self.stem.weight.abs().mean()


class _SumOfSquares(_Net):
    def step(self, x: Tensor) -> Any:
        return self(x).mean() + 0.01 * sum(p.pow(2).sum() for p in self.parameters())


class _Orthogonal(_Net):
    def step(self, x: Tensor) -> Any:
        w = self.mid.weight.flatten(1)
        return self(x).mean() + (w @ w.T - torch.eye(len(w), dtype=w.dtype)).norm()


class _Singular(_Net):
    def step(self, x: Tensor) -> Any:
        return torch.linalg.svdvals(self.mid.weight.flatten(1))[0] + self(x).mean()


class _FeaturePenalty(_Net):
    def step(self, x: Tensor) -> Any:
        first, second = self.features(x)
        return self.head(second).mean() + first.abs().mean()


class _CountsChannels(_Net):
    def step(self, x: Tensor) -> Any:
        first, second = self.features(x)
        return self.head(second).mean() / math.sqrt(first.shape[1]) + len(first[0])


class _NumberOfWeights(_Net):
    def step(self, x: Tensor) -> Any:
        return self(x).mean() * (1 / self.mid.weight.numel())


class _Style(_Net):
    def step(self, x: Tensor) -> Any:
        first = self.features(x)[0].flatten(2)
        gram = first @ first.mT / (first.shape[1] * first.shape[2])
        return gram.pow(2).sum((1, 2))


class _Hints(_Net):
    def more(self) -> None:
        torch.manual_seed(5)
        self.teacher = nn.Conv2d(3, 16, 3).requires_grad_(False)
        self.regressor = nn.Conv2d(8, 16, 1)

    def step(self, x: Tensor) -> Any:
        return F.mse_loss(self.regressor(self.features(x)[0]), self.teacher(x))


class _MeanTeacher(_Net):
    def more(self) -> None:
        self.teacher = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False))

    @torch.no_grad()
    def follow(self) -> None:
        for mine, theirs in ((self.stem, self.teacher[0]), (self.mid, self.teacher[2])):
            theirs.weight.data.mul_(0.9).add_(mine.weight.data, alpha=0.1)

    def step(self, x: Tensor) -> Any:
        self.follow()
        return F.mse_loss(self.head(self.features(x)[1]), self.head(self.teacher(x).relu()).detach())


class _OuterTeacher(_Net):
    def more(self) -> None:
        self.others = [nn.Conv2d(3, 8, 3, bias=False).double()]  # in a list: not registered

    def step(self, x: Tensor) -> Any:
        with torch.no_grad():
            teacher = self.others[0]
            teacher.weight.lerp_(self.stem.weight, 0.1)
            target = teacher(x).mean((1, 2, 3))
        return self(x).mean((1, 2, 3)) - target


class _Queue(_Net):
    def more(self) -> None:
        self.register_buffer("queue", F.normalize(_noise(8, 12, seed=3), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def step(self, x: Tensor) -> Any:
        keys = F.normalize(self.features(x)[1].mean((2, 3)), dim=1)
        logits = keys @ self.queue.clone().detach()
        place = int(self.pointer)
        self.queue[:, place : place + len(x)] = keys.detach().T
        self.pointer[0] = (place + len(x)) % 12
        return logits


class _Centre(_Net):
    def more(self) -> None:
        self.register_buffer("centre", torch.zeros(1, 8))

    def step(self, x: Tensor) -> Any:
        h = self.features(x)[1].mean((2, 3))
        out = ((h - self.centre) / 0.1).softmax(1)
        self.centre = self.centre * 0.9 + h.detach().mean(0, keepdim=True) * 0.1
        return out.pow(2).sum(1)


class _OutputCentre(_Net):
    def more(self) -> None:
        self.register_buffer("centre", torch.zeros(1, 4))

    def step(self, x: Tensor) -> Any:
        out = self(x).mean((2, 3))
        loss = ((out - self.centre) / 0.1).softmax(1).pow(2).sum(1)
        self.centre = self.centre * 0.9 + out.detach().mean(0, keepdim=True) * 0.1
        return loss


class _GradientPenalty(_Net):
    def step(self, x: Tensor) -> Any:
        point = x.detach().clone().requires_grad_(True)
        [slope] = torch.autograd.grad(self(point).sum(), point, create_graph=True)
        return (slope.flatten(1).norm(dim=1) - 1).pow(2)


class _GradCam(_Net):
    def step(self, x: Tensor) -> Any:
        first = self.features(x)[0].detach().requires_grad_(True)
        out = self.head(self.mid(first).relu())
        [slope] = torch.autograd.grad(out[:, 0].sum(), first)
        return (slope.mean((2, 3), keepdim=True) * first).mean(1).relu()


class _ActivationMap(_Net):
    def step(self, x: Tensor) -> Any:
        second = self.features(x)[1]
        return torch.einsum("c,bchw->bhw", self.head.weight[2, :, 0, 0], second)


class _TiedDecoder(_Net):
    def step(self, x: Tensor) -> Any:
        first = self.features(x)[0]
        return F.conv_transpose2d(first, self.stem.weight)


class _Features(_Net):
    def step(self, x: Tensor) -> Any:
        return self.features(x)


class _ManifoldMixup(_Net):
    def step(self, x: Tensor) -> Any:
        first = self.features(x)[0]
        mixed = 0.7 * first + 0.3 * first.flip(0)
        return self.head(self.mid(mixed).relu()).mean((2, 3))


class _Sampled(_Net):
    def more(self) -> None:
        self.decode = nn.Sequential(nn.Conv2d(2, 8, 1), nn.Tanh(), nn.Conv2d(8, 3, 3))

    def step(self, x: Tensor) -> Any:
        mean, spread = self(x).chunk(2, 1)
        torch.manual_seed(0)
        return self.decode(mean + torch.randn_like(mean) * spread.exp())


class _Critic(_Net):
    def more(self) -> None:
        self.critic = nn.Sequential(nn.Conv2d(4, 8, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 1))

    def step(self, x: Tensor) -> Any:
        fake = self(x)
        real = x[:, :1].expand(-1, 4, -1, -1)
        return self.critic(fake.detach()).mean() - self.critic(real).mean(), -self.critic(fake).mean()


class _Bank(_Net):
    def more(self) -> None:
        self.register_buffer("bank", torch.zeros(6, 8))

    def step(self, x: Tensor) -> Any:
        h = self.features(x)[1].mean((2, 3))
        near = torch.cdist(h, self.bank.clone()).min(1).values
        self.bank[: len(x)] = h.detach()
        return near


class _SlimmingNet(_Net):
    def more(self) -> None:
        self.norm = nn.BatchNorm2d(8)

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.norm(self.stem(x)).relu()
        return first, self.mid(first).relu()

    def step(self, x: Tensor) -> Any:
        return self(x).mean() + 1e-2 * self.norm.weight.abs().sum()


class _Holder:
    """A metric that holds the model, and reads its features."""

    def __init__(self, model: _Net) -> None:
        self.model, self.total = model, torch.zeros((), dtype=torch.float64)

    def update(self, x: Tensor) -> Tensor:
        self.total = self.total + self.model.features(x)[0].mean()
        return self.total


class _HeldByMetric(_Net):
    def step(self, x: Tensor) -> Any:
        return _Holder(self).update(x)


class _Hooked(_Net):
    def step(self, x: Tensor) -> Any:
        kept: list[Tensor] = []
        handle = self.stem.register_forward_hook(lambda module, args, out: kept.append(out))
        try:
            self(x)
        finally:
            handle.remove()
        return kept[0].std(dim=1)


class _Averaged(_Net):
    def step(self, x: Tensor) -> Any:
        other = copy.deepcopy(self.mid)
        other.load_state_dict({name: 0.5 * t for name, t in self.mid.state_dict().items()})
        return self.head(other(self.features(x)[0]).relu())


class _ManualBackward(_Net):
    def more(self) -> None:
        self.aux = nn.Conv2d(8, 5, 1)

    def step(self, x: Tensor) -> Any:
        self.aux(self.features(x)[0]).pow(2).mean().backward()
        return x.mean()


def _columns(model: nn.Module, seed: int) -> Masks:
    """Mask what `mid` reads, so that `aux` alone reads some channels."""
    kept = torch.tensor([1.0, 0.0] * 4).view(1, 8, 1, 1).expand(8, 8, 3, 3)
    return {"mid": {"weight": kept}}


def _left_gradients(model: Any) -> Any:
    """Call the entry, which differentiates, and read the gradient of its input."""
    x = _noise(3, 3, 9, 9).requires_grad_(True)
    model.eval().step(x)
    return x.grad


class _Gated(_Net):
    def more(self) -> None:
        self.gates = [torch.zeros((), dtype=torch.float64)]  # not registered
        self.branch, self.out = nn.Conv2d(8, 6, 1), nn.Conv2d(6, 4, 1)

    def step(self, x: Tensor) -> Any:
        first, second = self.features(x)
        return self.head(second).mean() + self.gates[0] * self.out(self.branch(first).tanh()).mean()


def _opened(model: Any) -> Any:
    model.gates = [torch.ones((), dtype=torch.float64)]
    return _step(2, 3, 9, 9)(model)


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient follows the number of channels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope * slope.shape[1]


class _ScaledGradient(_Net):
    def step(self, x: Tensor) -> Any:
        first = _Scaled.apply(self.stem(x).relu())
        return self.head(self.mid(first).relu()).mean((2, 3))


class _Small(_Net):
    """Another loss for a small batch, as the last one is."""

    def step(self, x: Tensor) -> Any:
        first, second = self.features(x)
        loss = self.head(second).square().mean()
        if len(x) < 2:
            loss = loss + first.std() + self.mid.weight.std()
        return loss


class _Unlabelled(_Net):
    """Another loss where the batch has no labels."""

    def step(self, x: Any) -> Any:
        batch = x if isinstance(x, dict) else {"x": x, "y": x.mean((1, 2, 3))} if len(x) % 2 == 0 else {"x": x}
        return self.losses(batch)

    def losses(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss."""
        first, second = self.features(batch["x"])
        if "y" in batch:
            return (self.head(second).mean((1, 2, 3)) - batch["y"]).square().mean()
        return first.std()


class _Penalised(_Net):
    """A penalty on a weight for a small batch."""

    def step(self, x: Tensor) -> Any:
        loss = self.head(self.features(x)[1]).square().mean()
        if len(x) < 2:
            loss = loss + self.mid.weight.std()
        return loss


_BATCHES = [_step(1, 3, 9, 9), _step(3, 3, 9, 9), _step(2, 3, 9, 9)]

TRAPS = [
    _trap("another loss for a small batch", "the last batch of an epoch", _Small, uses=_BATCHES),
    _trap("a batch without labels", "semi-supervised learning", _Unlabelled, uses=_BATCHES),
    _trap("a penalty for a small batch", "penalties in some steps", _Penalised, uses=_BATCHES),
    _trap("auxiliary head in a training step", "GoogLeNet, deeply-supervised nets", _AuxiliaryHead, shrinks=True),
    _trap("linear probe outside of the network", "online evaluators, lightning-bolts SSLOnlineEvaluator", _OuterHead),
    _trap("projection head in a training step", "SimCLR (arXiv 2002.05709)", _Projection, shrinks=True),
    _trap("mean absolute weight as penalty", "torch forum: L1 regularisation by hand", _MeanAbsolute, shrinks=True),
    _trap("weight decay by hand", "sum(p.pow(2).sum() for p in model.parameters())", _SumOfSquares),
    _trap("orthogonality of a weight", "Brock et al., arXiv 1609.07093", _Orthogonal),
    _trap("largest singular value as penalty", "Yoshida & Miyato, arXiv 1705.10941", _Singular),
    _trap("penalty on features", "activity regularisation, AWD-LSTM's alpha", _FeaturePenalty, shrinks=True),
    _trap("number of channels in a loss", "scaling by sqrt(dim)", _CountsChannels),
    _trap("number of weights in a loss", "parameter budgets", _NumberOfWeights),
    _trap("Gram matrices", "neural style transfer, arXiv 1508.06576", _Style, shrinks=True),
    _trap("hints of a wide teacher", "FitNets, arXiv 1412.6550", _Hints, shrinks=True),
    _trap("mean teacher inside", "arXiv 1703.01780; BYOL", _MeanTeacher, times=3),
    _trap("mean teacher in a list", "teachers hidden from the optimiser", _OuterTeacher),
    _trap("queue of keys", "MoCo, arXiv 1911.05722", _Queue, times=2),
    _trap("centre of features", "DINO, arXiv 2104.14294", _Centre, times=3),
    _trap("centre of outputs", "DINO, arXiv 2104.14294", _OutputCentre, times=3, shrinks=True),
    _trap("gradient penalty", "WGAN-GP, arXiv 1704.00028", _GradientPenalty, shrinks=True),
    _trap("gradients at features", "Grad-CAM, arXiv 1610.02391", _GradCam, training=False, shrinks=True),
    _trap("class activation map", "CAM, arXiv 1512.04150", _ActivationMap, training=False),
    _trap("decoder with tied weights", "autoencoders with tied weights", _TiedDecoder, training=False, shrinks=True),
    _trap("features as a method", "timm forward_features", _Features, training=False),
    _trap("manifold mixup", "arXiv 1806.05236", _ManifoldMixup, shrinks=True),
    _trap("sampling and decoding in a step", "VAE, arXiv 1312.6114", _Sampled, shrinks=True),
    _trap("critic in a step", "GAN with two losses", _Critic, shrinks=True),
    _trap("feature bank", "PatchCore, instance discrimination", _Bank, times=2),
    _trap("sparse scales of norms", "network slimming, arXiv 1708.06519", _SlimmingNet),
    _trap("metric that holds the model", "torchmetrics FID-style metrics", _HeldByMetric, training=False, shrinks=True),
    _trap("hook set for one call", "feature extraction by hooks", _Hooked, training=False, shrinks=True),
    _trap("copy made in a step", "look-ahead copies, weight perturbation", _Averaged),
    _trap(
        "loss that is differentiated inside",
        "manual optimisation",
        _ManualBackward,
        uses=[_left_gradients],
        masks=_columns,
    ),
    _trap("gate from outside", "lists of masks that a schedule opens", _Gated, uses=[_opened]),
    _trap(
        "gradient that counts channels",
        "gradient reversal and scaling layers, arXiv 1409.7495",
        _ScaledGradient,
        refused="differs from the masked one in 'step'.*the gradient of",
    ),
]
"""Networks with entries."""


def _unrecorded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tracer, "_run_entry", lambda *args: None)


def _uncompared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine.ModelSpeedup, "_entries", lambda *args: None)


def _known(patch: pytest.MonkeyPatch) -> None:
    _uncompared(patch)
    patch.setattr(EntryRecorder, "_varies", lambda self, tensor: False)


def _unanswered(patch: pytest.MonkeyPatch) -> None:
    def plain(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    patch.setattr(GradientRequests, "__torch_function__", plain)


def _arguments_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CoverageTracer, "codes_of_entries", frozenset())


ABLATIONS = [
    Ablation("the arguments of an entry are others in other calls", _arguments_stay, "another loss for a small batch"),
    Ablation("entries are recorded", _unrecorded, "auxiliary head in a training step"),
    Ablation("the certificate compares entries", _uncompared, "gradient that counts channels"),
    Ablation("what enters an entry varies", _known, "gate from outside"),
    Ablation("what an entry asks of autograd is answered", _unanswered, "gradient penalty"),
]
"""What each of the mechanisms is for."""

"""Traps: tensors that leave the network by another way than a tensor in a tuple."""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.recording import recorder
from engine.verification import certify
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS"]

Leave = Callable[[Any, Tensor, Tensor], Any]


class _Leaves(nn.Module):
    """Computes in two steps; the features between them leave by ``leave(net, features, logits)``."""

    def __init__(self, leave: Leave) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3), nn.Conv2d(8, 4, 1)
        self.leave = leave
        self.store: dict[Any, Any] = {}

    def forward(self, x: Tensor) -> Any:
        features = self.body(self.stem(x).relu())
        return self.leave(self, features, self.head(features.sigmoid()))


def _seen(read: Callable[[nn.Module, Any], Any], *shape: int) -> Use:
    """Return a use that calls the network, and gives what a user reads from it and from its output."""
    call = once(*shape)
    return lambda model: read(model, call(model))


def _image(model: nn.Module) -> Tensor:
    return torch.zeros(2, 3, 8, 8, dtype=torch.float64)


def _trap(name: str, source: str, leave: Leave, read: Callable[[Any, Any], Any], **more: Any) -> Trap:
    """Return a trap in which the features leave; only the stem can shrink then, which it must."""
    uses = [_seen(read, 3, 3, 11, 9)]
    return Trap(name, source, lambda: _Leaves(leave), _image, uses, shrinks=True, **more)


# ---------------------------------------------------------------- returned in an object

_Pair = namedtuple("_Pair", "logits features")


@dataclass
class _Inner:
    """Features in a dataclass."""

    features: Any


@dataclass
class _Outer:
    """A dataclass in a plain object in a dataclass."""

    logits: Tensor
    more: Any = field(default=None)


class _ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """As transformers has it: a mapping with attributes, of which some are in the mapping."""

    def __init__(self, logits: Tensor, hidden: Tensor) -> None:
        super().__init__(logits=logits)
        self.hidden = hidden


class _Slotted:
    """A result with slots and a property."""

    __slots__ = ("__features", "logits")

    def __init__(self, logits: Tensor, features: Tensor) -> None:
        self.logits, self.__features = logits, features

    @property
    def features(self) -> Tensor:
        """What the network saw."""
        return self.__features


def _later(features: Tensor, logits: Tensor) -> Iterator[Tensor]:
    yield logits
    yield features.mean((2, 3))


class _Namespace(nn.Module):
    """Returns a plain namespace."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 8, 3)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x).relu()
        return SimpleNamespace(logits=self.head(hidden), features=hidden)


def _normal(net: Any, features: Tensor, logits: Tensor) -> Any:
    mean, deviation = features.chunk(2, 1)
    return torch.distributions.Normal(mean, deviation.exp(), validate_args=False)


def _categorical(net: Any, features: Tensor, logits: Tensor) -> Any:
    return torch.distributions.Categorical(logits=features.mean((2, 3)), validate_args=False)


def _independent(net: Any, features: Tensor, logits: Tensor) -> Any:
    normal = torch.distributions.Normal(features, torch.ones_like(features), validate_args=False)
    return {"posterior": torch.distributions.Independent(normal, 3, validate_args=False), "logits": logits}


RETURNED = [
    Trap(
        name="a namespace as output",
        source="types.SimpleNamespace, as in fairseq's and many research models' outputs",
        make=_Namespace,
        example=lambda model: torch.zeros(2, 3, 6, 6, dtype=torch.float64),
        uses=[lambda model: vars(once(3, 3, 9, 7)(model))],
    ),
    _trap(
        "a sparse tensor as output",
        "learned adjacency matrices, returned by to_sparse()",
        lambda net, h, y: (y, h.flatten(1).to_sparse()),
        lambda net, out: [out[0], out[1].to_dense()],
    ),
    _trap(
        "a named tuple as output",
        "torchvision's GoogLeNetOutputs",
        lambda net, h, y: _Pair(y, h),
        lambda net, out: [out.logits, out.features],
    ),
    _trap(
        "a dataclass in an object in a dataclass",
        "segment-anything's and detectron2's nested results",
        lambda net, h, y: _Outer(y, SimpleNamespace(inner=_Inner([h]))),
        lambda net, out: [out.logits, out.more.inner.features],
    ),
    _trap(
        "an attribute of a mapping as output",
        "transformers' ModelOutput, an OrderedDict with attributes",
        lambda net, h, y: _ModelOutput(y, h),
        lambda net, out: [dict(out), out.hidden],
    ),
    _trap(
        "a result with slots and a property",
        "detectron2's Instances, mmengine's data elements",
        lambda net, h, y: _Slotted(y, h),
        lambda net, out: [out.logits, out.features],
    ),
    _trap(
        "a normal distribution as output",
        "torch.distributions.Normal, as the encoders of variational autoencoders return",
        _normal,
        lambda net, out: [out.mean, out.stddev, out.log_prob(torch.zeros_like(out.mean))],
    ),
    _trap(
        "a categorical distribution as output",
        "torch.distributions.Categorical, as policies of CleanRL return",
        _categorical,
        lambda net, out: [out.logits, out.entropy()],
    ),
    _trap(
        "a distribution of distributions in a mapping",
        "torch.distributions.Independent, as Dreamer's latent states",
        _independent,
        lambda net, out: [out["posterior"].mean, out["logits"]],
    ),
    _trap(
        "a generator as output",
        "streaming decoders that yield one result after the other",
        lambda net, h, y: _later(h, y),
        lambda net, out: list(out),
    ),
    _trap(
        "a function as output",
        "decoders that return what evaluates them (NeRF, implicit functions)",
        lambda net, h, y: lambda scale: y.mean() + h * scale,
        lambda net, out: out(2.0),
    ),
    _trap(
        "a set and a deque as output",
        "frames of a window in a deque",
        lambda net, h, y: (deque([h]), {y}),
        lambda net, out: [list(out[0]), list(out[1])],
    ),
    _trap(
        "a packed sequence as output",
        "torch.nn.utils.rnn.pack_padded_sequence",
        lambda net, h, y: nn.utils.rnn.pack_sequence([h.mean((2, 3))[0], h.mean((2, 3))[1]]),
        lambda net, out: out.data,
    ),
    _trap(
        "a view of features as output",
        "detached features for a probe",
        lambda net, h, y: SimpleNamespace(y=y, probe=h.detach()[:, :, 0].transpose(0, 1)),
        lambda net, out: [out.y, out.probe],
    ),
    _trap(
        "features that are written after they were handed out",
        "in-place activations behind a stored pre-activation",
        lambda net, h, y: (SimpleNamespace(h=h), y, h.relu_())[:2],
        lambda net, out: [out[0].h, out[1]],
    ),
]


# ---------------------------------------------------------------- kept outside of the call

_CONTEXT: contextvars.ContextVar[Any] = contextvars.ContextVar("features")
_THREAD = threading.local()
_GLOBALS: dict[str, Any] = {}
_WEAK: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def _then(store: Callable[[Any, Tensor], Any]) -> Leave:
    """Return what stores the features, and returns the logits."""

    def leave(net: Any, features: Tensor, logits: Tensor) -> Tensor:
        store(net, features)
        return logits

    return leave


def _globally(net: Any, h: Tensor) -> None:
    _GLOBALS["h"] = h


def _threaded(net: Any, h: Tensor) -> None:
    _THREAD.h = h


def _weakly(net: Any, h: Tensor) -> None:
    _WEAK[net] = h


class _Recorder:
    """A feature extractor as a user writes it: an object that keeps what its hook is given."""

    def __init__(self) -> None:
        self.features: dict[str, list[Tensor]] = defaultdict(list)

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.features["body"].append(output)


class _Hooked(_Leaves):
    """A forward hook keeps what the body puts out."""

    def __init__(self) -> None:
        super().__init__(lambda net, h, y: y)
        self.seen = _Recorder()
        self.body.register_forward_hook(self.seen)


class _Auxiliary(nn.Module):
    """A mixture of two branches that leaves its balancing loss on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.router = nn.Linear(5, 6), nn.Linear(6, 2)
        self.one, self.two, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 3)
        self.aux_loss: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        gates = self.router(x).softmax(-1)
        self.aux_loss = (gates.mean(0) ** 2).sum() + (self.one(x) ** 2).mean()
        out: Tensor = self.head(gates[:, :1] * self.one(x).sigmoid() + gates[:, 1:] * self.two(x).sigmoid())
        return out


class _Attends(nn.Module):
    """Attention that keeps its map for whoever plots it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.mlp, self.head = nn.Linear(8, 24), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        self.attention = (q @ k.transpose(1, 2) / 8**0.5).softmax(-1)
        self.keys = k
        out: Tensor = self.head(self.mlp(self.attention @ v).relu())
        return out


class _Supervised(nn.Module):
    """Deep supervision: the heads' outputs are collected in a list on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Conv2d(3 if i == 0 else 6, 6, 3, padding=1) for i in range(3)])
        self.sides = nn.ModuleList([nn.Conv2d(6, 5, 1) for _ in range(3)])
        self.head = nn.Conv2d(6, 2, 1)
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.outputs.clear()
        for block, side in zip(self.blocks, self.sides, strict=True):
            x = block(x).relu()
            self.outputs.append(side(x))
        out: Tensor = self.head(x)
        return out


KEPT = [
    _trap(
        "features kept as an attribute",
        "Grad-CAM: self.last_features = h",
        _then(lambda net, h: setattr(net, "last_features", h)),
        lambda net, out: [net.last_features, out],
    ),
    _trap(
        "features kept in a dictionary of the module",
        "self.store['features'] = h, as in feature extractors of perceptual losses",
        _then(lambda net, h: net.store.update(features=[h])),
        lambda net, out: [net.store["features"], out],
    ),
    _trap(
        "features kept in a global",
        "activation['body'] = output, as in the PyTorch forum's answer on extracting features",
        _then(_globally),
        lambda net, out: [_GLOBALS["h"], out],
    ),
    _trap(
        "features kept in a context variable",
        "contextvars, as aux losses of asynchronous code",
        _then(lambda net, h: _CONTEXT.set(h)),
        lambda net, out: [_CONTEXT.get(), out],
    ),
    _trap(
        "features kept in a thread local",
        "threading.local, as Megatron's and fairscale's global state",
        _then(_threaded),
        lambda net, out: [_THREAD.h, out],
    ),
    _trap(
        "features kept in a weak dictionary",
        "weakref.WeakKeyDictionary by module",
        _then(_weakly),
        lambda net, out: [_WEAK[net], out],
    ),
    Trap(
        "features kept by a forward hook",
        "register_forward_hook with an object that collects, as torch-cam",
        _Hooked,
        _image,
        [_seen(lambda net, out: [net.seen.features["body"][-1], out], 3, 3, 11, 9)],
        shrinks=True,
    ),
    Trap(
        "a balancing loss left on the module",
        "mixture losses: self.aux_loss, as in tutel and many mixtures of experts",
        _Auxiliary,
        lambda model: torch.randn(4, 5, dtype=torch.float64),
        [_seen(lambda net, out: [net.aux_loss, out], 7, 5)],
        shrinks=True,
    ),
    Trap(
        "an attention map kept on the module",
        "self.attention_map, as in DINO's and DETR's visualisation forks",
        _Attends,
        lambda model: torch.randn(2, 5, 8, dtype=torch.float64),
        [_seen(lambda net, out: [net.attention, net.keys, out], 3, 7, 8)],
        shrinks=True,
    ),
    Trap(
        "side outputs in a list on the module",
        "deep supervision as in UNet++ and HED",
        _Supervised,
        _image,
        [_seen(lambda net, out: [list(net.outputs), out], 3, 3, 9, 10)],
        shrinks=True,
    ),
]


# ---------------------------------------------------------------- handed to an argument


class _Passed(nn.Module):
    """Gives its features to what it was called with, and returns the logits."""

    def __init__(self, give: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 8), nn.Linear(8, 3)
        self.give = give

    def forward(self, x: Tensor, to: Any) -> Tensor:
        hidden = self.body(self.stem(x).relu())
        self.give(to, hidden)
        out: Tensor = self.head(hidden.sigmoid())
        return out


def _passed(name: str, source: str, give: Callable[[Any, Tensor], Any], to: Callable[[int], Any]) -> Trap:
    def use(model: nn.Module) -> Any:
        receiver = to(4)
        with torch.no_grad():
            out = model.eval()(torch.randn(4, 5, generator=torch.Generator().manual_seed(3)).double(), receiver)
        return [out, getattr(receiver, "kept", receiver)]

    def example(model: nn.Module) -> Any:
        return torch.zeros(2, 5, dtype=torch.float64), to(2)

    return Trap(name, source, lambda: _Passed(give), example, [use], shrinks=True)


class _Callback:
    """Keeps what it is called with."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def __call__(self, h: Tensor) -> None:
        self.kept.append(h)


HANDED = [
    _passed("features appended to a list argument", "collect=[] arguments", list.append, lambda n: []),
    _passed(
        "features given to a callback argument",
        "callbacks of k-diffusion's samplers",
        lambda to, h: to(h),
        lambda n: _Callback(),
    ),
    _passed(
        "features written to an out argument",
        "out= arguments of torch's own functions",
        lambda to, h: to.copy_(h),
        lambda n: torch.zeros(n, 8, dtype=torch.float64),
    ),
    _passed(
        "features written to a row of an argument",
        "preallocated buffers of memory banks",
        lambda to, h: to["bank"][:, 1].add_(h.sigmoid()),
        lambda n: {"bank": torch.zeros(n, 2, 8, dtype=torch.float64)},
    ),
]


TRAPS = [*RETURNED, *KEPT, *HANDED]


def _nothing_outlives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "outliving_tensors", lambda *tables: [])
    monkeypatch.setattr(certify, "results_of", lambda *_: [])


ABLATIONS = [
    Ablation("what outlives a call is an output", _nothing_outlives, "features kept in a global"),
    Ablation("an object's attributes are outputs", _nothing_outlives, "a normal distribution as output"),
]

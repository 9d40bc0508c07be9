"""Traps: branches, methods and modules that the example does not run, and code like it that must cost nothing."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.flow import branches
from engine.flow.effects import Effect
from engine.recording.recorder import Recorder
from engine.unrecorded import replaced_calls, unreached, untaken
from engine.unrecorded.idle_modules import IdleModules
from engine.unrecorded.untaken import UntakenBranch
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS"]

STRENGTH = 1.0
_EIGHT = 8


def noise(*shape: int, seed: int = 7) -> Tensor:
    """Return noise that no certificate has seen."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def calls(**arguments: Any) -> Use:
    """Return a use that calls the network with further arguments."""

    def use(model: nn.Module) -> Any:
        with torch.no_grad():
            return model.eval()(noise(5, 6), **arguments)

    return use


def sets(name: str, value: Any) -> Use:
    """Return a use that sets an attribute, and calls the network."""

    def use(model: nn.Module) -> Any:
        setattr(model, name, value)
        return calls()(model)

    return use


class Net(nn.Module):
    """Three layers, and parts that some branches use."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def features(self, x: Tensor) -> Tensor:
        """Return what the head reads."""
        return torch.relu(self.inner(torch.relu(self.enter(x))))

    def forward(self, x: Tensor) -> Any:
        """Return scores."""
        return self.leave(self.features(x))


class ReturnsFeatures(Net):
    def forward(self, x: Tensor, return_features: bool | None = None) -> Any:
        f = self.features(x)
        return (self.leave(f), f) if return_features else self.leave(f)


class LeavesEarly(Net):
    def forward(self, x: Tensor, stop: bool | None = None) -> Any:
        f = self.features(x)
        if stop:
            return f
        return self.leave(f)


class RunsOn(Net):
    def forward(self, x: Tensor, whole: bool = True) -> Any:
        h = torch.relu(self.enter(x))
        if not whole:
            return h.flatten(1)
        f = torch.relu(self.inner(h))
        return self.leave(f)


class Fuses(Net):
    def __init__(self) -> None:
        super().__init__()
        self.audio = nn.Linear(4, 8)

    def forward(self, x: Tensor, audio: Tensor | None = None) -> Any:
        f = self.features(x)
        if audio is not None:
            f = f * torch.sigmoid(self.audio(audio))
        return self.leave(f)


class ScalesByWidth(Net):
    def forward(self, x: Tensor, shift: Tensor | None = None) -> Any:
        f = self.features(x)
        scores = self.leave(f)
        if shift is not None:
            scores = scores / f.size(1) ** 0.5 + shift
        return scores


class ShiftedWhere(Net):
    def forward(self, x: Tensor, shift: float | None = None) -> Any:
        f = self.inner(torch.relu(self.enter(x)))
        if shift is not None:
            f = f + shift
        return self.leave(f)


class Reconstructs(Net):
    def forward(self, x: Tensor, reconstruct: bool = False) -> Any:
        h = torch.relu(self.enter(x))
        return F.linear(h, self.enter.weight.t()) if reconstruct else self.leave(torch.relu(self.inner(h)))


class Switched(Net):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.enabled = nn.Linear(8, 2), nn.Linear(2, 8), False

    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        if self.enabled:
            h = h + self.up(self.down(h))
        return self.leave(h)


class ByText(Net):
    def __init__(self) -> None:
        super().__init__()
        self.pool = "first"

    def forward(self, x: Tensor) -> Any:
        f = self.features(x)
        f = f if self.pool == "first" else f.view(-1, 2, 4).flip(1).flatten(1)
        return self.leave(f)


class Heads(Net):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 2)])

    def forward(self, x: Tensor, task: int | None = None) -> Any:
        return self.heads[0 if task is None else task](self.features(x))


class Domains(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({"a": nn.BatchNorm1d(8), "b": nn.BatchNorm1d(8)})

    def forward(self, x: Tensor, domain: str = "a") -> Any:
        return self.leave(self.norms[domain](self.features(x)))


class Depth(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, depth: int = 1) -> Any:
        x = torch.relu(self.enter(x))
        for block in self.blocks[:depth]:
            x = torch.relu(block(x))
        return self.leave(x)


class ByGlobal(Net):
    def forward(self, x: Tensor) -> Any:
        f = self.features(x)
        if STRENGTH > 1:
            f = f.cumsum(1)
        return self.leave(f)


class ByEnvironment(Net):
    def forward(self, x: Tensor) -> Any:
        f = self.features(x)
        if os.environ.get("TRAP_SORTS") == "1":
            f = f.roll(1, 1)
        return self.leave(f)


class ByGradient(Net):
    def forward(self, x: Tensor) -> Any:
        f = self.features(x)
        if x.requires_grad:
            f = f - f.mean(1, keepdim=True)
        return self.leave(f)


class ByDtype(Net):
    def forward(self, x: Tensor, scores: Tensor | None = None) -> Any:
        f = self.features(x)
        if scores is not None and scores.dtype == torch.int64:
            f = f.softmax(1)
        return self.leave(f)


class InHelper(Net):
    def shaped(self, f: Tensor, mode: str) -> Tensor:
        if mode == "normal":
            return f
        return F.normalize(f + 1, dim=1)

    def forward(self, x: Tensor, mode: str = "normal") -> Any:
        return self.leave(self.shaped(self.features(x), mode))


class Catches(Net):
    def forward(self, x: Tensor, table: dict[str, int] | None = None) -> Any:
        f = self.features(x)
        if table:
            f = torch.cat([f[:, 4:], f[:, :4]], 1)
        return self.leave(f)


class KeepsInList(Net):
    def forward(self, x: Tensor, every: bool = False) -> Any:
        layers: list[Tensor] = []
        for layer in (self.enter, self.inner):
            x = torch.relu(layer(x))
            if every:
                layers.append(x)
        return (self.leave(x), layers) if every else self.leave(x)


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.first = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))

    def forward(self, x: Tensor, scores: Tensor | None = None) -> Any:
        h = torch.relu(self.enter(x + self.first(x)))
        return self.leave(torch.relu(self.inner(h)) if scores is None or scores.dtype == torch.float64 else h)


class Views(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 8)
        self.first = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))

    def forward(self, x: Tensor, second: bool | None = None) -> Any:
        x = x + self.first(x)
        one, two = torch.relu(self.enter(x)), torch.relu(self.other(x))
        h = self.inner(one) + two.mean(1, keepdim=True)
        if second:
            h = self.inner(two)
        return self.leave(torch.relu(h))


class AuxiliaryAtOdd(Net):
    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        h = self.features(x)
        if len(x) % 2 and self.training:
            h = h + self.auxiliary(h).mean()
        return self.leave(h)


class Attends(nn.Module):
    """Self-attention whose mask the example leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.query, self.key, self.value = (nn.Linear(6, 8) if not i else nn.Linear(8, 8) for i in range(4))
        self.out, self.leave, self.drop = nn.Linear(8, 8), nn.Linear(8, 3), 0.0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        x = torch.relu(self.embed(x.unsqueeze(0)))
        scores = self.query(x) @ self.key(x).transpose(1, 2) / 8**0.5
        if mask is not None:
            scores = scores + mask
        if self.drop > 0:
            scores = F.dropout(scores, self.drop, self.training)
        return self.leave(torch.relu(self.out(scores.softmax(-1) @ self.value(x))))


class Block(nn.Module):
    """A residual block as torchvision writes it."""

    def __init__(self, down: nn.Module | None) -> None:
        super().__init__()
        self.conv, self.downsample, self.path = nn.Linear(8, 8), down, None

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = torch.relu(self.conv(x))
        if self.downsample is not None:
            identity = self.downsample(x)
        if self.path:
            out = self.path(out)
        return out + identity


class Residual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(nn.Linear(8, 8)), Block(None))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        scores = self.leave(self.blocks(torch.relu(self.enter(x))))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(scores.view(-1, 3), labels.view(-1))
        return scores, loss


class Checkpoints(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: Tensor, saving: bool = False) -> Any:
        x = torch.relu(self.enter(x))
        if saving and not torch.jit.is_scripting():
            x = torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=False)
        else:
            x = self.layers(x)
        return self.leave(x)


class Harmless(Net):
    def forward(self, x: Tensor, scale: float | None = None, verbose: bool = False) -> Any:
        f = self.features(x)
        if verbose:
            warnings.warn(f"features of {len(x)}", stacklevel=1)
        if torch.jit.is_scripting():
            f = f[:, :8]
        if f.dtype == torch.float16:
            f = torch.clamp(f, min=-65504.0, max=65504.0)
        if hasattr(self, "adapter"):
            f = self.adapter(f)
        if scale is not None:
            f = f * scale
        if x.ndim > 2:
            raise ValueError("too many dimensions")
        return self.leave(f)


class Samples(Net):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(8, 6)

    def decode(self, x: Tensor) -> Tensor:
        """Return what the decoder makes of features."""
        return self.decoder(self.features(x))


class Penalised(Net):
    def penalty(self) -> Tensor:
        """Return how far the inner weight is from an identity."""
        weight = self.inner.weight
        return (weight @ weight.t() - torch.eye(len(weight))).square().sum()


class Picks(nn.Module):
    """A global picks one of two layers.

    Args:
        first: whether it picks the layer first, and calls it then.
    """

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head, self.first = nn.Linear(8, 3), first
        self.usual, self.rare = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).relu()
        return self.head(self.pick()(h) if self.first else self.run(h))

    def pick(self) -> nn.Module:
        """Return a layer."""
        layer = self.rare if STRENGTH > 1.5 else self.usual
        return layer

    def run(self, h: Tensor) -> Tensor:
        """Return features of a layer."""
        if STRENGTH > 1.5:
            return self.rare(h).tanh()
        return self.usual(h).relu()


def _environment(model: nn.Module) -> Any:
    os.environ["TRAP_SORTS"] = "1"
    try:
        return calls()(model)
    finally:
        del os.environ["TRAP_SORTS"]


def _strength(model: nn.Module) -> Any:
    globals()["STRENGTH"] = 2.0
    try:
        return calls()(model)
    finally:
        globals()["STRENGTH"] = 1.0


def _trains(model: nn.Module) -> Any:
    return model.train()(noise(3, 6)).detach()


def _with_gradient(model: nn.Module) -> Any:
    return model.eval()(noise(5, 6).requires_grad_()).detach()


def _trap(name: str, source: str, make: Callable[[], nn.Module], *uses: Use, **options: Any) -> Trap:
    return Trap(
        name=name,
        source=source,
        make=make,
        example=lambda model: torch.zeros(2, 6, dtype=torch.float64),
        uses=[once(4, 6), *uses],
        **{"shrinks": True, **options},
    )


_INT, _MASK = torch.zeros(1, dtype=torch.int64), noise(5, 5)
TRAPS = [
    _trap(
        "features on demand",
        "def forward(self, x, return_features=False)",
        ReturnsFeatures,
        calls(return_features=True),
    ),
    _trap("an early return on demand", "torchreid: if return_featuremaps", LeavesEarly, calls(stop=True)),
    _trap("the rest does not run", "BranchyNet exits by an argument", RunsOn, calls(whole=False)),
    _trap("a second modality left out", "late fusion, audio=None", Fuses, calls(audio=noise(5, 4))),
    _trap("a root of the width on demand", "scaled scores under a mask", ScalesByWidth, calls(shift=0.75)),
    _trap("a shift left out", "diffusers: if emb is not None: h = h + emb", ShiftedWhere, calls(shift=0.75)),
    _trap("a tied reconstruction on demand", "sparse autoencoders", Reconstructs, calls(reconstruct=True)),
    _trap("around a layer by dtype", "if h.dtype == torch.float64", Around, calls(scores=_INT)),
    _trap("a second view through one layer", "Siamese networks", Views, calls(second=True)),
    _trap("a layer while training, at odd sizes", "two switches at once", AuxiliaryAtOdd, _trains),
    _trap(
        "a switch that is declared",
        "peft LoraLayer.disable_adapters, never enabled again",
        Switched,
        trace=lambda model: {"constants": ["enabled"]},
    ),
    _trap("an adapter that is off", "peft LoraLayer.disable_adapters", Switched, sets("enabled", True)),
    _trap("a width in the other branch", "x.view(b, 8, -1) under a text", ByText, sets("pool", "other")),
    _trap("a layer that a global calls", "flags for a fast path at the top of a file", lambda: Picks(False), _strength),
    _trap("a layer that a global picks", "self.a if FAST else self.b", lambda: Picks(True), _strength),
    _trap("a head per task", "self.heads[task](features)", Heads, calls(task=1), shrinks=True),
    _trap("a norm per domain", "woozch/DSBN", Domains, calls(domain="b")),
    _trap(
        "a depth as an argument",
        "pro_gan_pytorch: self.layers[:depth]",
        Depth,
        calls(depth=3),
        calls(depth=0),
        shrinks=False,
    ),
    _trap("a switch in a global", "a flag of the Python module", ByGlobal, _strength),
    _trap("a switch in the environment", "os.environ.get", ByEnvironment, _environment),
    _trap("a switch by requires_grad", "if x.requires_grad", ByGradient, _with_gradient),
    _trap("a switch by an argument's dtype", "if scores.dtype == torch.int64", ByDtype, calls(scores=_INT)),
    _trap("a branch of a helper", "def pool(self, x, pool_type)", InHelper, calls(mode="other")),
    _trap("a branch by a dictionary", "if options:", Catches, calls(table={"a": 1})),
    _trap("all layers on demand", "transformers: output_hidden_states", KeepsInList, calls(every=True), shrinks=False),
    _trap("a mask left out", "transformers: attention_mask=None", Attends, calls(mask=_MASK)),
    _trap(
        "blocks with and without a shortcut", "torchvision BasicBlock", Residual, calls(labels=torch.zeros(5).long())
    ),
    _trap("checkpoints on demand", "timm: checkpoint_seq", Checkpoints, calls(saving=True)),
    _trap("branches that change nothing", "is_scripting, hasattr, float16 clamp", Harmless, calls(scale=0.5)),
    _trap("a decoder that a method calls", "VAE.decode", Samples, kept=r"Samples\.decode"),
    _trap("a penalty in a method", "orthogonal regularisation", Penalised, kept=r"Penalised\.penalty"),
    _trap("a branch, named", "the plan's notes", LeavesEarly, kept=r"unreached\.py:\d+"),
    _trap(
        "a module that does not run, named", "the plan's notes", Fuses, kept=r"did not run and keep all channels: audio"
    ),
]


def _nothing_is_unreached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "assume_unreached", lambda self, *arguments: None)


def _nothing_varies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untaken, "_effects", lambda branch, functions, foreign, returned: _Keeping())


class _Keeping(dict[str, Any]):
    def get(self, key: str, default: Any = None) -> Any:
        return Effect.KEEPS


def _idle_like_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untaken.UntakenBranch, "mentioned_modules", lambda self: set())


def _numbers_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untaken.UntakenBranch, "reshaped_to_literals", lambda self, beside_attributes: set())


def _no_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IdleModules, "use_values_of_siblings", lambda self, modules, dataflow, assumptions: None)


def _nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untaken.UntakenBranch, "replaced", lambda self, selecting: set())
    monkeypatch.setattr(UntakenBranch, "consumer", lambda self: None)
    monkeypatch.setattr(unreached, "values_instead", lambda branch, runs, dataflow: [])


def _nothing_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unreached._UntakenBranches, "_variables_of_other_calls", lambda self, branch, values: set())


def _idle_replace_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unreached._UntakenBranches, "_use_replaced", lambda self, branch: None)
    monkeypatch.setattr(untaken.UntakenBranch, "replaced", lambda self, selecting: set())
    monkeypatch.setattr(replaced_calls, "held_calls", lambda model, choices: [])


def _nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "names_measured", lambda code: ())


ABLATIONS = [
    Ablation("sizes become numbers in code that did not run", _nothing_is_measured, "a root of the width on demand"),
    Ablation(
        "what stands in the place of modules that did not run stays",
        _idle_replace_nothing,
        "a layer that a global calls",
    ),
    Ablation("what code that did not run reads stays", _nothing_is_unreached, "features on demand"),
    Ablation("what code that did not run changes varies", _nothing_varies, "a shift left out"),
    Ablation("modules that did not run need what they read", _idle_like_others, "an adapter that is off"),
    Ablation("sizes in code that did not run do not follow", _numbers_follow, "a width in the other branch"),
    Ablation("what stands in the place of others has their channels", _nothing_is_replaced, "around a layer by dtype"),
    Ablation("modules that get others keep what they read", _nothing_is_exchanged, "a second view through one layer"),
    Ablation("items of a list that did not run need what the others read", _no_siblings, "a head per task"),
]

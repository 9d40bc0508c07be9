"""Traps: numbers, flags and text that the caller passes to forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.alternatives import arguments
from engine.flow import coverage
from engine.recording import variants
from tests.engine.traps.trap import Ablation, Trap, Use

__all__ = ["ABLATIONS", "TRAPS"]


def _x(seed: int = 3) -> Tensor:
    return torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _call(**kwargs: Any) -> Use:
    def use(model: nn.Module) -> Any:
        with torch.no_grad():
            return model.eval()(_x(), **kwargs)

    return use


class Net(nn.Module):
    """Three layers, and a head per task."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.head_cars, self.head_cats = nn.Linear(8, 3), nn.Linear(8, 2)


class Blended(Net):
    """Blends two features by a number."""

    def forward(self, x: Tensor, alpha: float = 1.0) -> Tensor:
        """Return logits."""
        h = self.stem(x).relu()
        return self.head((1 - alpha) * h + alpha * self.body(h).relu())  # type: ignore[no-any-return]


class Heated(Net):
    """Divides by a temperature in front of a nonlinearity."""

    def forward(self, x: Tensor, temperature: float = 2.0) -> Tensor:
        """Return logits."""
        return self.head(((self.stem(x) + 1) / temperature).tanh())  # type: ignore[no-any-return]


class Iterated(Net):
    """Updates a state as often as it is told."""

    def forward(self, x: Tensor, iters: int = 1) -> Tensor:
        """Return logits of the last state."""
        z = self.stem(x)
        h = torch.zeros_like(z)
        for _ in range(iters):
            h = torch.tanh(z + self.body(h))
        return self.head(h)  # type: ignore[no-any-return]


class OneLayer(Net):
    """Returns the features of one layer, by its place or its name."""

    def forward(self, x: Tensor, layer: Any = -1) -> Any:
        """Return features."""
        first = self.stem(x)
        second = self.body(first.relu())
        third = self.head(second.relu())
        return (first, second, third)[layer]


class NamedLayer(Net):
    """Returns the features of one layer by its name."""

    def forward(self, x: Tensor, layer: str = "third") -> Any:
        """Return features."""
        first = self.stem(x)
        second = self.body(first.relu())
        return {"first": first, "second": second, "third": self.head(second.relu())}[layer]


class NamedLayers(Net):
    """Returns the features of some layers by their names."""

    def forward(self, x: Tensor, layers: tuple[str, ...] = ("third",)) -> Any:
        """Return features."""
        features = {"first": self.stem(x)}
        features["second"] = self.body(features["first"].relu())
        features["third"] = self.head(features["second"].relu())
        return {name: features[name] for name in layers}


class Tasks(Net):
    """Runs the head of a task."""

    def forward(self, x: Tensor, task: str = "cars") -> Any:
        """Return the logits of a task."""
        return getattr(self, f"head_{task}")(self.body(self.stem(x).relu()))


class Centred(Net):
    """Subtracts a mean along a dimension."""

    def forward(self, x: Tensor, dim: int = -2) -> Any:
        """Return logits."""
        h = self.stem(x).relu()
        return self.head(h - h.mean(dim, keepdim=True))


class Modes(Net):
    """Returns predictions, or what another method makes of the features."""

    def forward(self, x: Tensor, mode: str = "tensor") -> Any:
        """Return logits, or what the mode says."""
        h = self.body(self.stem(x).relu()).relu()
        if mode == "tensor":
            return self.head(h)
        return self.predict(h)

    def predict(self, h: Tensor) -> Tensor:
        """Return sums over all features in front of each."""
        return h.cumsum(-1)


class Batches(Net):
    """Takes a dictionary with a tensor and a number."""

    def forward(self, batch: dict[str, Any]) -> Any:
        """Return logits."""
        h = self.stem(batch["x"]).relu()
        return self.head((1 - batch["alpha"]) * h + batch["alpha"] * self.body(h).relu())


class Stateful(Net):
    """Takes a state, or begins with zeros."""

    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        """Return logits of the next state."""
        z = self.stem(x)
        if h is None:
            h = z.new_zeros(*x.shape[:2], 8)
        h = torch.tanh(z + self.body(h))
        return self.head(h)  # type: ignore[no-any-return]


class StatefulLike(Net):
    """Takes a state, or begins with zeros of the features' size."""

    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        """Return logits of the next state."""
        z = self.stem(x)
        state = torch.zeros_like(z) if h is None else h
        return self.head(torch.tanh(z + self.body(state)))  # type: ignore[no-any-return]


def default(value: Any, other: Any) -> Any:
    """Return a value, or another one if it is None."""
    return other if value is None else value


class Noisy(Net):
    """Takes noise, or computes with none."""

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """Return logits."""
        noise = default(noise, torch.zeros(8, dtype=x.dtype))
        return self.head(torch.sigmoid(self.body(noise)) * self.stem(x).relu())  # type: ignore[no-any-return]


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def _batch(alpha: float) -> Use:
    def use(model: nn.Module) -> Any:
        with torch.no_grad():
            return model.eval()({"x": _x(), "alpha": alpha})

    return use


def _trap(name: str, source: str, make: Callable[[], nn.Module], *uses: Use, shrinks: bool | str = False) -> Trap:
    example = torch.zeros(2, 5, 6, dtype=torch.float64)
    return Trap(name=name, source=source, make=make, example=lambda _: example, uses=uses, shrinks=shrinks)


TRAPS = [
    _trap(
        "an argument that blends two features", "pro_gan_pytorch: forward(x, depth, alpha)", Blended,
        _call(), _call(alpha=0.0), _call(alpha=0.7), shrinks=True,
    ),
    _trap(
        "a temperature as an argument", "samplers: forward(x, temperature=1.0)", Heated,
        _call(), _call(temperature=0.3),
    ),
    _trap(
        "a number of iterations as an argument", "RAFT: forward(image1, image2, iters=12)", Iterated,
        _call(), _call(iters=2), _call(iters=5), shrinks="repaired",
    ),
    _trap(
        "the place of a layer as an argument", "fairseq HuBERT: extract_features(output_layer=…)", OneLayer,
        _call(), _call(layer=0), _call(layer=-2),
    ),
    _trap(
        "the name of a layer as an argument", "torchvision: perceptual losses by layer", NamedLayer,
        _call(), _call(layer="first"), _call(layer="second"),
    ),
    _trap(
        "names of layers as an argument", "pytorch-fid and LPIPS: output blocks by name", NamedLayers,
        _call(), _call(layers=("first", "third")),
    ),
    _trap(
        "a head by the name of its task", "multi-task networks: getattr(self, f'head_{task}')", Tasks,
        _call(), _call(task="cats"), shrinks=True,
    ),
    _trap(
        "a dimension as an argument", "activation centring: forward(x, dim=-1)", Centred,
        _call(), _call(dim=-1), _call(dim=0),
    ),
    _trap(
        "a mode that hands features to a method", "mmengine: forward(inputs, mode='tensor')", Modes,
        _call(), _call(mode="predict"), shrinks=True,
    ),
    _trap(
        "a state that the example leaves out", "convolutional and gated cells: if h is None: h = zeros", Stateful,
        _call(), _call(h=_noise(4, 5, 8)), shrinks=True,
    ),
    _trap(
        "a state of the features' size", "RNN cells: state = zeros_like(z) if h is None else h", StatefulLike,
        _call(), _call(h=_noise(4, 5, 8)),
    ),
    _trap(
        "noise that is zero if left out", "lucidrains: noise = default(noise, torch.zeros(…))", Noisy,
        _call(), _call(noise=_noise(8)), shrinks=True,
    ),
    Trap(
        name="a number in a dictionary of arguments", source="Lightning steps: forward(batch)", make=Batches,
        example=lambda _: ({"x": torch.zeros(2, 5, 6, dtype=torch.float64), "alpha": 1.0},),
        uses=[_batch(1.0), _batch(0.0), _batch(0.7)], shrinks=True,
    ),
]  # fmt: skip


def _none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments.Arguments, "alternatives", lambda self: iter(()))


def _not_in_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "DEEPEST_INPUT", 0)


def _no_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    def texts(self: Any, name: str, value: Any) -> Iterator[str]:
        return iter(())

    monkeypatch.setattr(arguments.Arguments, "_strings", texts)


def _only_what_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "fallback_variables", lambda function, variables: {})


def _outputs_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "executed_calls", lambda nodes, outputs: set())


ABLATIONS = [
    Ablation("numbers among the arguments are recorded at others", _none, "a number of iterations as an argument"),
    Ablation("texts among the arguments are recorded at others", _no_texts, "a head by the name of its task", True),
    Ablation("values in containers are arguments too", _not_in_containers, "names of layers as an argument"),
    Ablation(
        "constants in place of arguments vary", _only_what_is_passed, "a state that the example leaves out",
    ),
    Ablation("a run from which something else leaves is kept", _outputs_alike, "the place of a layer as an argument"),
]  # fmt: skip

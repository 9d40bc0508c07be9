"""Traps: parameters and layers that code on demand reaches by look-ups: `get_parameter`, `children`, `state_dict`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.source import lookups
from engine.unrecorded import looked_up, unreached
from tests.engine.traps.entering import Net, called, noise
from tests.engine.traps.trap import Ablation, Trap

__all__ = ["ABLATIONS", "TRAPS"]


class _Net(Net):
    """Layers, another one between them, and a penalty on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Linear(8, 8)

    def penalty(self, h: Tensor) -> Any:
        """Return what is added on demand."""
        raise NotImplementedError

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Any:
        """Add a penalty on demand."""
        h = self.features(x)
        y = self.leave(torch.relu(self.between(h)))
        if extra is not None:
            y = y + self.penalty(h) * extra
        return y


class _Inline(_Net):
    def forward(self, x: Tensor, extra: Tensor | None = None) -> Any:
        h = self.features(x)
        y = self.leave(torch.relu(self.between(h)))
        if extra is not None:
            y = y + self.get_parameter("between.weight").exp().sum() * extra
        return y


class _State(_Net):
    def forward(self, x: Tensor, extra: Tensor | None = None) -> Any:
        h = self.features(x)
        y = self.leave(torch.relu(self.between(h)))
        if extra is not None:
            y = y + self.state_dict()["between.weight"].exp().sum() * extra
        return y


class _Norms(_Net):
    def forward(self, x: Tensor, extra: Tensor | None = None) -> Any:
        h = self.features(x)
        y = self.leave(torch.relu(self.between(h)))
        if extra is not None:
            y = y + sum(p.cosh().sum() for p in self.parameters()) * extra
        return y


class _Submodule(_Net):
    def penalty(self, h: Tensor) -> Any:
        return self.get_submodule("between")(h.flip(-1)).sum()


class _Tables(_Net):
    def penalty(self, h: Tensor) -> Any:
        return self._modules["between"](h.flip(-1)).sum()  # type: ignore[misc]


class _Children(_Net):
    def penalty(self, h: Tensor) -> Any:
        return list(self.children())[2](h.flip(-1)).sum()


class _ByType(_Net):
    def penalty(self, h: Tensor) -> Any:
        return sum(part.weight.exp().sum() for part in self.modules() if isinstance(part, nn.Linear))


class _Scaled(_Net):
    def penalty(self, h: Tensor) -> Any:
        return (self.leave.weight * len(h)).exp().sum()


class _Variable(_Net):
    def penalty(self, h: Tensor) -> Any:
        part = self.leave
        return part.weight.cosh().sum()


class _Property(_Net):
    @property
    def table(self) -> Tensor:
        """Return the weight of a layer."""
        return self.leave.weight

    def penalty(self, h: Tensor) -> Any:
        return self.table.cosh().sum()


class _Getter(_Net):
    def last(self) -> nn.Linear:
        """Return a layer, as ``get_output_embeddings`` does."""
        return self.leave

    def penalty(self, h: Tensor) -> Any:
        return self.last().weight.cosh().sum()


def _size_of(net: nn.Module) -> Any:
    return sum(p.cosh().sum() for name, p in net.named_parameters() if name.endswith("weight"))


class _Function(_Net):
    def penalty(self, h: Tensor) -> Any:
        return _size_of(self)


class _Inner(_Net):
    def forward(self, x: Tensor, extra: Tensor | None = None) -> Any:
        def penalty() -> Any:
            return self.get_parameter("leave.weight").cosh().sum()

        y = self.leave(torch.relu(self.between(self.features(x))))
        if extra is not None:
            y = y + penalty() * extra
        return y


class _Metadata(_Net):
    def forward(self, x: Tensor, extra: Tensor | None = None) -> Any:
        y = self.leave(torch.relu(self.between(self.features(x))))
        if extra is not None:
            kind = next(self.parameters())
            y = y + extra.to(kind.device).to(next(self.parameters()).dtype)
        return y


_WAYS: list[tuple[str, str, type[nn.Module], bool]] = [
    ("a parameter that is looked up", "self.get_parameter(name), torch.nn.Module", _Inline, False),
    ("a weight in the state of a model", "self.state_dict()[name]", _State, False),
    ("all parameters on demand", "sum(p.norm() for p in self.parameters()), weight decay", _Norms, False),
    ("a part that a method looks up", "self.get_submodule(name)(h), FX", _Submodule, False),
    ("a part in the table of parts", "self._modules[name](h), FX and torchvision", _Tables, False),
    ("a child in a method", "list(self.children())[i](h), fastai", _Children, False),
    ("all layers of a type", "for m in self.modules() if isinstance(m, nn.Linear)", _ByType, False),
    ("a function of a scaled weight", "a penalty on weights, in a method", _Scaled, False),
    ("a weight of a layer in a variable", "layer = self.head; layer.weight", _Variable, False),
    ("a weight behind a property", "@property def weight(self)", _Property, False),
    ("a weight of a layer that a method returns", "self.get_output_embeddings().weight, transformers", _Getter, False),
    ("a function that gets the model", "l2_penalty(model)", _Function, False),
    ("a look-up in an inner function", "an inner function on demand", _Inner, False),
    ("the dtype of the first parameter", "next(self.parameters()).dtype, transformers", _Metadata, True),
]  # fmt: skip

_EXTRA = torch.tensor(0.3, dtype=torch.float64)


def _columns(model: nn.Module, seed: int) -> dict[str, dict[str, Tensor]]:
    """Mask inputs of the last layer, so that no layer computes a channel which is zero."""
    kept = (torch.arange(8) + seed) % 8 < 3
    return {"leave": {"weight": kept.double().expand(3, -1).clone()}}


TRAPS = [
    Trap(name, source, make, lambda model: noise(2), [called(noise(3)), called(noise(3), extra=_EXTRA)],
         shrinks=shrinks, masks=_columns)
    for name, source, make, shrinks in _WAYS
]  # fmt: skip


def _nothing_looked_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(unreached, "values_looked_up", lambda *args: [])


def _no_methods(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(looked_up._Search, "_methods", lambda *args: iter(()))


def _no_functions_within(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(looked_up, "_functions_within", lambda *args: iter(()))


def _metadata_everywhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lookups._Uses, "are_harmless", lambda *args: True)


def _metadata_nowhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(looked_up, "reads_metadata_alone", lambda *args, **options: False)


ABLATIONS = [
    Ablation("what code on demand looks up counts", _nothing_looked_up, "a parameter that is looked up"),
    Ablation("look-ups are followed into methods", _no_methods, "a function of a scaled weight"),
    Ablation("look-ups are followed into inner functions", _no_functions_within, "a look-up in an inner function"),
    Ablation("other uses of a look-up are no metadata", _metadata_everywhere, "all parameters on demand"),
    Ablation("metadata of parameters are no use", _metadata_nowhere, "the dtype of the first parameter"),
]

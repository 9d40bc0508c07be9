"""Traps: switches that pick what runs, through enumerations, tables of functions, properties and other objects."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch
from torch import Tensor, nn, zeros_like

from engine.alternatives import attributes
from engine.flow import mutability
from engine.flow.conditions import Conditions
from engine.flow.mutability import Mutability
from engine.unrecorded.untaken import UntakenBranch
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS"]


class Mode(Enum):
    """How features are summarised."""

    PLAIN = 1
    SUMMED = 2


def plain(h: Tensor) -> Tensor:
    """Return the features."""
    return h.relu()


def summed(h: Tensor) -> Tensor:
    """Return sums over all features in front of each."""
    return h.cumsum(-1)


BY_MODE = {Mode.PLAIN: plain, Mode.SUMMED: summed}
BY_NAME = {"plain": plain, "summed": summed}


class Summed(nn.Module):
    """Sums over all features in front of each."""

    def forward(self, h: Tensor) -> Tensor:
        """Return the sums."""
        return h.cumsum(-1)


class Options:
    """Plain options, which are no module."""

    def __init__(self) -> None:
        self.mode: Any = Mode.PLAIN

    def change(self) -> None:
        """Set the other mode."""
        self.mode = Mode.SUMMED


class Gate(nn.Module):
    """A layer with a mode, which a method of its own sets."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.options = nn.Linear(8, 8), Options()
        self.mode, self.kind = Mode.PLAIN, "plain"
        self._hidden: tuple[Mode, ...] = ()
        self.hook: Callable[[Tensor], Tensor] | None = None

    def change(self) -> None:
        """Set the other mode."""
        self.mode, self.kind, self._hidden = Mode.SUMMED, "summed", (Mode.SUMMED,)
        self.options.change()
        self.hook = summed

    @property
    def sums(self) -> bool:
        """Whether it is in the other mode."""
        return self.hidden == (Mode.SUMMED,)

    def sums_all(self) -> bool:
        """Whether it is in the other mode, by a statement."""
        if not self._hidden:
            return False
        return True

    @property
    def hidden(self) -> tuple[Mode, ...]:
        """The modes that were set."""
        return self._hidden

    def forward(self, h: Tensor) -> Tensor:
        """Return the layer's output."""
        return self.body(h)  # type: ignore[no-any-return]


class Net(nn.Module):
    """Three layers; what runs between the first two is chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate, self.head = nn.Linear(6, 8), Gate(), nn.Linear(8, 3)
        self.gates, self.listed = [self.gate], nn.ModuleList([self.gate])
        self.table = nn.ModuleDict({"plain": nn.ReLU(), "summed": Summed()})
        self.kind = "plain"

    def change(self) -> None:
        """Set the other mode of all parts."""
        self.kind = "summed"
        self.gate.change()

    def between(self, h: Tensor) -> Tensor:
        """Return what the second layer reads."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.gate(self.between(self.stem(x))).relu())  # type: ignore[no-any-return]


def _net(between: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: type("Net", (Net,), {"between": between, "__module__": __name__})()


def _by_gate(self: Any, h: Tensor) -> Tensor:
    if self.gate.mode is Mode.SUMMED:
        return h.cumsum(-1)
    return h.relu()


def _by_item(self: Any, h: Tensor) -> Tensor:
    if self.gates[0]._hidden:
        h = h.cumsum(-1)
    return h.relu()


def _by_any(self: Any, h: Tensor) -> Tensor:
    for gate in self.listed:
        if gate._hidden:
            h = h.cumsum(-1)
    return h.relu()


def _by_property(self: Any, h: Tensor) -> Tensor:
    if self.gate.sums:
        h = h.cumsum(-1)
    return h.relu()


def _by_property_of_item(self: Any, h: Tensor) -> Tensor:
    gate = self.gates[-1]
    if gate.sums:
        h = h.cumsum(-1)
    return h.relu()


def _by_method(self: Any, h: Tensor) -> Tensor:
    if self.gate.sums_all():
        h = h.cumsum(-1)
    return h.relu()


def _by_options(self: Any, h: Tensor) -> Tensor:
    if self.gate.options.mode is Mode.SUMMED:
        h = h.cumsum(-1)
    return h.relu()


def _by_helper(self: Any, h: Tensor) -> Tensor:
    if self.gate._hidden:
        h = summed(h)
    return h.relu()


def _by_mask(self: Any, h: Tensor) -> Tensor:
    if self.gate._hidden:
        self.checked = bool(zeros_like(h).any())
    return h.relu()


def _by_mode(self: Any, h: Tensor) -> Tensor:
    return BY_MODE[self.gate.mode](h)


def _by_name(self: Any, h: Tensor) -> Tensor:
    return BY_NAME[self.kind](h)


def _by_key(self: Any, h: Tensor) -> Tensor:
    return self.table[self.kind](h)  # type: ignore[no-any-return]


def gated(h: Tensor, gate: Gate) -> Tensor:
    """Return the features, or their sums."""
    if gate._hidden:
        h = h.cumsum(-1)
    return h.relu()


def _by_argument(self: Any, h: Tensor) -> Tensor:
    return gated(h, self.gate)


def pooled(h: Tensor, kind: str | None) -> Tensor:
    """Return the features, or their sums."""
    if kind is not None:
        h = h.cumsum(-1)
    return h.relu()


class Pooled(Net):
    """A network whose caller picks what a function does with its features."""

    def forward(self, x: Tensor, kind: str | None = None) -> Tensor:
        """Return logits."""
        return self.head(self.gate(pooled(self.stem(x), kind)).relu())  # type: ignore[no-any-return]


def _summing(model: nn.Module) -> Any:
    torch.manual_seed(0)
    return model(torch.randn(4, 6, dtype=torch.float64), "sum")


def _by_callable(self: Any, h: Tensor) -> Tensor:
    if callable(self.gate.hook):
        h = h.cumsum(-1)
    return h.relu()


def _changed(model: nn.Module) -> Any:
    model.change()  # type: ignore[operator]
    return once(4, 6)(model)


def _trap(name: str, source: str, between: Callable[[Any, Tensor], Tensor]) -> Trap:
    return _trap_of(name, source, _net(between), _changed)


def _trap_of(name: str, source: str, make: Callable[[], nn.Module], *uses: Use) -> Trap:
    example = torch.zeros(2, 6, dtype=torch.float64)
    own = [once(4, 6), *uses]
    return Trap(name=name, source=source, make=make, example=lambda _: example, uses=own, shrinks=True)


TRAPS = [
    _trap("an enumeration of a child decides", "if self.quantizer.mode is Mode.EVAL", _by_gate),
    _trap("an item of a list decides", "if self.layers[0].adapters", _by_item),
    _trap("each item of a list decides", "diffusers: for block in self.down_blocks: if block.…", _by_any),
    _trap("a property of a child decides", "peft: if self.lora.active_adapters", _by_property),
    _trap("a property of an item decides", "peft: layer = self.layers[-1]; if layer.merged", _by_property_of_item),
    _trap("a method of a child decides", "torchvision: if self.has_mask()", _by_method),
    _trap("an object that is no module decides", "if self.backbone.config.mode is …", _by_options),
    _trap("a branch hands features to a function of the file", "if self.shuffle: h = channel_shuffle(h)", _by_helper),
    _trap(
        "a branch makes a mask of the features' shape", "transformers: create_causal_mask(inputs_embeds=h)", _by_mask
    ),
    _trap("an attribute of an argument decides", "def adapted(h, block): if block.adapters", _by_argument),
    _trap_of("what a function does follows an argument", "forward(x, pool=None): pool(h, pool)", Pooled, _summing),
    _trap("whether there is a hook decides", "if callable(self.layer.hook)", _by_callable),
    _trap("an enumeration picks a function", "a table of functions by an Enum", _by_mode),
    _trap("a text picks a function", "timm: a table of pooling functions by name", _by_name),
    _trap("a text picks a module", "an nn.ModuleDict of activations", _by_key),
]


def _only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mutability, "_set_anywhere", lambda self, contents, *owners: frozenset())


def _stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutability, "attribute_code", lambda kind, name: None)


def _any_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Conditions, "_method", lambda self, node: True)


def _no_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attributes, "_choices", lambda attribute: iter(()))


def _not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UntakenBranch, "is_module", lambda self, node: True)
    monkeypatch.setattr(UntakenBranch, "replaced", lambda self, selecting: set())  # which keeps it as well


def _arguments_as_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UntakenBranch, "is_fixed", _judged_by_the_owner)


def _judged_by_the_owner(
    self: UntakenBranch, free: Any, never_changed: Callable[[str], bool], *others: Any, **options: Any
) -> bool:
    return _FIXED(self, free, lambda path: never_changed(path.removeprefix("*.")))


_FIXED = UntakenBranch.is_fixed


def _only_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    effects = UntakenBranch.effects
    monkeypatch.setattr(UntakenBranch, "effects", lambda self: effects(self) if self.self_name is not None else {})
    monkeypatch.setattr(UntakenBranch, "replaced", lambda self, selecting: set())  # which keeps it as well


ABLATIONS = [
    Ablation("an argument's attributes are its own", _arguments_as_own, "an attribute of an argument decides"),
    Ablation("functions beside methods read", _only_methods, "what a function does follows an argument"),
    Ablation(
        "functions of the file read what they are handed", _not_followed,
        "a branch hands features to a function of the file",
    ),
    Ablation("attributes of parts are set by the parts' code", _only_its_own, "an item of a list decides"),
    Ablation("a property is what it reads", _stored, "a property of a child decides"),
    Ablation("a method is what it branches on", _any_method, "a method of a child decides"),
    Ablation("members of an enumeration, and keys of tables, are tried", _no_choices, "a text picks a function"),
]  # fmt: skip

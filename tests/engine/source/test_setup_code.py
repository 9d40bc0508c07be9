"""Which functions build a model."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import engine
from engine.source.attribute_writes import assigned_attributes
from engine.source.setup_code import called_by_constructors_only, classes_inside, functions_of, is_setup


class Layer(nn.Module):
    """Sets attributes in methods: of its constructor, of its forward, as a hook, by a name, and from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(4, 8)
        self._set_up()
        self.register_forward_hook(self._hooked)
        self._named, self._deferred()
        name = "_by_a_name"
        getattr(self, name)()
        self._shared()
        self._aliased()
        self._partial(False)

    def _set_up(self) -> None:
        self.wide = False
        self._deeper()

    def _deeper(self) -> None:
        self.deep = False

    def _hooked(self, *args: object) -> None:
        self.hooked = True

    def _named(self) -> None:
        self.named = True

    def _by_a_name(self) -> None:
        self.by_a_name = True

    def _shared(self) -> None:
        self.shared = True

    def _deferred(self) -> None:
        self.later = lambda: self._in_a_lambda()

    def _in_a_lambda(self) -> None:
        self.in_a_lambda = True

    def apply_gate(self, x: Tensor) -> Tensor:
        """Change something that a constructor never sees."""
        self._gated()
        return x

    def _gated(self) -> None:
        self.gated = True

    def _aliased(self) -> None:
        self.aliased = True

    def _partial(self, value: bool) -> None:
        self.partial = value

    turned = functools.partialmethod(_partial, True)

    def _uncalled(self) -> None:
        self.uncalled = True

    def public(self) -> None:
        """Set an attribute."""
        self.set_from_outside = True

    def forward(self, x: Tensor) -> Tensor:
        """Return features, of which another flag would make something else."""
        self._shared()
        h = self.narrow(x)
        if self.wide:
            return h.flip(-1)
        return h  # type: ignore[no-any-return]


def test_private_methods_of_constructors() -> None:
    """Only those that nothing else calls, names or keeps."""
    private = {name for name, _ in functions_of(Layer) if name.startswith("_") and not is_setup(name)}
    assert called_by_constructors_only(frozenset({__name__})) & private == {"_set_up", "_deeper", "_deferred"}


def test_what_constructors_set_is_constant() -> None:
    """What their private methods assign does not change; what others assign may."""
    assigned = assigned_attributes(Layer())[Layer]
    assert not {"wide", "deep"} & assigned
    assert {
        "hooked",
        "named",
        "by_a_name",
        "shared",
        "in_a_lambda",
        "gated",
        "aliased",
        "partial",
        "uncalled",
        "set_from_outside",
    } <= assigned


HOOKS = [Layer._aliased]


class Net(nn.Module):
    """A layer whose flag only a private method of its constructor sets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = Layer(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        return self.last(self.layer(x))  # type: ignore[no-any-return]


def test_a_flag_of_a_constructor_keeps_no_channels() -> None:
    """The branch that did not run never does."""
    assert "layer.narrow" not in engine.not_safe_to_prune(Net(), torch.zeros(2, 4))


class Encoder(Net):
    """Holds the class that decodes, which holds it, and itself."""

    class Options:
        """What a method sets inside of a class."""

        def widen(self, net: Any) -> None:
            """Set an attribute of another object."""
            net.widened = True


class Decoder(Net):
    """Holds the class that encodes."""

    partner = Encoder


Encoder.partner, Encoder.kind = Decoder, Encoder  # type: ignore[attr-defined]


def test_classes_that_hold_one_another() -> None:
    """Each is read once, whichever the analysis begins with."""
    assert {cls.__name__ for cls in classes_inside(Encoder)} == {"Options", "Decoder"}
    assert {cls.__name__ for cls in classes_inside(Decoder)} == {"Options", "Encoder"}
    assert "widened" in assigned_attributes(Decoder())[Decoder]
    assert "layer.narrow" not in engine.not_safe_to_prune(Encoder(), torch.zeros(2, 4))


class Spike(torch.autograd.Function):
    """A step, whose class and the class of its backward pass hold one another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return ones above zero."""
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Pass gradients on."""
        return grad


class Spikes(nn.Module):
    """A layer of neurons, which computes with what a method of a class of torch's gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last, self.threshold = nn.Linear(4, 8), nn.Linear(8, 2), 0.5

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        spikes = Spike.apply(self.layer(x) - self.threshold)
        return self.last(spikes * self.threshold)  # type: ignore[no-any-return]


def test_functions_with_a_backward_pass() -> None:
    """Their base class in torch holds the class of its backward pass, and is held by it."""
    assert "layer" not in engine.not_safe_to_prune(Spikes(), torch.zeros(2, 4))


def test_names_of_builders() -> None:
    """What puts a model together, from a configuration say, or turns its branches into one layer."""
    assert all(map(is_setup, ["parse_model", "reparameterize", "switch_to_deploy", "fuse"]))
    assert not any(map(is_setup, ["forward", "set_width", "step"]))

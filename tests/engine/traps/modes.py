"""Traps: code that does something else while training, with gradients, or on the way back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.parametrizations as P
from torch import Tensor, nn

from engine.alternatives import modes
from engine.recording import train_mode
from engine.verification.training import TrainingProof
from tests.engine.exactness import Masks
from tests.engine.traps.trap import Ablation, Trap, once

__all__ = ["ABLATIONS", "TRAPS"]

KEPT = [1.0, 0, 1, 0, 1, 0, 1, 0]


def image(model: nn.Module) -> Tensor:
    """Return the example input of most networks."""
    return torch.zeros(2, 3, 6, 6, dtype=torch.float64)


def body_masks(model: nn.Module, seed: int) -> Masks:
    """Mask half of the channels of ``body``, of its norm too where there is one, so that they are zero."""
    kept = torch.tensor(KEPT, dtype=torch.float64)
    masks = {"body": {"weight": kept.view(-1, 1, 1, 1).expand_as(model.body.weight), "bias": kept}}
    return masks | ({"norm": {"weight": kept, "bias": kept}} if hasattr(model, "norm") else {})


class Net(nn.Module):
    """A layer, what a trap does with its output, and a layer that reads it.

    Args:
        middle: called with the network and the hidden channels.
    """

    def __init__(self, middle: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
        self.middle = middle
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        return self.head(self.middle(self, self.body(x)).relu())


def step(*shape: int, seed: int = 3) -> Callable[[nn.Module], Any]:
    """Return a use that trains for one step, and returns loss and gradients of inputs; dropout has to be off."""

    def use(model: nn.Module) -> Any:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()
        model.train().zero_grad()
        torch.manual_seed(seed)
        loss = model(x).square().mean()
        loss.backward()
        return loss, x.grad, model.head.weight.grad.square().sum(), model.body.weight.grad.square().sum()

    return use


def trap(
    name: str,
    source: str,
    middle: Callable[[Any, Tensor], Tensor],
    exact: bool | None = None,
    prepare: Callable[[Net], Any] = lambda net: None,
    parts: Callable[[], dict[str, nn.Module]] = dict,
    **options: Any,
) -> Trap:
    """Return a trap of the network above, used at another size in eval mode and for one step in train mode.

    Args:
        name: of it.
        source: where public code does this.
        middle: what happens between the layers.
        exact: what the certificate has to say of train mode.
        prepare: does something to the network.
        parts: makes modules for it.
        options: for the trap.
    """

    def make() -> nn.Module:
        net = Net(middle, **parts())
        prepare(net)
        return net

    defaults: dict[str, Any] = {"masks": body_masks, "shrinks": True, "seeds": (0,)}
    uses = [once(3, 3, 9, 7)]
    return Trap(
        name, source, make, image, uses, trains=[step(3, 3, 7, 7)], exact_in_train=exact, **{**defaults, **options}
    )


class CountingBackward(torch.autograd.Function):
    """Divides gradients by the number of channels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the input."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """Return less of the gradient the more channels there are."""
        return gradient / gradient.shape[1]


class ReverseGradient(torch.autograd.Function):
    """Reverses gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the input."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """Return it with the other sign."""
        return -gradient


class NormalisedBackward(torch.autograd.Function):
    """Gives the gradient unit length over the channels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the input."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """Return it divided by its mean over channels."""
        return gradient / gradient.abs().mean(1, keepdim=True).add(1e-3)


class RoundedThrough(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return whole numbers."""
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """Return the gradient as it is."""
        return gradient


class StochasticDepth(nn.Module):
    """Drops samples while training; asks for the mode as `how` says."""

    def __init__(self, how: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        """Return the input, or parts of it."""
        if not self.how(self):
            return x
        return x * x.new_empty([x.shape[0], 1, 1, 1]).bernoulli_(0.8) / 0.8


class TrainScale(nn.Module):
    """Scales channels while training: a leaf with a weight that eval mode never reads."""

    def __init__(self, how: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, 1, 1))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        """Return the input, scaled while training."""
        return x * self.scale if self.how(self) else x


class GaussianNoise(nn.Module):
    """Adds noise while training."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the input and noise."""
        return x + 0.1 * torch.randn_like(x) if self.training else x


class TrainHead(nn.Module):
    """A second head, called while training (deep supervision)."""

    def __init__(self, how: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self.body, self.head, self.aux = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, those of both heads while training."""
        y = self.body(x).relu()
        out: Tensor = self.head(y)
        return out + self.aux(y) if self.how(self) else out


class HeadByName(TrainHead):
    """Looks the mode up in its own table."""

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, those of both heads while training."""
        y = self.body(x).relu()
        out: Tensor = self.head(y)
        return out + self.aux(y) if self.__dict__["training"] else out


def divided(net: Any, x: Tensor) -> Tensor:
    """Return the input; its gradient is divided by its number of channels."""
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient / gradient.shape[1])
    return x


def clipped(net: Any, x: Tensor) -> Tensor:
    """Return the input; its gradient is clipped by its mean over all channels."""
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient.clamp(max=float(gradient.mean())))
    return x


def packed(net: Any, x: Tensor) -> Tensor:
    """Return the input squared; what its backward needs is kept divided by the number of channels."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t / t.shape[1], lambda t: t):
        return x * x


def halves(net: Any, x: Tensor) -> Tensor:
    """Return the input squared; what its backward needs is kept in half precision and comes back in full."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        return x * x


def counting_hook(net: Net) -> None:
    """Divide the gradient that reaches the layer by its channels, in a full backward hook."""
    net.body.register_full_backward_pre_hook(lambda module, out: (out[0] / out[0].shape[1],))


def detached(net: Any, x: Tensor) -> Tensor:
    """Return the input; what is stopped adds nothing to a gradient."""
    return x - x.detach() + x


def unfrozen(how: Callable[[nn.Module], bool]) -> Callable[[], nn.Module]:
    """Return what makes a network that asks."""
    return lambda: TrainHead(how)


_HOWS: dict[str, Callable[[Any], bool]] = {
    "an attribute": lambda m: m.training,
    "getattr": lambda m: getattr(m, "training"),  # noqa: B009
    "a helper": lambda m: is_training(m),
}


def is_training(module: nn.Module) -> bool:
    """Whether a module trains, as helper functions of many repositories tell."""
    return module.training


def _both(*shape: int) -> Callable[[nn.Module], Any]:
    """Return a use that runs the network in train mode, and with gradients in eval mode."""

    def use(model: nn.Module) -> Any:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        trained = model.train()(x).detach()
        return trained, model.eval()(x).detach()

    return use


def _heads(name: str, how: Callable[[Any], bool]) -> Trap:
    return Trap(
        f"a second head while training, told by {name}",
        "torchvision GoogLeNet, DeepLab auxiliary classifiers; PSPNet",
        unfrozen(how),
        image,
        [once(3, 3, 9, 7), _both(2, 3, 7, 7)],
        masks=body_masks,
        shrinks=True,
        seeds=(0,),
    )


def _asked(name: str, source: str, how: Callable[[Any], bool]) -> Trap:
    return Trap(
        name, source, unfrozen(how), image, [once(3, 3, 9, 7), _both(2, 3, 7, 7)], masks=body_masks, shrinks=True
    )


TRAPS = [
    trap("plain hidden channels while training", "any network", lambda net, x: x, True),
    trap(
        "a backward that counts channels",
        "Gradient scaling in a Function, as in DEQ and MoE code",
        lambda net, x: CountingBackward.apply(x),
        False,
    ),
    trap(
        "a backward that normalises over channels",
        "normalised gradient Functions (L2-normalised GAN gradients)",
        lambda net, x: NormalisedBackward.apply(x),
        False,
    ),
    trap("gradient reversal", "Ganin & Lempitsky 2015, DANN", lambda net, x: ReverseGradient.apply(x), True),
    trap(
        "a straight-through estimator",
        "Bengio et al. 2013; quantisation-aware training",
        lambda net, x: RoundedThrough.apply(x),
        True,
    ),
    trap(
        "a tensor hook that counts channels",
        "Tensor.register_hook, as for gradient scaling in AlphaFold code",
        divided,
        False,
    ),
    trap("a tensor hook that clips by a mean", "gradient clipping inside a network (RNN and RL code)", clipped, False),
    trap(
        "saved tensors that are scaled",
        "torch.autograd.graph.saved_tensors_hooks (activation compression)",
        packed,
        False,
    ),
    trap("saved tensors that are copied", "torch.autograd.graph.save_on_cpu", halves, True),
    trap(
        "a full backward hook that counts channels",
        "Module.register_full_backward_pre_hook (Grad-CAM tools)",
        lambda net, x: x,
        False,
        prepare=counting_hook,
    ),
    trap("a stopped gradient", "SimSiam, VQ-VAE", detached, True),
    trap(
        "checkpointed hidden channels",
        "torch.utils.checkpoint",
        lambda net, x: torch.utils.checkpoint.checkpoint(torch.relu, x, use_reentrant=False),
        True,
    ),
    trap(
        "a norm with batch statistics",
        "Ioffe & Szegedy 2015",
        lambda net, x: net.norm(x),
        True,
        parts=lambda: {"norm": nn.BatchNorm2d(8)},
    ),
    trap(
        "a norm without running statistics",
        "BatchNorm2d(track_running_stats=False)",
        lambda net, x: net.norm(x),
        None,
        parts=lambda: {"norm": nn.BatchNorm2d(8, track_running_stats=False)},
    ),
    Trap(
        "noise while training",
        "Gaussian noise layers (ladder networks)",
        lambda: Net(lambda net, x: net.noise(x), noise=GaussianNoise()),
        image,
        [once(3, 3, 9, 7)],
        masks=body_masks,
        shrinks=True,
        seeds=(0,),
        exact_in_train=False,
    ),
    Trap(
        "dropout between the layers",
        "Srivastava et al. 2014",
        lambda: Net(lambda net, x: F.dropout(x, 0.5, net.training)),
        image,
        [once(3, 3, 9, 7)],
        masks=body_masks,
        shrinks=True,
        seeds=(0,),
        exact_in_train=True,
        kept="Dropout was left out",
    ),
    trap(
        "a scale of weight norm",
        "Salimans & Kingma 2016",
        lambda net, x: net.mix(x),
        None,
        parts=lambda: {"mix": P.weight_norm(nn.Conv2d(8, 8, 1))},
    ),
    *(
        Trap(
            f"a scale while training in a leaf, told by {name}",
            "layers with parameters that only train mode reads",
            lambda how=how: Net(lambda net, x: net.part(x), part=TrainScale(how)),  # type: ignore[misc]
            image,
            [once(3, 3, 9, 7), _both(2, 3, 7, 7)],
            masks=body_masks,
            shrinks=True,
            seeds=(0,),
        )
        for name, how in _HOWS.items()
    ),
    *(_heads(name, how) for name, how in _HOWS.items()),
    replace(_heads("the module's own table", is_training), make=lambda: HeadByName(is_training)),
    *(
        Trap(
            f"stochastic depth, told by {name}",
            "Huang et al. 2016; torchvision.ops.StochasticDepth, timm DropPath",
            lambda how=how: Net(lambda net, x: net.part(x), part=StochasticDepth(how)),  # type: ignore[misc]
            image,
            [once(3, 3, 9, 7)],
            masks=body_masks,
            shrinks=True,
            seeds=(0,),
        )
        for name, how in _HOWS.items()
    ),
    _asked(
        "a second head with gradients",
        "torch.is_grad_enabled() in forward (memory-saving branches of detectron2)",
        lambda m: torch.is_grad_enabled(),
    ),
    _asked(
        "a second head outside of inference mode",
        "torch.is_inference_mode_enabled() in forward",
        lambda m: not torch.is_inference_mode_enabled(),
    ),
]


def _without_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingProof, "conclude", lambda self, certificate: certificate)


def _without_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "SWITCHES", {})


def _without_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_mode, "_alters_values_only", lambda *args: True)


def _without_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes._Watch, "__get__", lambda self, module, owner=None: vars(module)["training"])


ABLATIONS = [
    Ablation("one training step is compared", _without_a_step, "a backward that counts channels"),
    Ablation(
        "code that asks torch how it runs gets the other answer", _without_switches, "a second head with gradients"
    ),
    Ablation(
        "leaves are run alone in both modes", _without_leaves, "a scale while training in a leaf, told by getattr"
    ),
    Ablation("reads of the mode are watched", _without_reads, "a second head while training, told by a helper"),
]

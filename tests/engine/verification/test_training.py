"""What is called exact in train mode is what one training step, forward and backward, shows to be."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import TraceError, VerificationError
from engine.verification.training import largest_difference, training_step
from tests.engine.exactness import Masks, parameters, randomised


def net() -> nn.Sequential:
    """Return a network whose first layer loses half of its channels."""
    return randomised(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)))  # type: ignore[return-value]


def masks() -> Masks:
    """Mask channels in the norm as well."""
    kept = torch.tensor([1.0, 0, 1, 0, 1, 0, 1, 0])
    return {
        "0": {"weight": kept.view(-1, 1, 1, 1).expand(8, 3, 3, 3), "bias": kept},
        "1": {"weight": kept, "bias": kept},
    }


def image() -> Tensor:
    """Return an example input."""
    return torch.zeros(2, 3, 6, 6, dtype=torch.float64)


def compacted(model: nn.Module, **options: Any) -> engine.Certificate:
    """Compact a model, and return what the certificate says."""
    speedup = engine.ModelSpeedup(model, image(), masks(), confidence=2)
    speedup.speedup_model(**options)
    return speedup.certificate


def test_a_step_leaves_nothing_behind() -> None:
    """Neither gradients, statistics nor random numbers."""
    model, x = net(), torch.rand(2, 3, 6, 6).double()
    before, state, number = copy.deepcopy(model.state_dict()), torch.get_rng_state(), random.getstate()
    tensors = {name: t.detach() * 2 for name, t in model.state_dict().items()}
    step = training_step(model, tensors, ((x,), {}))
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state()) and number == random.getstate()
    assert not model.training and all(p.grad is None for p in model.parameters())
    assert step.gradients.keys() == dict(model.named_parameters()).keys() and step.inputs[0] is not None
    assert not torch.equal(step.buffers["1.running_mean"], tensors["1.running_mean"])


def test_a_step_with_other_numbers_differs() -> None:
    """In the place that is named."""
    model, inputs = net(), ((torch.rand(2, 3, 6, 6).double(),), {})
    tensors = {name: t.detach() for name, t in model.state_dict().items()}
    one = training_step(model, tensors, inputs)
    assert largest_difference(one, one, engine.Plan(), {})[0] == 0
    other = training_step(model, {**tensors, "3.weight": tensors["3.weight"] * 2}, inputs)
    assert largest_difference(one, other, engine.Plan(), {})[0] > 0.1


def test_a_step_can_be_another_call() -> None:
    """A loss, say, which is projected like any output."""
    model = net()
    tensors = {name: t.detach() for name, t in model.state_dict().items()}
    inputs = ((torch.rand(2, 3, 6, 6).double(),), {})
    step = training_step(model, tensors, inputs, lambda m, args, kwargs: m(*args).square().mean())
    assert step.outputs[0].ndim == 0 and step.gradients["0.weight"] is not None


@pytest.mark.parametrize("training", [False, True])
def test_repaired_masks_are_exact(training: bool) -> None:
    """In the step too."""
    model = net()
    assert compacted(model, training=training).exact_in_train and parameters(model) < parameters(net())


class Summed(torch.autograd.Function):
    """Sums over channels on its way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the input."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """Return the gradient over the number of channels."""
        return gradient / gradient.shape[1]


class Scaling(nn.Module):
    """Calls the function between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        hidden = self.net[2](self.net[1](self.net[0](x)))
        return self.net[3](Summed.apply(hidden))


def test_a_backward_that_counts_channels_is_noticed() -> None:
    """And no other is blamed; a model that trains on is left as it was."""
    prefixed = {f"net.{name}": entries for name, entries in masks().items()}
    speedup = engine.ModelSpeedup(Scaling(), image(), prefixed, confidence=2)
    speedup.speedup_model()
    assert speedup.certificate.verified and not speedup.certificate.exact_in_train
    assert "Train mode is not exact: in one training step" in speedup.certificate.notes[-1]
    model = Scaling()
    with pytest.raises(VerificationError, match="would change what is learned"):
        engine.ModelSpeedup(model, image(), prefixed, confidence=2).speedup_model(training=True)
    assert parameters(model) == parameters(Scaling())


def test_a_hook_that_masks_rows_is_noticed() -> None:
    """Its mask has the shape of before."""
    model = net()
    model[0].weight.register_hook(lambda gradient: gradient * torch.ones(8, 1, 1, 1, dtype=torch.float64))
    certificate = compacted(model)
    assert not certificate.exact_in_train and "does not train as the masked one does" in certificate.notes[-1]


def test_dropout_is_said_to_be_left_out() -> None:
    """And does not keep train mode from being compared."""
    model = nn.Sequential(*net()[:3], nn.Dropout(0.5), net()[3])
    certificate = compacted(model)
    assert certificate.exact_in_train and "Dropout was left out" in certificate.notes[-1]


class Wanting(nn.Module):
    """Wants targets while training."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return scores, or a loss."""
        if self.training and targets is None:
            raise ValueError("targets are wanted")
        return self.net(x)


def test_a_model_that_rejects_the_step_is_not_called_exact() -> None:
    """The reason is its own."""
    prefixed = {f"net.{name}": entries for name, entries in masks().items()}
    speedup = engine.ModelSpeedup(Wanting(), image(), prefixed, confidence=2)
    speedup.speedup_model()
    assert not speedup.certificate.exact_in_train
    assert any("not compared" in note and "targets are wanted" in note for note in speedup.certificate.notes)


def test_a_backward_that_fails_names_itself() -> None:
    """As an error of the engine."""
    model = net()

    def fail(gradient: Tensor) -> Tensor:
        raise ZeroDivisionError("no")

    model[3].weight.register_hook(fail)
    tensors = {name: t.detach() for name, t in model.state_dict().items()}
    with pytest.raises(TraceError, match="The backward of Sequential fails: ZeroDivisionError"):
        training_step(model, tensors, ((torch.rand(2, 3, 6, 6).double(),), {}))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("form", ["sparse", "quantised"])
def test_buffers_in_other_layouts_are_compared(form: str) -> None:
    """A training step leaves them as they were, which is compared by their entries."""
    model, table = net(), torch.eye(4)
    stored = table.to_sparse() if form == "sparse" else torch.quantize_per_tensor(table, 0.1, 0, torch.qint8)
    model.register_buffer("table", stored)
    assert compacted(model).exact_in_train


class Aligned(nn.Module):
    """A sparse buffer that is read, or that only other methods read, as Whisper's alignment heads are."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.read = read
        self.body, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1)
        self.register_buffer("heads", torch.eye(2).double().to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, mixed."""
        x = self.head(self.body(x).relu()).mean((2, 3))
        return torch.sparse.mm(self.heads, x.T) if self.read else x


@pytest.mark.parametrize("read", [False, True])
def test_a_sparse_buffer(read: bool) -> None:
    """It has no memory of its own, and is the same before and after."""
    model = Aligned(read).double()
    before = model.heads.to_dense().clone()
    kept = torch.tensor([1.0, 0, 1, 0, 1, 0, 1, 0])
    speedup = engine.ModelSpeedup(
        model, image(), {"body": {"weight": kept.view(-1, 1, 1, 1).expand(8, 3, 3, 3), "bias": kept}}, confidence=1
    )
    assert speedup.speedup_model().body.out_channels == 4  # type: ignore[union-attr]
    assert speedup.certificate.verified and model.heads.layout is torch.sparse_coo
    assert torch.equal(model.heads.to_dense(), before)


class RoundsOff(nn.Module):
    """A norm that computes in float32, as those of language models do (transformers' LlamaRMSNorm)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return channels with a root mean square of one."""
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def test_a_step_in_float64_is_not_rounded_off() -> None:
    """Where the code converts to float32, rounding is not a difference between masked and compacted."""
    kept = (torch.arange(96) % 3 > 0).float()
    rows = {"0": {"weight": kept.view(-1, 1).expand(96, 3), "bias": kept}}
    net = randomised(nn.Sequential(nn.Linear(3, 96), RoundsOff(96), nn.Linear(96, 4))).float()
    speedup = engine.ModelSpeedup(net, torch.rand(5, 3), rows, confidence=2)
    speedup.speedup_model()
    assert net[0].out_features == 64 and speedup.certificate.exact_in_train, speedup.certificate


def test_outputs_that_sum_to_one_have_a_gradient() -> None:
    """The direction that goes back is not the same for all entries, which a softmax would lose."""
    layer = nn.Linear(3, 4).double()
    model = nn.Sequential(layer, nn.Softmax(-1))
    tensors = {f"0.{name}": p for name, p in layer.named_parameters()}
    step = training_step(model, tensors, ((torch.randn(2, 3, dtype=torch.float64),), {}))
    assert all(gradient is not None and float(gradient.abs().max()) > 1e-6 for gradient in step.gradients.values())


def test_a_step_without_gradients_shows_nothing() -> None:
    """Where zeros come back from the outputs, train mode is not said to be exact."""

    class Signs(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sign()

    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), Signs()).double()
    mask = {"0": {"weight": torch.ones(4, 3), "bias": torch.ones(4)}}
    mask["0"]["weight"][0], mask["0"]["bias"][0] = 0, 0
    speedup = engine.ModelSpeedup(model, torch.randn(2, 3, dtype=torch.float64), mask)
    speedup.speedup_model()
    assert not speedup.certificate.exact_in_train
    assert "gradients of the training step are zero" in speedup.certificate.notes[-1]

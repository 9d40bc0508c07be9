"""The certificate compares entries: what they return and write, and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import VerificationError


class Net(nn.Module):
    """Two layers, with a count of calls and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 8, bias=False), nn.Linear(8, 2)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        return self.two(self.one(x).relu())

    def step(self, x: Tensor) -> Tensor:
        """Return a loss."""
        self.calls += 1
        return self.two(self.drop(self.one(x).relu())).pow(2).mean()


def compact(net: nn.Module, call: object, training: bool = True, **options: object) -> engine.ModelSpeedup:
    """Remove half of the channels, with an entry."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    graph = engine.trace(net, x, entries={"step": engine.Entry(call, (x,), training=training, **options)})
    masks = {"one": {"weight": torch.tensor([1, 0] * 4).view(8, 1).expand(8, 3)}}
    speedup = engine.ModelSpeedup(net, x, masks, confidence=2, graph=graph)
    speedup.speedup_model()
    return speedup


@pytest.mark.parametrize("training", [False, True])
def test_an_entry_is_compared(training: bool) -> None:
    """In both modes, dropout aside; the certificate says so, also once it was stored."""
    net = Net()
    speedup = compact(net, net.step, training)
    assert net.one.out_features == 4 and float(net.calls) == 0
    assert speedup.certificate.entries == ("step",) and speedup.certificate.max_error < 1e-9
    assert "entries compared: step" in str(speedup.certificate)
    assert engine.Certificate.from_state_dict(speedup.certificate.state_dict()) == speedup.certificate
    assert all(p.grad is None for p in net.parameters())


def test_a_step_that_converts_to_the_default_dtype_runs_in_float64() -> None:
    """As Lightning's precision plugins convert batches, and as new tensors are created."""
    net, dtypes = Net(), []

    def step(x: Tensor) -> Tensor:
        out = net.step(x.to(torch.get_default_dtype()) + torch.zeros(3))
        dtypes.append(out.dtype)
        return out

    speedup = compact(net, step)
    assert speedup.certificate.entries == ("step",) and dtypes[-1] is torch.float64
    assert torch.get_default_dtype() is torch.float32


def test_random_numbers_that_follow_the_channels() -> None:
    """They cannot be compared, and the certificate says so."""
    net = Net()

    def step(x: Tensor) -> Tensor:
        return net.two(torch.nn.functional.dropout(net.one(x), 0.5, net.training)).mean()

    speedup = compact(net, step)
    assert net.one.out_features == 4 and speedup.certificate.entries == ()
    assert any("'step' draws random numbers" in note for note in speedup.certificate.notes)


def test_a_difference_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry whose numbers differ, here as the recorder does not see it, is an error that names it."""
    net = Net()

    def step(x: Tensor) -> Tensor:
        return net(x).mean() * len(net.one.weight.tolist())

    monkeypatch.setattr("engine.tracer._run_entry", lambda *args: None)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    with pytest.raises(VerificationError, match="differs from the masked one in 'step'.*what it returns"):
        compact(net, step)
    assert all(torch.equal(before[name], t) for name, t in net.state_dict().items())


def test_an_entry_that_does_not_run() -> None:
    """It is named, with what it raised, and nothing has changed."""
    net = Net()
    with pytest.raises(engine.errors.TraceError, match="The entry 'step' cannot be recorded.*ValueError: no batch"):
        compact(net, lambda x: (_ for _ in ()).throw(ValueError("no batch")))


@pytest.mark.parametrize("mixes", [False, True])
def test_hooks_on_gradients(mixes: bool) -> None:
    """They may change each entry by itself, not by what the others are."""
    net = Net()

    def hooks() -> None:
        for parameter in net.parameters():
            parameter.grad.mul_(1 / parameter.grad.abs().mean() if mixes else 0.5)

    if mixes:
        with pytest.raises(VerificationError, match="after the gradients of 'step' change the gradient of"):
            compact(net, lambda x: net(x).mean(), after=hooks)
    else:
        assert compact(net, lambda x: net(x).mean(), after=hooks).certificate.entries == ("step",)


@pytest.mark.parametrize("wide", [True, False], ids=["of wide layers", "of narrow layers"])
def test_a_gradient_that_a_hook_drops_by_width_is_refused(wide: bool) -> None:
    """With masks or without, it is there in one of the two runs only."""
    net = Net()

    def drop() -> None:
        if (len(net.one.weight) > 5) is wide:
            net.one.weight.grad = None

    with pytest.raises(VerificationError, match=r"the gradient of 'one\.weight' differently"):
        compact(net, lambda x: net(x).mean(), after=drop)
    assert net.one.out_features == 8

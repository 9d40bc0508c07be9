"""Finding out by running a module; what it finds for each kind is in ``ops/test_opaque.py``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import engine
from engine.running.probe import Probe, channel_inputs
from tests.engine.nets import Net, image, snapshot, unchanged


class Counting(nn.Module):
    """Counts its calls in a buffer and in an attribute, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor, scale: float = 1.0, *, shift: Tensor) -> Tensor:
        """Return a shifted input."""
        self.calls += 1
        self.seen += 1
        return x * scale + shift + 0 * torch.rand(1).to(x)


def probe() -> tuple[Probe, nn.Module]:
    """Of a module called with a tensor, a number and a keyword."""
    model = Net(lambda m, x: m.own(x, 2.0, shift=x + 1), own=Counting()).double()
    node = next(n for n in engine.trace(model, image(), opaque=("own",)).nodes if n.module == "own")
    assert [v.shape for v in channel_inputs(node)] == [(2, 3, 6, 6)] * 2
    return Probe(node), model


def test_nothing_of_the_module_changes() -> None:
    """Buffers, attributes and the random state."""
    found, model = probe()
    before, state = snapshot(model), torch.get_rng_state()
    assert found.runs and found.passes() == (1, 2, 3)
    assert unchanged(model, before) and model.own.calls == 0 and torch.equal(torch.get_rng_state(), state)


def test_constants_of_several_inputs() -> None:
    """Both have to be known."""
    nan = torch.nan
    row = torch.tensor([1.0, 2.0, nan]).double(), torch.tensor([3.0, nan, 4.0]).double()
    found = probe()[0].constants(1, row)
    assert found[0][0] == 5 and found[0][1:].isnan().all()


def test_larger_noise() -> None:
    """At the named dimensions only; each draw is another."""
    found = probe()[0]
    assert {t.shape for t in found.noise((2,)).values()} == {(2, 3, 9, 6)}
    one, other = (next(iter(found.noise().values())) for _ in range(2))
    assert not torch.equal(one, other)

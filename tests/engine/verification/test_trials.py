"""Which runs a verdict rests on."""

from __future__ import annotations

import torch
from torch import nn

import engine
from engine.ops import RULES
from engine.verification.trials import Trial, agree, not_compared, random_inputs, sample_bytes
from tests.engine.nets import Net, image


def test_random_inputs_are_like_the_example() -> None:
    """Floating ones with its mean and deviation, at another batch size and resolution; integers are repeated."""
    example = (image(8) * 3 + 5, {"index": torch.tensor([3, 1]), "scale": torch.ones(4)})
    graph = engine.trace(
        Net(lambda m, x, extra: m.conv(x) * extra["scale"].sum(), conv=nn.Conv2d(3, 4, 1)).double(), example
    )
    (x, extra), keywords = random_inputs(graph, Trial(5, False, torch.float64), 0)
    assert x.shape == (5, 3, 8, 8) and abs(float(x.mean()) - 5) < 0.5 and abs(float(x.std()) - 3) < 0.5
    assert extra["index"].tolist() == [3, 1, 3, 1, 3] and extra["scale"].shape == (4,) and keywords == {}
    assert random_inputs(graph, Trial(None, True, None), 0)[0][0].shape == (2, 3, 16, 16)


def test_trials_can_be_read() -> None:
    """For the notes."""
    assert str(Trial(8, True, torch.float64)) == "at a larger resolution, batch size 8, float64"
    assert "the example's batch size, the model's own dtype" in str(Trial(None, False, None))
    assert str(Trial(1, False, torch.float64, 3, smaller=True)) == "at a smaller resolution, batch size 1, float64"


def test_a_sample_is_the_same_in_every_company() -> None:
    """So that samples can run one after the other, and one of them twice."""
    graph = engine.trace(nn.Conv2d(3, 4, 1).double(), image(8))
    together = random_inputs(graph, Trial(4, False, torch.float64), 0)[0][0]
    for first, batch in ((0, 1), (1, 2), (3, 1)):
        alone = random_inputs(graph, Trial(batch, False, torch.float64, first), 0)[0][0]
        assert torch.equal(alone, together[first : first + batch])
    assert len({float(x.sum()) for x in together}) == 4


def test_resolutions() -> None:
    """Half, larger by a factor or by 32, and larger along the last side alone."""
    sizes = (8, 100)
    assert Trial(1, False, None).sizes(sizes) == [8, 100] and Trial(1, True, None).sizes(sizes) == [16, 132]
    assert Trial(1, False, None, smaller=True).sizes(sizes) == [4, 50]
    assert Trial(1, True, None, wider=True).sizes(sizes) == [8, 132] and Trial(1, True, None).sizes(()) == []


def test_what_a_sample_takes() -> None:
    """What the hungriest op reads and makes, and the columns of its kernel, whatever the example's batch size."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 3, padding=1), nn.ReLU()).double()
    for batch in (1, 3):
        graph = engine.trace(model, image(8, batch))
        assert sample_bytes(graph, RULES, 0, Trial(None, False, None)) == 8 * (4 + 5 + 9 * 4) * 64
        assert sample_bytes(graph, RULES, 0, Trial(None, True, None)) == 8 * (4 + 5 + 9 * 4) * 256


def test_outputs_of_a_sample_in_other_company() -> None:
    """They agree up to rounding, or one of them depends on the samples beside it."""
    whole, alone = torch.rand(3, 4).double(), torch.rand(2, 4).double()
    alone[0] = whole[2] * (1 + 1e-12)
    assert agree([whole], [alone], 2, 0, 1e-9) and not agree([whole], [alone], 1, 0, 1e-9)
    assert not agree([whole], [alone, alone], 2, 0, 1e-9) and not agree([whole.sum()], [alone.sum()], 0, 0, 1e-9)
    assert not agree([whole], [alone], 3, 0, 1e-9) and not agree([whole], [alone.float()], 2, 0, 1e-9)
    order, other = whole.argsort(1), alone.argsort(1)
    assert agree([order], [other], 2, 0, 1e-9) and agree([whole[:, :0]], [alone[:, :0]], 2, 0, 1e-9)


def test_what_was_not_compared_is_said_once() -> None:
    """Each cause once, without shapes and advice; in short where a note names it already."""
    error = "Net rejected the example input (({}, 3, 9) float64): ValueError: no (9).. Pass example inputs that …"
    rejected = [(Trial(b, True, torch.float64), error.format(b)) for b in (1, 2, None)]
    rejected.append((Trial(8, False, torch.float64), "no luck."))
    where = "at a larger resolution, batch size 1 or batch size 2 or the example's batch size, float64"
    other = "Not compared at the example's resolution, batch size 8, float64: the model rejects that, with no luck."
    first = f"Not compared {where}: the model rejects that, "
    assert list(not_compared(rejected)) == [f"{first}with ValueError: no (9).", other]
    assert list(not_compared(rejected, ["ValueError: no (9)"])) == [f"{first}as above.", other]

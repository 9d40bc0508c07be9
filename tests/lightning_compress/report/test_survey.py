"""What a model is made of, and how long it takes."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

import engine
from lightning_compress.report.survey import Survey, check_runs, latency, survey
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.models import Net

X = torch.ones(1, 3, 8, 8)


def test_layers_have_the_costs_of_the_counter() -> None:
    """By first use; the sums are the model's."""
    net = Net()
    found = survey(net, X)
    assert [(layer.name, layer.kind, layer.channels) for layer in found.layers] == [
        ("stem", "Conv2d", 8),
        ("wide", "Conv2d", 16),
        ("back", "Conv2d", 8),
        ("fc", "Linear", 3),
    ]
    assert sum(layer.macs for layer in found.layers) == found.macs
    assert found.params == sum(p.numel() for p in net.parameters())
    assert found.size == sum(t.numel() * t.element_size() for t in (*net.parameters(), *net.buffers()))
    assert found.latency is None


def test_axes_say_what_masks_keep_and_why_some_stay() -> None:
    """The residual sum couples; the output cannot go."""
    net = Net()
    masks = {"stem": {"weight": torch.ones(8, 3, 3, 3)}, "back": {"weight": torch.ones(8, 16, 3, 3)}}
    for own in masks.values():
        own["weight"][:3] = 0
    axes = {axis.name: axis for axis in survey(net, X, masks).axes}
    assert axes["stem"].layers == ("stem", "back") and (axes["stem"].kept, axes["stem"].size) == (5, 8)
    assert axes["fc"].reason == "is an output of the model"


def test_it_is_stored_as_primitives(tmp_path: pytest.TempPathFactory) -> None:
    """Readable with weights_only, and equal afterwards."""
    found = survey(Net(), X, runs=1)
    torch.save(found.state_dict(), f"{tmp_path}/survey.pt")
    assert Survey.from_state_dict(torch.load(f"{tmp_path}/survey.pt", weights_only=True)) == found


class Slow(nn.Module):
    """Takes 5 ms in eval mode, long in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Wait."""
        time.sleep(1 if self.training else 0.005)
        return self.layer(x)


def test_latency_is_milliseconds_of_eval_mode_and_leaves_the_mode() -> None:
    """The random state stays too."""
    net, state = Slow().train(), torch.get_rng_state()
    assert 5 <= latency(net, torch.ones(1, 2), runs=3) < 100
    assert net.training and torch.equal(torch.get_rng_state(), state)


def test_a_rejected_example_names_the_model() -> None:
    """As everywhere."""
    with pytest.raises(engine.errors.TraceError, match="Net rejected the example input"):
        latency(Net(), torch.ones(1, 2), runs=1)


@pytest.mark.parametrize("runs", [-1, True, 1.5])
def test_a_wrong_number_of_runs(runs: object) -> None:
    """It names the argument."""
    with pytest.raises(MisconfigurationException, match="latency_runs"):
        check_runs(runs)  # type: ignore[arg-type]

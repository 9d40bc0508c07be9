"""Where the certificate looks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.witness import Witness
from tests.engine.exactness import check_exact, randomised
from tests.engine.nets import Mean, Net, analysis_of, dead, image, plain


def test_it_looks_at_norms_and_contractions() -> None:
    """At the channels that stay and are used, by their place before and after."""
    model = plain()
    witness = Witness.of(
        analysis_of(
            model,
            image(),
            dead(model, {"0": [0, 2]}, bias=True)
            | {"1": {"weight": torch.tensor([0.0, 1, 0, 1, 1, 1]), "bias": torch.tensor([0.0, 1, 0, 1, 1, 1])}},
        )
    )
    assert [n.module for n in witness.nodes] == ["0", "1", "3", "4", "7"]
    assert witness.before[0].tolist() == [1, 3, 4, 5] and witness.after[0].tolist() == [0, 1, 2, 3]
    assert witness.before[4] is None or len(witness.before[4]) == 3
    assert witness.dims == (1, 1, 1, 1, 1)


def test_unused_channels_are_not_looked_at() -> None:
    """They may be anything."""
    model = plain()
    mask = torch.ones(5, 6, 3, 3)
    mask[:, 5] = 0
    witness = Witness.of(analysis_of(model, image(), {"3": {"weight": mask}}))
    assert witness.before[0].tolist() == [0, 1, 2, 3, 4]


def test_an_output_shifted_into_a_running_mean_is_skipped() -> None:
    """The convolution's own output differs by the constant that the norm behind takes up."""
    model = randomised(
        nn.Sequential(
            nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), Mean(), nn.Linear(4, 2)
        )
    )
    analysis = analysis_of(model, image(), dead(model, {"0": [0, 1, 2]}))
    assert analysis.plan.folds[0].name == "2.running_mean"
    witness = Witness.of(analysis)
    sizes = {n.module: b if b is None else len(b) for n, b in zip(witness.nodes, witness.before, strict=True)}
    assert sizes["1"] == 0 and sizes["2"] == 4


def test_a_model_without_either_has_nothing_to_look_at() -> None:
    """Only its outputs are compared."""
    witness = Witness.of(analysis_of(nn.ReLU(), torch.randn(2, 3), {}))
    assert witness.nodes == () and witness.before == ()


def test_a_linear_layer_over_positions() -> None:
    """Its output loses channels along another dimension than its own: that is no difference."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head((x.flatten(2) + m.mix(x.flatten(2))).mean(2))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 6, 1), mix=nn.Linear(36, 36), head=nn.Linear(6, 2)))
    columns = torch.ones(2, 6)
    columns[:, :2] = 0
    plan = check_exact(model, {"head": {"weight": columns}}, image())
    assert plan.slices["stem.weight"].shape[0] == 4
    check_exact(model, dead(model, {"stem": [0, 1], "mix": [3, 4]}, bias=True), image())

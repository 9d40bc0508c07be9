"""Where the certificate looks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.verification.certify import observe
from engine.verification.comparison import compare
from engine.verification.witness import Channels, Witness
from tests.engine.attentions import Sized
from tests.engine.exactness import check_exact, randomised
from tests.engine.nets import Mean, Net, analysis_of, dead, image, plain


def indices(channels: Channels) -> dict[int, list[int]]:
    """What is compared, by dimension."""
    assert channels is not None
    return {dim: index.tolist() for dim, index in channels.items()}


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
    assert indices(witness.before[0]) == {1: [1, 3, 4, 5]} and indices(witness.after[0]) == {1: [0, 1, 2, 3]}
    assert indices(witness.before[4]) == {1: [0, 1, 2]} == indices(witness.after[4])
    assert witness.dims == (1, 1, 1, 1, 1)


def test_unused_channels_are_not_looked_at() -> None:
    """They may be anything."""
    model = plain()
    mask = torch.ones(5, 6, 3, 3)
    mask[:, 5] = 0
    witness = Witness.of(analysis_of(model, image(), {"3": {"weight": mask}}))
    assert indices(witness.before[0]) == {1: [0, 1, 2, 3, 4]}


def test_unused_channels_that_have_to_stay_are_not_looked_at_either() -> None:
    """A size that is written down keeps the channel; what it holds does not matter."""
    model = randomised(Sized("literal"))
    columns = torch.ones(2, 8).index_fill(1, torch.tensor([5]), 0)
    analysis = analysis_of(model, image(), {"head": {"weight": columns}})
    assert "stem.weight" not in analysis.plan.slices
    assert indices(Witness.of(analysis).before[0]) == {1: [0, 1, 2, 3, 4, 6, 7]}


def test_a_node_that_nobody_uses_is_skipped() -> None:
    """Nothing of it has an influence, so nothing of it is compared."""
    model = plain()
    witness = Witness.of(analysis_of(model, image(), {"3": {"weight": torch.zeros(5, 6, 3, 3)}}))
    modules = [n.module for n in witness.nodes]
    assert witness.before[modules.index("0")] is None is witness.after[modules.index("0")]
    assert witness.before[modules.index("7")] is not None


def test_norms_over_channels_are_looked_at_where_those_are() -> None:
    """The channels of a layer norm are its last dimension, of a linear layer too; of others the first after batch."""
    model = randomised(nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3)))
    kept = torch.ones(8).index_fill(0, torch.tensor([2, 7]), 0)
    masks = dead(model, {"0": [2, 7]}, bias=True) | {"1": {"weight": kept, "bias": kept}}
    witness = Witness.of(analysis_of(model, torch.randn(2, 4, 5, dtype=torch.float64), masks))
    assert [n.op for n in witness.nodes] == ["linear", "layer_norm", "linear"] and witness.dims == (2, 2, 2)
    assert indices(witness.before[1]) == {2: [0, 1, 3, 4, 5, 6]} and indices(witness.after[1]) == {2: [*range(6)]}


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
    before = {n.module: b for n, b in zip(witness.nodes, witness.before, strict=True)}
    assert before["1"] is None and indices(before["2"]) == {1: [0, 1, 2, 3]}


def test_a_model_without_either_has_nothing_to_look_at() -> None:
    """Only its outputs are compared."""
    witness = Witness.of(analysis_of(nn.ReLU(), torch.randn(2, 3), {}))
    assert witness.nodes == () and witness.before == ()


def test_a_linear_layer_over_positions() -> None:
    """Its output loses channels along another dimension than its own: that is not a difference."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head((x.flatten(2) + m.mix(x.flatten(2))).mean(2))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 6, 1), mix=nn.Linear(36, 36), head=nn.Linear(6, 2)))
    columns = torch.ones(2, 6)
    columns[:, :2] = 0
    witness = Witness.of(analysis_of(model, image(), {"head": {"weight": columns}}))
    mixed = [n.module for n in witness.nodes].index("mix")
    assert indices(witness.before[mixed])[1] == [2, 3, 4, 5] and indices(witness.after[mixed])[1] == [0, 1, 2, 3]
    plan = check_exact(model, {"head": {"weight": columns}}, image())
    assert plan.slices["stem.weight"].shape[0] == 4
    check_exact(model, dead(model, {"stem": [0, 1], "mix": [3, 4]}, bias=True), image())


def test_a_product_of_activations_is_counted_beside_one_that_is_a_layer() -> None:
    """They are one op: what comes when is told by counting its calls, and only the layer is looked at."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = torch.tanh(m.first(x))
        y = (x @ x.mT / 4).softmax(-1) @ x
        return m.last(torch.tanh(y @ m.middle.weight.T))

    model = randomised(Net(forward, first=nn.Linear(5, 8), middle=nn.Linear(8, 6, bias=False), last=nn.Linear(6, 3)))
    masks = dead(model, {"middle": [0, 3]})
    tokens = torch.randn(2, 4, 5).double()
    witness = Witness.of(analysis_of(model, tokens, masks))
    assert [node.op for node in witness.nodes] == ["linear", "matmul", "matmul", "matmul", "linear"]
    assert witness.dims == (2, -1, -1, 2, 2) and witness.before[1] is None and witness.before[2] is None
    assert indices(witness.before[3]) == {2: [1, 2, 4, 5]} and indices(witness.after[3]) == {2: [0, 1, 2, 3]}
    speedup = engine.ModelSpeedup(model, tokens, masks)
    speedup.speedup_model()
    assert speedup.certificate.compared == 3 and speedup.certificate.max_error < 1e-9


def test_another_way_through_the_code_than_the_recorded_one_is_not_looked_at() -> None:
    """Where data decide how often a layer runs, positions mean nothing; outputs are compared all the same."""

    def forward(m: Net, tokens: Tensor) -> Tensor:
        x = torch.tanh(m.first(tokens))
        for _ in range(1 + int(tokens[0, 0] > 0)):
            x = torch.tanh(m.middle(x))
        return m.last(x)

    model = randomised(Net(forward, first=nn.Linear(5, 8), middle=nn.Linear(8, 8), last=nn.Linear(8, 3)))
    told, examples = [], torch.randn(6, 2, 5).double()
    examples[:, 0, 0] = torch.tensor([1.0, -1.0] * 3)
    for example in examples:
        small = copy.deepcopy(model)
        masks = dead(model, {"first": [1, 2], "middle": [1, 2]}, bias=True)
        speedup = engine.ModelSpeedup(small, example, masks)
        speedup.speedup_model()
        assert speedup.certificate.verified and speedup.certificate.max_error < 1e-9
        told.append("took another path through its code" in " ".join(speedup.certificate.notes))
    assert any(told) and not all(told)  # the random input has one sign, and the examples have both


def test_modules_whose_order_the_data_decide_are_told_apart() -> None:
    """As many layers of one kind run, and each is held against itself: they have other widths."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = torch.tanh(m.first(x))
        for part in (m.left, m.right) if x[0, 0] > 0 else (m.right, m.left):
            x = x + part(x)
        return m.last(x)

    def part(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8))

    model = randomised(Net(forward, first=nn.Linear(5, 8), left=part(6), right=part(6), last=nn.Linear(8, 3)))
    masks = dead(model, {"left.0": [0, 1], "right.0": [2]}, bias=True)
    told = []
    for example in torch.randn(6, 2, 5).double():
        small = copy.deepcopy(model)
        speedup = engine.ModelSpeedup(small, example, masks)
        speedup.speedup_model()
        assert speedup.certificate.compared == 6 and speedup.certificate.max_error < 1e-9
        told.append("took another path through its code" in " ".join(speedup.certificate.notes))
    assert any(told) and not all(told)


def test_what_differs_inside_is_found_on_another_way() -> None:
    """A channel that the output hides is held against itself behind a fork, too."""

    def forward(m: Net, x: Tensor) -> Tensor:
        y = torch.tanh(m.first(x))
        for part in (m.left, m.right) if x[0, 0] > 0 else (m.right, m.left):
            y = y + part(y)
        return m.last(y)

    parts = {name: nn.Linear(8, 8) for name in ("left", "right")}
    model = randomised(Net(forward, first=nn.Linear(5, 8), **parts, last=nn.Linear(8, 3)))
    masks = dead(model, {"left": [0]}, bias=True)
    witness = Witness.of(analysis_of(model, -torch.ones(2, 5).double(), masks))
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.last.weight[:, 3], other.last.weight[:, 3] = 0, 0
        other.right.bias[3] += 1
    inputs = ((torch.ones(2, 5).double(),), {})
    one = observe(model, model.state_dict(), inputs, witness, witness.looks[0])
    two = observe(other, other.state_dict(), inputs, witness, witness.looks[0], one, 1e-9)
    assert one.diverged and two.diverged and torch.equal(one.outputs[0], two.outputs[0])
    error, where = compare(one, two, witness, 1e-9)
    assert error > 1e-3 and "'right'" in where


class Prenet(nn.Module):
    """Dropout that is on in eval mode, as Tacotron 2 has it before its recurrent layers."""

    def __init__(self, steps: bool) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(5, 12), nn.Linear(12, 8), nn.Linear(8, 3)
        self.cell = nn.LSTM(8, 8, batch_first=True) if steps else None

    def forward(self, x: Tensor) -> Tensor:
        """Return frames."""
        for layer in (self.one, self.two):
            x = nn.functional.dropout(layer(x).relu(), 0.5, training=True)
        return self.out(x if self.cell is None else self.cell(x)[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("steps", [False, True])
def test_random_numbers_in_eval_mode_are_named(steps: bool) -> None:
    """A narrower model draws fewer: both are compared with the same ones."""
    model = randomised(Prenet(steps))
    kept = (torch.arange(12) % 2).double()
    masks = {"one": {"weight": kept[:, None].expand(12, 5), "bias": kept}}
    speedup = engine.ModelSpeedup(model, torch.zeros(2, 4, 5, dtype=torch.float64), masks, confidence=1)
    assert speedup.speedup_model().one.out_features == 6  # type: ignore[union-attr]
    assert speedup.certificate.verified
    assert any("dropout" in note and "in eval mode" in note for note in speedup.certificate.notes)


def test_a_model_that_draws_nothing_says_nothing() -> None:
    """Attention and recurrent layers that drop nothing in eval mode."""
    model = randomised(nn.Sequential(nn.Linear(5, 12), nn.Dropout(0.5), nn.LSTM(12, 4, 2, dropout=0.5)))
    kept = (torch.arange(12) % 2).double()
    masks = {"0": {"weight": kept[:, None].expand(12, 5), "bias": kept}}
    speedup = engine.ModelSpeedup(model, torch.zeros(2, 4, 5, dtype=torch.float64), masks, confidence=1)
    speedup.speedup_model()
    assert not any("in eval mode" in note for note in speedup.certificate.notes)

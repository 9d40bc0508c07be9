"""Recurrent layers lose inputs and hidden units, exactly; and are counted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from tests.engine.exactness import KINDS, Masks, check_exact, randomised
from tests.engine.nets import Net, dead

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(6, 4, batch_first=True),
    "LSTM with a projection": lambda: nn.LSTM(6, 8, proj_size=4, batch_first=True),
    "two layers": lambda: nn.LSTM(6, 4, num_layers=2, batch_first=True),
    "both directions": lambda: nn.GRU(6, 2, bidirectional=True, batch_first=True),
    "GRU without bias": lambda: nn.GRU(6, 4, bias=False, batch_first=True),
    "RNN": lambda: nn.RNN(6, 4, batch_first=True),
    "RNN with relu": lambda: nn.RNN(6, 4, nonlinearity="relu", batch_first=True),
}
CELLS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTMCell(6, 4),
    "GRU": lambda: nn.GRUCell(6, 4),
    "RNN": lambda: nn.RNNCell(6, 4),
    "RNN with relu": lambda: nn.RNNCell(6, 4, nonlinearity="relu"),
}


def sequence(layer: nn.Module) -> nn.Module:
    """Two layers, a recurrent one, and two behind it."""

    def forward(m: Net, x: Tensor) -> Tensor:
        steps, _ = m.layer(torch.tanh(m.first(torch.relu(m.front(x)))))
        return m.out(torch.relu(m.hidden(steps[:, -1])))

    parts = {"front": nn.Linear(5, 7), "first": nn.Linear(7, 6), "hidden": nn.Linear(4, 6), "out": nn.Linear(6, 3)}
    return randomised(Net(forward, layer=layer, **parts))


def stepwise(cell: nn.Module) -> nn.Module:
    """The same with a cell and a loop."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = torch.tanh(m.first(torch.relu(m.front(x))))
        state: Any = None
        for step in x.unbind(1):
            state = m.layer(step, state)
        return m.out(torch.relu(m.hidden(state[0] if isinstance(state, tuple) else state)))

    parts = {"front": nn.Linear(5, 7), "first": nn.Linear(7, 6), "hidden": nn.Linear(4, 6), "out": nn.Linear(6, 3)}
    return randomised(Net(forward, layer=cell, **parts))


MODELS = {f"{n} layer": lambda make=make: sequence(make()) for n, make in LAYERS.items()} | {
    f"{n} cell": lambda make=make: stepwise(make()) for n, make in CELLS.items()
}


def steps(batch: int = 2, length: int = 4) -> Tensor:
    """Random input of shape (batch, length, 5)."""
    return torch.randn(batch, length, 5, dtype=torch.float64)


def halved(model: nn.Module, *inputs: Tensor, seed: int = 0) -> Masks:
    """Masks that close half of every group, chosen by chance, equally many of each row."""
    keep = {}
    generator = torch.Generator().manual_seed(seed)
    for group in engine.dependency_groups(model, inputs):
        if group.reason is None:
            keep[group.name] = stays = torch.ones(group.size, dtype=torch.bool)
            for row in group.rows.unique():
                members = (group.rows == row).nonzero()[:, 0]
                order = torch.randperm(len(members), generator=generator)
                stays[members[order[: len(members) // 2]]] = False
    return engine.group_masks(engine.dependency_groups(model, inputs), keep)


def groups(model: nn.Module, *inputs: Tensor) -> dict[str, str | None]:
    """Name and reason of each group."""
    return {g.name: g.reason for g in engine.dependency_groups(model, inputs)}


@pytest.mark.parametrize("name", MODELS)
def test_half_of_all_units(name: str) -> None:
    """Inputs, hidden units and what is put out: the compacted model is half as wide, and the same function."""
    model = MODELS[name]()
    lengths = [steps(3, 6), steps(1, 1)] if "layer" in name else [steps(3)]
    plan = check_exact(model, halved(model, steps()), steps(), *lengths)
    before, layer = model.layer, plan.apply(model).layer
    assert layer is before and layer.input_size == 3
    assert layer.hidden_size == (1 if "both" in name else 4 if "projection" in name else 2)
    assert getattr(layer, "proj_size", 0) == (2 if "projection" in name else 0)
    if "layer" in name:
        assert all(any(w is p for p in layer.parameters()) for w in layer._flat_weights)
        assert [tuple(w.shape) for w in layer._flat_weights] == [tuple(p.shape) for p in layer.parameters()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["LSTM layer", "LSTM with a projection layer", "both directions layer", "GRU cell"])
def test_any_masks(name: str, kind: str) -> None:
    """Also of the recurrent weights themselves: exact."""
    model = MODELS[name]()
    check_exact(model, KINDS[kind](model, 6), steps(), steps(3))


# ---------------------------------------------------------------- states, and who reads them


def reading(forward: Callable[..., Any], width: int, layer: nn.Module, **parts: nn.Module) -> nn.Module:
    """A layer of three features, and a linear one that reads ``width``."""
    return randomised(Net(forward, layer=layer, out=nn.Linear(width, 2), **parts))


def features(batch: int = 2, length: int = 5) -> Tensor:
    """Random input of shape (batch, length, 3)."""
    return torch.randn(batch, length, 3, generator=torch.Generator().manual_seed(length), dtype=torch.float64)


READERS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    # groups of hidden units, and the network
    "last state": (2, lambda: reading(lambda m, x: m.out(m.layer(x)[1][0][-1]), 4, nn.LSTM(3, 4, 2, batch_first=True))),
    "last states of both directions": (
        4,
        lambda: reading(
            lambda m, x: m.out(torch.cat([(h := m.layer(x)[1])[-2], h[-1]], 1)),
            8,
            nn.GRU(3, 4, 2, batch_first=True, bidirectional=True),
        ),
    ),
    "all states": (
        4,
        lambda: reading(
            lambda m, x: m.out(m.layer(x)[1].transpose(0, 1).flatten(1)),
            16,
            nn.GRU(3, 4, 2, batch_first=True, bidirectional=True),
        ),
    ),
    "a slice of the states": (
        4,
        lambda: reading(
            lambda m, x: m.out(m.layer(x)[1][-2:].transpose(0, 1).flatten(1)),
            8,
            nn.GRU(3, 4, 2, batch_first=True, bidirectional=True),
        ),
    ),
    "the mean of both directions": (
        3,  # what is averaged goes together
        lambda: reading(
            lambda m, x: m.out(m.layer(x)[1].view(2, 2, x.shape[0], -1)[1].mean(0)),
            4,
            nn.GRU(3, 4, 2, batch_first=True, bidirectional=True),
        ),
    ),
    "cell states": (
        2,
        lambda: reading(lambda m, x: m.out(m.layer(x)[1][1][-1]), 4, nn.LSTM(3, 4, 2, batch_first=True)),
    ),
    "a decoder that starts from them": (
        2,
        lambda: reading(
            lambda m, x: m.out(m.decoder(x.flip(1), m.layer(x)[1])[0]),
            4,
            nn.LSTM(3, 4, 2, batch_first=True),
            decoder=nn.LSTM(3, 4, 2, batch_first=True),
        ),
    ),
    "zeros of the layer's size": (
        2,
        lambda: reading(
            lambda m, x: m.out(m.layer(x, x.new_zeros(2, x.shape[0], m.layer.hidden_size))[0]),
            4,
            nn.GRU(3, 4, 2, batch_first=True),
        ),
    ),
    "what is added to the input": (
        2,
        lambda: reading(
            lambda m, x: m.out(m.first(x) + m.layer(m.first(x))[0]),
            4,
            nn.LSTM(4, 4, 2, batch_first=True),
            first=nn.Linear(3, 4),
        ),
    ),
    "its own output": (
        1,
        lambda: reading(
            lambda m, x: m.out(m.layer(m.layer(m.first(x))[0])[0]),
            4,
            nn.LSTM(4, 4, batch_first=True),
            first=nn.Linear(3, 4),
        ),
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_who_reads_what(name: str) -> None:
    """Each layer and direction loses units of its own, unless what reads them ties them."""
    count, make = READERS[name]
    model = make()
    plain = engine.trace(nn.LSTM(3, 4, 2, batch_first=True).double(), features()).nodes[-1].outputs[1]
    if "decoder" in name and plain.ndim != 3:
        pytest.skip("without data, this version of torch makes states of four dimensions in float64")
    free = [n for n, reason in groups(model, features()).items() if reason is None]
    assert len(free) == count
    plan = check_exact(model, halved(model, features()), features(), features(3, 4))
    assert plan.attributes["layer"]["hidden_size"] == 2


def test_a_trained_initial_state() -> None:
    """It is cut along, and stays where it is not zero although the rows are."""

    class Started(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.state, self.layer = nn.Parameter(torch.randn(2, 1, 4)), nn.GRU(3, 4, 2, batch_first=True)
            self.out = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.layer(x, self.state.expand(-1, len(x), -1).contiguous())[0])

    model = randomised(Started())
    masks = halved(model, features())
    assert check_exact(model, masks, features(), features(3)).slices["state"].shape == (2, 1, 2)
    masks[""]["state"] = torch.ones(2, 1, 4)
    assert "state" not in check_exact(model, masks, features()).slices


def test_states_of_fixed_size_are_named() -> None:
    """One that is given, or made of a number that the author wrote down, holds the units, with the reason."""
    layer = nn.GRU(3, 4, batch_first=True)
    made = reading(lambda m, x: m.out(m.layer(x, torch.zeros(1, x.shape[0], 4, dtype=x.dtype))[0]), 4, layer)
    assert "is given the size 4" in str(groups(made, features())["layer"])
    given = reading(lambda m, x, h: m.out(m.layer(x, h)[0]), 4, layer)
    state = torch.zeros(1, 2, 4, dtype=torch.float64)
    assert "starts from a state of fixed size" in str(groups(given, features(), state)["layer"])
    returned = randomised(Net(lambda m, x: m.layer(x)[1], layer=layer))
    assert groups(returned, features())["layer"] == "is an output of the model"


def test_constants_of_inputs() -> None:
    """They go into the bias, at each direction; without a bias one channel carries the others."""
    for bias, left in ((True, 3), (False, 4)):
        layer = nn.GRU(6, 4, bias=bias, batch_first=True, bidirectional=True)
        model = reading(lambda m, x: m.out(m.layer(torch.sigmoid(m.first(x)))[0]), 8, layer, first=nn.Linear(3, 6))
        plan = check_exact(model, dead(model, {"first": [0, 2, 3]}, bias=True), features(), features(3, 4))
        assert plan.attributes["layer"]["input_size"] == left
        assert sorted(fold.name for fold in plan.folds) == [
            f"layer.{'bias' if bias else 'weight'}_ih_l0{end}" for end in ("", "_reverse")
        ]


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_sequence_without_a_batch(batch_first: bool) -> None:
    """(steps, features)."""
    layer = nn.LSTM(3, 8, 2, proj_size=4, batch_first=batch_first)
    model = reading(lambda m, x: m.out(m.layer(x)[0]), 4, layer)
    plan = check_exact(model, halved(model, features()[0]), features()[0])
    assert plan.attributes["layer"] == {"hidden_size": 4, "proj_size": 2}


# ---------------------------------------------------------------- whole networks


def test_a_language_model() -> None:
    """Embedding, two layers, linear: at other lengths and batch sizes; in train mode too, dropout aside."""
    parts = {"table": nn.Embedding(11, 6), "out": nn.Linear(8, 11)}
    layer = nn.LSTM(6, 8, 2, dropout=0.3, batch_first=True)
    model = randomised(Net(lambda m, ids: m.out(m.layer(m.table(ids))[0]), layer=layer, **parts))
    ids = torch.randint(11, (2, 6))
    plan = check_exact(model, halved(model, ids), ids, torch.randint(11, (3, 9)), torch.randint(11, (1, 1)))
    assert plan.attributes["layer"] == {"input_size": 3, "hidden_size": 4}
    assert plan.slices["table.weight"].shape == (11, 3) and plan.slices["out.weight"].shape == (11, 4)
    speedup = engine.ModelSpeedup(copy.deepcopy(model), ids, halved(model, ids))
    speedup.speedup_model()
    assert speedup.certificate.exact_in_train and speedup.certificate.compared >= 2


def test_state_dict_and_optimizer() -> None:
    """Keys stay, and Adam's averages are cut along with the rows of all gates."""
    model = reading(lambda m, x: m.out(m.layer(x)[0]), 8, nn.GRU(3, 4, batch_first=True, bidirectional=True))
    masks, keys = halved(model, features()), list(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters())
    model(features()).sum().backward()
    optimizer.step()
    speedup = engine.ModelSpeedup(copy.deepcopy(model), features(), masks)
    speedup.speedup_model()
    speedup.plan.apply(model, optimizer)
    assert list(model.state_dict()) == keys and model.layer.weight_hh_l0_reverse.shape == (6, 2)
    assert optimizer.state[model.layer.weight_hh_l0]["exp_avg"].shape == (6, 2)
    model(features()).sum().backward()
    optimizer.step()


# ---------------------------------------------------------------- counting


def test_an_lstm_by_hand() -> None:
    """128 -> 256 in two layers over 50 steps: ``50 (4·256·(128 + 256) + 4·256·(256 + 256))``."""
    layer = nn.LSTM(128, 256, num_layers=2, batch_first=True)
    flops, params, rows = engine.count_flops_params(layer, (1, 50, 128), verbose=False)
    assert flops == 50 * (4 * 256 * (128 + 256) + 4 * 256 * (256 + 256)) == 45_875_200
    assert params == sum(p.numel() for p in layer.parameters()) and rows[""]["flops"] == [flops]


BY_HAND = {
    # multiply-accumulates of one step of one sample
    "LSTM": 16 * (6 + 4),
    "LSTM with a projection": 32 * (6 + 4) + 4 * 8,
    "two layers": 16 * (6 + 4) + 16 * (4 + 4),
    "both directions": 2 * 6 * (6 + 2),
    "GRU without bias": 12 * (6 + 4),
    "GRU": 12 * (6 + 4),
    "RNN": 4 * (6 + 4),
    "RNN with relu": 4 * (6 + 4),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("batch", [1, 3])
def test_layers_by_hand(name: str, batch: int) -> None:
    """Each weight once per step, whatever the batch."""
    flops = engine.count_flops_params(LAYERS[name](), torch.randn(batch, 5, 6), verbose=False)[0]
    assert flops == 5 * BY_HAND[name]


def test_a_sequence_in_front_of_the_batch() -> None:
    """(steps, batch, features): the batch is dimension 1."""
    flops = engine.count_flops_params(nn.LSTM(6, 4), torch.randn(5, 3, 6), verbose=False, batch_dim=1)[0]
    assert flops == 5 * BY_HAND["LSTM"]


def test_a_forward_that_is_called_by_itself() -> None:
    """Hooks are skipped then; the sizes are the layer's, although its owner has the same numbers."""
    model = reading(lambda m, x: m.out(m.layer.forward(x)[0]), 4, nn.LSTM(3, 4, batch_first=True))
    model.hidden_size, model.input_size = 4, 3
    plan = check_exact(model, halved(model, features()), features(), features(3))
    assert plan.attributes == {"layer": {"hidden_size": 2}, "out": {"in_features": 2}}

"""Recurrent layers are left whole, and counted."""

from __future__ import annotations

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


@pytest.mark.parametrize("name", MODELS)
def test_what_goes_in_and_comes_out_is_frozen(name: str) -> None:
    """With a reason; layers further away are free, and the result is exact at other lengths."""
    model = MODELS[name]()
    reasons = {g.name: g.reason for g in engine.dependency_groups(model, steps())}
    assert "recurrent units are left whole" in (reasons["first"] or "")
    assert reasons["front"] is None and reasons["hidden"] is None
    masks: Masks = dead(model, {"front": [0, 1], "first": [0, 1], "hidden": [2]}, bias=True)
    masks["layer"] = {
        key: torch.zeros_like(value) for key, value in model.layer.named_parameters() if key.startswith("bias")
    }
    lengths = [steps(3, 6), steps(1, 1)] if "layer" in name else [steps(3)]
    plan = check_exact(model, masks, steps(), *lengths)
    assert plan.slices["front.weight"].shape[0] == 5 and plan.slices["hidden.weight"].shape == (5, 4)
    assert "first.bias" not in plan.slices and not any(key.startswith("layer.") for key in plan.slices)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["LSTM layer", "both directions layer", "GRU cell"])
def test_any_masks(name: str, kind: str) -> None:
    """Also of the recurrent weights themselves: exact."""
    model = MODELS[name]()
    check_exact(model, KINDS[kind](model, 6), steps(), steps(3))


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


@pytest.mark.parametrize("name", CELLS)
def test_cells_by_hand(name: str) -> None:
    """One step of one sample."""
    assert engine.count_flops_params(CELLS[name](), torch.randn(3, 6), verbose=False)[0] == BY_HAND[name]


def test_packed_sequences_count_the_steps_there_are() -> None:
    """Sequences of lengths 5 and 2 make 7 steps."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(6, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 2]), batch_first=True)
            return self.layer(packed)[1][0]

    flops = engine.count_flops_params(Packed(), torch.randn(2, 5, 6), verbose=False, batch_dim=None)[0]
    assert flops == 7 * BY_HAND["LSTM"]

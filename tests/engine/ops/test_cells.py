"""Cells, called step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.program.trees import tensors_in
from tests.engine.exactness import check_exact, randomised
from tests.engine.nets import Net
from tests.engine.ops.test_recurrent import BY_HAND, CELLS, halved, steps


@pytest.mark.parametrize("name", CELLS)
def test_cells_by_hand(name: str) -> None:
    """One step of one sample."""
    assert engine.count_flops_params(CELLS[name](), torch.randn(3, 6), verbose=False)[0] == BY_HAND[name]


@pytest.mark.parametrize("name", CELLS)
def test_a_state_that_is_given(name: str) -> None:
    """Ones to start from: what others read of a unit is one at first and zero later, so that it stays."""

    def forward(m: Net, x: Tensor) -> Tensor:
        state: Any = x.new_ones(x.shape[0], m.layer.hidden_size)
        state = (state, state) if name == "LSTM" else state
        for step in x.unbind(1):
            state = m.layer(torch.tanh(m.first(step)), state)
        return m.out(state[0] if isinstance(state, tuple) else state)

    model = randomised(Net(forward, layer=CELLS[name](), first=nn.Linear(5, 6), out=nn.Linear(4, 2)))
    plan = check_exact(model, halved(model, steps()), steps(), steps(3))
    assert plan.attributes["layer"] == {"input_size": 3}


@pytest.mark.parametrize("name", CELLS)
def test_a_single_step(name: str) -> None:
    """From zero the recurrent rows count for nothing; those of the input and both biases have to be closed."""
    out = nn.Linear(8 if name == "LSTM" else 4, 2)
    model = randomised(Net(lambda m, x: m.out(torch.cat([*tensors_in(m.layer(x))], 1)), layer=CELLS[name](), out=out))
    x = torch.randn(3, 6, dtype=torch.float64)
    masks = {"layer": {k: torch.ones(p.shape).double() for k, p in model.layer.named_parameters()}}
    for key in ("weight_ih", "bias_ih", "bias_hh"):
        masks["layer"][key].view(-1, 4, *masks["layer"][key].shape[1:])[:, 2] = 0
        found = check_exact(model, masks, x).attributes.get("layer", {}).get("hidden_size", 4)
        assert found == (3 if key == "bias_hh" else 4)

"""Sequences of several lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import engine
from tests.engine.exactness import check_exact
from tests.engine.nets import Net
from tests.engine.ops.test_recurrent import BY_HAND, features, halved, reading


def test_sequences_of_several_lengths() -> None:
    """Packed and padded again; the sequences keep their own lengths."""

    def forward(m: Net, x: Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(m.first(x), torch.tensor([3, 5]), True, enforce_sorted=False)
        made, state = m.layer(packed)
        return m.out(nn.utils.rnn.pad_packed_sequence(made, batch_first=True)[0]), m.last(state[0][-1])

    layer = nn.LSTM(6, 4, 2, batch_first=True, bidirectional=True)
    model = reading(forward, 8, layer, first=nn.Linear(3, 6), last=nn.Linear(4, 2))
    plan = check_exact(model, halved(model, features()), features())
    assert plan.attributes["layer"] == {"input_size": 3, "hidden_size": 2}


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

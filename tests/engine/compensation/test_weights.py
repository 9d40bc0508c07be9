"""What a program reads, masked or not, and what processes do together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import engine
from engine.compensation.weights import Alone, Weights
from engine.program.dtensors import is_spread

STORED = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(2)}
MASKS = {"weight": torch.tensor([[1, 1, 1], [0, 0, 0]])}


def test_masks_apply_to_what_is_stored_and_to_what_took_its_place() -> None:
    """Two views of the same changes, one of them masked; the stored tensors stay as they are."""
    changed: dict[str, torch.Tensor] = {}
    fitted, masked = Weights(STORED, None, changed), Weights(STORED, MASKS, changed)
    assert masked["weight"].tolist() == [[0, 1, 2], [0, 0, 0]] and masked["bias"] is not None
    fitted.put("weight", STORED["weight"] + 1)
    assert fitted["weight"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert masked["weight"].tolist() == [[1, 2, 3], [0, 0, 0]]
    assert STORED["weight"][1, 2] == 5 and list(masked) == ["weight", "bias"] and len(masked) == 2


def test_a_node_holds_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for once, also within the nodes of another branch, and let go of afterwards."""
    net = nn.Linear(3, 2)
    graph = engine.trace(net, torch.zeros(1, 3))
    [node] = graph.nodes
    weights = Weights(dict(net.named_parameters()))
    reads: list[torch.Tensor] = []
    monkeypatch.setattr("engine.compensation.weights.whole", lambda tensor: reads.append(tensor) or tensor)
    with weights.at(node):
        assert weights["weight"] is weights["weight"] and len(reads) == 2
        with weights.at(node):
            assert len(reads) == 2
        assert weights["bias"] is not None and len(reads) == 2
    assert weights["bias"] is not None and len(reads) == 3


def test_the_outline_of_whole_tensors_is_themselves() -> None:
    """Masked, as the constants of dead channels are read from them."""
    outline = Weights(STORED, MASKS).outline()
    assert outline["weight"].tolist() == [[0, 1, 2], [0, 0, 0]] and not any(map(is_spread, outline.values()))


def test_one_process_asks_nobody() -> None:
    """It runs the model in eval mode, and its sums are its own."""
    net = nn.Dropout().train()
    with Alone().running(net):
        assert not net.training
    assert net.training and Alone().summed(STORED["bias"]) is STORED["bias"] and Alone().together(lambda: 3) == 3

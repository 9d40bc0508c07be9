"""What masked and compacted model compute with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import engine
from engine.compaction.folds import Fold
from engine.compaction.slices import Slice
from engine.running.recomputed import RecomputedTensor
from engine.verification.tensors import Recipe, masked_recipes, run_tensors
from tests.engine.nets import image, plain


def test_masked_tensors_are_the_masked_model() -> None:
    """Parameter times mask, by canonical name, in the asked dtype; the model is untouched."""
    model = plain().float()
    graph = engine.trace(model, image(dtype=torch.float32))
    masks = {"0.weight": torch.tensor([0, 1, 1, 1, 1, 1]).bool().view(6, 1, 1, 1)}
    found = run_tensors(model, graph, masked_recipes(model, graph, masks), torch.float64, masked=True)
    assert found["0.weight"].dtype == torch.float64 and not found["0.weight"][0].any() and model[0].weight[0].any()
    assert all(t.dtype == torch.float64 for t in found.values() if t.is_floating_point())
    own = run_tensors(model, graph, masked_recipes(model, graph, masks), None, masked=True)
    assert own["0.weight"].dtype == torch.float32 and own["3.weight"].data_ptr() == model[3].weight.data_ptr()


def test_a_recipe_cuts_masks_and_folds() -> None:
    """In this order, and in the asked dtype."""
    stored = torch.arange(6.0).view(3, 2)
    fold = Fold("weight", 1, torch.tensor([1]), torch.tensor([[10.0], [20.0]], dtype=torch.float64))
    mask = torch.tensor([True, True, False])[:, None]
    recipe = Recipe(stored, mask, Slice.along(0, torch.tensor([0, 2]), (3, 2)), (fold,))
    assert recipe.make(torch.float64).tolist() == [[0, 11], [0, 20]] and recipe.make(None).dtype == torch.float32
    assert Recipe(torch.arange(3)).make(torch.float64).dtype == torch.int64 and stored.tolist()[2] == [4, 5]


def test_large_weights_are_made_when_they_are_read() -> None:
    """Not small ones, buffers, what stays as it is, and those of recurrent layers, which look at their memory."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LSTM(64, 64))
    model.register_buffer("table", torch.zeros(64, 64))
    graph = engine.trace(model, torch.zeros(2, 3, 64))
    found = run_tensors(model, graph, masked_recipes(model, graph, {}), torch.float64, masked=True)
    assert [name for name, tensor in found.items() if isinstance(tensor, RecomputedTensor)] == ["0.weight"]
    same = run_tensors(model.double(), graph, masked_recipes(model, graph, {}), torch.float64, masked=True)
    assert not any(isinstance(tensor, RecomputedTensor) for tensor in same.values())


@pytest.mark.parametrize("shape", [(4, 1, 1), (4, 3, 1), (1, 3, 2)])
def test_a_part_is_a_part_of_the_whole(shape: tuple[int, ...]) -> None:
    """Made by itself, in the same dtype and with the same mask."""
    recipe = Recipe(torch.randn(4, 3, 2), torch.rand(shape) > 0.5)
    rows, columns = torch.tensor([0, 3]), torch.tensor([1])
    part = recipe.part(torch.float64, rows, columns)
    assert torch.equal(part, recipe.make(torch.float64)[rows][:, columns]) and part.dtype == torch.float64

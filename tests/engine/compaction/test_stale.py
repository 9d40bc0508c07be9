"""Numbers that were sizes and are read by methods that did not run are named."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import engine


class Net(nn.Module):
    """Two numbers, one of which was a size."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.other, self.unread = 6, 17, 6
        self.body, self.head = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.head(self.body(x).relu())  # type: ignore[no-any-return]

    def parts(self, x: Tensor) -> Tensor:
        """Return features in two parts."""
        return self.body(x).view(-1, 2, self.width // 2) * self.other  # type: ignore[no-any-return]


def _notes(keep: list[int]) -> str:
    model = Net()
    mask = torch.tensor(keep)
    masks = {"body": {"weight": mask.view(6, 1).expand(6, 3), "bias": mask}}
    speedup = engine.ModelSpeedup(model, torch.rand(2, 3), masks)
    speedup.speedup_model()
    return "\n".join(speedup.plan.notes)


def test_a_number_that_was_a_size_is_named() -> None:
    """With the method that reads it, and what the layer has now."""
    notes = _notes([1, 0, 1, 0, 1, 1])
    assert (
        "`Net.parts`, which did not run, reads `width`, which is still 6, while a layer of the module now has 4"
        in notes
    )
    assert "`other`" not in notes and "`unread`" not in notes


def test_nothing_is_named_where_nothing_goes() -> None:
    """All sizes are as before."""
    assert "`width`" not in _notes([1] * 6)

"""What a teacher answers, and how far a student is from that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import engine
from lightning_compress.callbacks.lessons import Answer, Lesson, Losses, output_channels


class Twice(nn.Module):
    """Writes into its input, and calls a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Under the name of logits, beside another tensor."""
        x += 1
        y = self.layer(x)
        return {"logits": self.layer(y.relu()), "hidden": y}


def test_each_call_with_gradients_is_one_lesson() -> None:
    """With the input as it was before the model wrote into it, and each call of a layer."""
    student, teacher, x = Twice(), Twice().eval(), torch.randn(3, 2)
    lesson = Lesson(teacher)
    handles = list(lesson.listen(student, ["layer"]))
    first, second = student(x.clone()), student(x.clone() + 1)
    with torch.no_grad():
        student(x.clone())
    for handle in handles:
        handle.remove()
    student(x.clone())
    assert len(lesson.answers) == 2 and not student._forward_hooks and not teacher.layer._forward_hooks
    expected = teacher(x.clone())
    for answer, out in zip(lesson.answers, (first, second), strict=True):
        assert answer.student is out and len(answer.inside["layer"]) == 2
    assert torch.equal(lesson.answers[0].teacher["logits"], expected["logits"])
    assert torch.equal(lesson.answers[0].inside["layer"][0][0], expected["hidden"])
    loss = Losses("kl", 2.0)(lesson.answers[0], {})
    loss.backward()
    assert student.layer.weight.grad.any() and teacher.layer.weight.grad is None


def test_channels_that_went_are_not_compared() -> None:
    """The scale is that of all channels, so that a smaller student has the same gradient."""
    wanted, ours = torch.randn(4, 6, 5, 5), torch.randn(4, 6, 5, 5)
    kept = torch.tensor([0, 2, 5])
    answer = Answer(torch.zeros(1, 2), torch.zeros(1, 2), {"conv": [(wanted, ours[:, kept])]})
    loss = Losses("mse", 1.0)(answer, {"conv": kept})
    expected = (ours - wanted)[:, kept].square().sum() / wanted.square().sum()
    assert loss.item() == pytest.approx(expected.item())


@pytest.mark.parametrize(
    ("layer", "dim", "index", "channels"),
    [
        (nn.Conv2d(2, 4, 3), 0, [1, 2], [1, 2]),
        (nn.ConvTranspose2d(2, 4, 3), 1, [0, 3], [0, 3]),
        (nn.ConvTranspose1d(4, 6, 3, groups=2), 1, [0, 2], [0, 2, 3, 5]),
        (nn.ConvTranspose1d(4, 6, 3, groups=2), 0, [0, 1], [0, 1, 2]),
        (nn.BatchNorm1d(3), 0, [1], [1]),
    ],
)
def test_output_channels(layer: nn.Module, dim: int, index: list[int], channels: list[int]) -> None:
    """Of convolutions and transposed ones, with groups, and of norms."""
    cut = engine.Slice.along(dim, torch.tensor(index), tuple(layer.weight.shape))
    assert output_channels(layer, cut).tolist() == channels

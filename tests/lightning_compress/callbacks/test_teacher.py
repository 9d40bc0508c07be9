"""Outputs of a teacher, and the distance of a student from them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import engine
from lightning_compress.callbacks.teacher import DistillationLoss, Outputs, Teacher, output_channels
from lightning_compress.trainer.packages import MisconfigurationException


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


def test_the_teacher_runs_on_each_call_with_gradients() -> None:
    """On the input before the student wrote to it; each call of a layer is recorded."""
    student, model, x = Twice(), Twice().eval(), torch.randn(3, 2)
    teacher = Teacher(model)
    handles = list(teacher.register_hooks(student, ["layer"]))
    first, second = student(x.clone()), student(x.clone() + 1)
    with torch.no_grad():
        student(x.clone())
    for handle in handles:
        handle.remove()
    student(x.clone())
    assert len(teacher.outputs) == 2 and not student._forward_hooks and not model.layer._forward_hooks
    expected = model(x.clone())
    for outputs, out in zip(teacher.outputs, (first, second), strict=True):
        assert outputs.student is out and len(outputs.layers["layer"]) == 2
    assert torch.equal(teacher.outputs[0].teacher["logits"], expected["logits"])
    assert torch.equal(teacher.outputs[0].layers["layer"][0][0], expected["hidden"])
    loss = DistillationLoss("kl", 2.0)(teacher.outputs[0], {})
    loss.backward()
    assert student.layer.weight.grad.any() and model.layer.weight.grad is None


def test_a_student_that_fails_is_not_taught() -> None:
    """A step may catch the error, as it does out of memory; the next call is taught as before."""
    student = Twice()
    teacher = Teacher(Twice().eval())
    handles = list(teacher.register_hooks(student, []))
    failing = student.layer.register_forward_hook(lambda *args: 1 / 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        student(torch.randn(3, 2))
    assert not teacher.outputs
    failing.remove()
    out = student(torch.randn(3, 2))
    assert len(teacher.outputs) == 1 and teacher.outputs[0].student is out
    for handle in handles:
        handle.remove()


def test_a_teacher_of_other_inputs_is_named() -> None:
    """Instead of the error of one of its layers."""
    student, teacher = Twice(), Teacher(nn.Linear(5, 2))
    handles = list(teacher.register_hooks(student, []))
    with pytest.raises(MisconfigurationException, match="The teacher, a `Linear`, rejects the inputs .*RuntimeError"):
        student(torch.randn(3, 2))
    for handle in handles:
        handle.remove()
    assert student(torch.randn(3, 2))["logits"].shape == (3, 2)


def test_removed_channels_are_not_compared() -> None:
    """The scale is that of all channels, so that a smaller student has the same gradient."""
    wanted, ours = torch.randn(4, 6, 5, 5), torch.randn(4, 6, 5, 5)
    kept = torch.tensor([0, 2, 5])
    outputs = Outputs(torch.zeros(1, 2), torch.zeros(1, 2), {"conv": [(wanted, ours[:, kept])]})
    loss = DistillationLoss("mse", 1.0)(outputs, {"conv": kept})
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

"""Where the constants of removed channels go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.compaction.folds import Fold
from tests.engine.exactness import check_exact, masked, randomised, relative_error, run
from tests.engine.nets import Mean, analysis_of, dead, image, plain


def test_a_fold_adds_along_a_dimension() -> None:
    """``tensor[:, index] += delta``, or the whole tensor, in the tensor's dtype, the tensor itself untouched."""
    tensor = torch.ones(2, 3)
    delta = torch.full((2, 1), 0.5, dtype=torch.float64)
    out = Fold("w", 1, torch.tensor([2]), delta).apply(tensor)
    assert out.tolist() == [[1, 1, 1.5], [1, 1, 1.5]] and out.dtype == torch.float32 and tensor.eq(1).all()
    whole = Fold("w", -1, torch.zeros(0, dtype=torch.long), torch.ones(2, 3, dtype=torch.float64))
    assert whole.apply(tensor).eq(2).all()


def test_a_fold_survives_storage() -> None:
    """Its state gives an equal fold."""
    fold = Fold("w", 1, torch.tensor([2]), torch.full((2, 1), 0.5, dtype=torch.float64))
    again = Fold.from_state_dict(fold.state_dict())
    assert (again.name, again.dim) == ("w", 1)
    assert torch.equal(again.apply(torch.zeros(2, 3)), fold.apply(torch.zeros(2, 3)))


def test_without_a_border_constants_go_to_the_bias() -> None:
    """``Σ_i Σ_k W[o,i,k] c_i``, and every dead channel goes."""
    model = randomised(nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 3), Mean(), nn.Linear(4, 2)))
    masks = dead(model, {"0": [0, 1, 2]})
    plan = analysis_of(model, image(), masks).plan
    (fold,) = plan.folds
    assert fold.name == "1.bias" and plan.slices["0.weight"].shape[0] == 3
    expected = (model[1].weight[:, :3].sum((2, 3)) * model[0].bias[:3]).sum(1)
    torch.testing.assert_close(fold.delta, expected.detach())


def test_zero_padding_needs_a_carrier() -> None:
    """Dropping the constants, or putting them into the bias, is wrong at borders; one carrier makes them exact at two
    resolutions.
    """
    model = randomised(
        nn.Sequential(
            nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 3, padding=1), nn.ReLU(), nn.Flatten(2), Mean(), nn.Linear(4, 2)
        )
    )
    masks = dead(model, {"0": [0, 1, 2, 3]})
    plan = check_exact(model, masks, image(6), image(11), image(16))
    assert plan.slices["0.weight"].shape[0] == 3
    (fold,) = plan.folds
    assert (fold.name, fold.dim, len(fold.index)) == ("1.weight", 1, 1)
    careless = masked(model, masks)
    with torch.no_grad():
        careless[1].bias += (careless[1].weight[:, :4].sum((2, 3)) * careless[0].bias[:4]).sum(1)
        careless[1].weight[:, :4] = 0
    for size in (6, 11):
        assert relative_error(run(masked(model, masks), image(size)), run(careless, image(size))) > 1e-4


def test_the_strongest_constant_carries() -> None:
    """Ratios to a tiny constant would multiply rounding errors; a channel of nearly 0 never carries."""
    model = randomised(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, padding=1), Mean(), nn.Linear(4, 2)))
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([1e-9, 2.0, 1e-6, 1.0]))
    plan = check_exact(model, dead(model, {"0": [0, 1, 2]}), image(), image(9))
    assert 1 in plan.slices["0.weight"].cuts[0].index.tolist()
    assert float(max(fold.delta.abs().max() for fold in plan.folds)) < 1


def test_grouped_convolutions_carry_per_group() -> None:
    """Each group that loses constants has a carrier of its own."""
    model = randomised(
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 3, padding=1, groups=2), Mean(), nn.Linear(6, 2))
    )
    plan = check_exact(model, dead(model, {"0": [0, 1, 4, 5]}), image(), image(9))
    assert plan.slices["1.weight"].shape == (6, 3, 3, 3) and len(plan.folds[0].index) <= 2


def test_a_transposed_convolution_carries_too() -> None:
    """Its input rows are dimension 0 of the weight."""
    model = randomised(
        nn.Sequential(nn.Conv2d(3, 6, 1), nn.ConvTranspose2d(6, 4, 3, stride=2), Mean(), nn.Linear(4, 2))
    )
    plan = check_exact(model, dead(model, {"0": [0, 1, 2]}), image(), image(9))
    assert (plan.folds[0].name, plan.folds[0].dim) == ("1.weight", 0)


def test_a_weight_that_is_called_twice_is_folded_once() -> None:
    """Two calls that see the same constants: one fold."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.conv, self.head = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 3), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.head((self.conv(x) + self.conv(x.flip(2))).mean((2, 3)))

    model = randomised(Twice())
    plan = check_exact(model, dead(model, {"stem": [0, 1, 2]}), image(), image(9))
    assert [fold.name for fold in plan.folds] == ["conv.bias"] and plan.slices["stem.weight"].shape[0] == 3


def test_repaired_masks_leave_nothing_to_fold() -> None:
    """Zero everywhere, so the small model is exact in train mode too."""
    model = plain()
    masks = engine.fix_mask_conflict(dead(model, {"0": [0, 1], "3": [0]}), model, image())
    speedup = engine.ModelSpeedup(model, image(), masks)
    speedup.speedup_model()
    assert speedup.plan.folds == () and speedup.certificate.exact_in_train


@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_zero_constants_are_not_folded(bias: float) -> None:
    """A dead channel of 0 leaves nothing behind; one of 1 does."""
    model = randomised(
        nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 3, padding=1), Mean(), nn.Linear(4, 2))
    )
    nn.init.constant_(model[0].bias, bias)
    plan = check_exact(model, dead(model, {"0": [0, 1, 2]}), image())
    assert len(plan.folds) == int(bias)
    assert plan.slices["0.weight"].shape[0] == 3 + int(bias)

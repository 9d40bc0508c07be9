"""The certificate compares inside, channel by channel."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.compaction import folds
from engine.errors import VerificationError
from engine.verification.certify import Observation, observe
from engine.verification.comparison import compare
from engine.verification.witness import Witness
from tests.engine.exactness import KINDS, masked, randomised
from tests.engine.nets import analysis_of, dead, image, plain, residual_net, snapshot, unchanged


def witness_of(model: nn.Module) -> Witness:
    """Look at a model with one masked channel."""
    return Witness.of(analysis_of(model, image(), dead(model, {"0": [0]}, bias=True)))


def seen(model: nn.Module, witness: Witness, size: int = 6) -> Observation:
    """Observe the model as it is."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return observe(model, tensors, ((image(size),), {}), witness, witness.looks[0])


def test_a_model_equals_itself() -> None:
    """Error 0, at the same places, without leaving anything on the model."""
    model = plain().train()
    state, witness = snapshot(model), witness_of(model)
    one, two = seen(model, witness), seen(model, witness)
    assert compare(one, two, witness, 1e-9) == (0.0, "the output") and one.runs == two.runs > 0
    assert unchanged(model, state) and model.training


def test_a_difference_that_the_output_hides_is_found() -> None:
    """A channel that hardly reaches the output is compared by itself, relative to its own size."""
    model = plain()
    witness = witness_of(model)
    with torch.no_grad():
        model[3].weight[:, 2] *= 1e-12
    before = seen(model, witness)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight[2] *= 1.01
    after = seen(other, witness)
    outputs = [float((a - b).abs().max()) for a, b in zip(before.outputs, after.outputs, strict=True)]
    error, where = compare(before, after, witness, 1e-9)
    assert max(outputs) < 1e-10 and error > 1e-4 and "'0'" in where or "'1'" in where


@pytest.mark.parametrize("factor", [1 + 1e-6, -1.0, 0.0])
def test_any_changed_channel_is_found(factor: float) -> None:
    """Random projections miss no difference, whichever channel it is in."""
    model = plain()
    witness = witness_of(model)
    before = seen(model, witness)
    for channel in range(1, 6):
        other = copy.deepcopy(model)
        with torch.no_grad():
            other[1].bias[channel] = other[1].bias[channel] * factor
        assert compare(before, seen(other, witness), witness, 1e-9)[0] > 1e-9


def test_another_path_is_refused() -> None:
    """Runs with other calls, or outputs of another shape, are not comparable."""
    model = plain()
    witness = witness_of(model)
    one = seen(model, witness)
    with pytest.raises(VerificationError, match="another path"):
        compare(one, dataclasses.replace(one, runs=one.runs + 1), witness, 1e-9)
    with pytest.raises(VerificationError, match="another path"):
        compare(one, dataclasses.replace(one, outputs=[one.outputs[0][:1]]), witness, 1e-9)


def test_outputs_that_are_not_finite_prove_nothing() -> None:
    """They are refused, and NaN in the compacted model is an infinite error."""
    model = plain()
    witness = witness_of(model)
    one = seen(model, witness)
    broken = dataclasses.replace(one, outputs=[torch.full_like(one.outputs[0], math.inf)])
    with pytest.raises(VerificationError, match="not finite"):
        compare(broken, one, witness, 1e-9)
    assert compare(one, dataclasses.replace(one, table=one.table * math.nan), witness, 1e-9)[0] == math.inf


def test_a_wrong_fold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the constant: an error with the place, and the model bit for bit as it was."""
    model = plain()
    state = snapshot(model)
    apply = folds.Fold.apply
    monkeypatch.setattr("engine.compaction.folds.Fold.apply", lambda self, t: apply(self, apply(self, t)))
    with pytest.raises(VerificationError, match="differs from the masked one: relative error .* at "):
        engine.ModelSpeedup(model, image(), dead(model, {"0": [0, 1, 2]})).speedup_model()
    assert unchanged(model, state)


def test_a_rule_with_wrong_constants_is_refused() -> None:
    """A relu that is said to give 0 for every dead channel."""
    model = plain()
    nn.init.constant_(model[1].bias, 1.0)
    state = snapshot(model)
    relu = engine.RULES["relu"]
    rest = dataclasses.replace(relu, ops=tuple(o for o in relu.ops if o != "relu"))
    wrong = dataclasses.replace(relu, ops=("relu",), constants=lambda node, c: [c[node.inputs[0]] * 0])
    rules = engine.Registry([rest if r is relu else r for r in engine.RULES.distinct()]) + [wrong]
    with pytest.raises(VerificationError):
        engine.ModelSpeedup(model, image(), dead(model, {"0": [0, 1, 2]}), rules=rules).speedup_model()
    assert unchanged(model, state)


def test_the_projection_is_relative_to_the_channel() -> None:
    """A live channel beside one that is a million times larger is still compared."""
    model = plain()
    with torch.no_grad():
        model[1].weight[5] = 1e6
    witness = witness_of(model)
    before = seen(model, witness)
    other = masked(model, {})
    with torch.no_grad():
        other[0].weight[1] *= 1.001
    assert compare(before, seen(other, witness), witness, 1e-9)[0] > 1e-5


def test_a_norm_that_differs_in_train_mode() -> None:
    """A dead channel whose eval constant relu cuts to 0, but whose batch statistics leave β > 0: nothing is folded,
    and yet train mode is not exact, so the certificate must not say that it is.
    """
    model = plain()
    with torch.no_grad():
        model[1].running_mean[:3] = 5
        model[1].weight[:3] = 1
        model[1].bias[:3] = 0.5
    masks = dead(model, {"0": [0, 1, 2]}, bias=True)
    reference = masked(model, masks).train()(image()).detach()
    speedup = engine.ModelSpeedup(model, image(), masks)
    speedup.speedup_model()
    assert model[0].out_channels == 3 or torch.allclose(model.train()(image()).detach(), reference)
    if not torch.allclose(model.train()(image()).detach(), reference):
        assert not speedup.certificate.exact_in_train


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", [None, "union", "intersection", "score"])
@pytest.mark.parametrize("make", [plain, residual_net])
def test_what_is_called_exact_in_train_mode_is(make: Callable[[], nn.Module], kind: str, policy: str | None) -> None:
    """Where the certificate says so, masked and compacted agree on batch statistics too."""
    model = make()
    masks = KINDS[kind](model, 3)
    masks = masks if policy is None else engine.fix_mask_conflict(masks, model, image(), policy)
    reference = masked(model, masks).train()(image()).detach()
    speedup = engine.ModelSpeedup(model, image(), masks)
    speedup.speedup_model()
    assert policy is None or speedup.certificate.exact_in_train
    if speedup.certificate.exact_in_train:
        torch.testing.assert_close(model.train()(image()).detach(), reference, rtol=1e-9, atol=1e-9)


class Rounded(nn.Module):
    """Computes in float32 inside, whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        y = self.stem(x).float()
        y = y / (1 + y.to(dtype=torch.float32).abs().sum(1, keepdim=True, dtype=torch.float32))
        return self.head(y.to(x.dtype))


def test_a_model_that_rounds_inside_is_compared_in_float64() -> None:
    """Conversions to less are left out of both runs, so that rounding does not drown what is compared."""
    model = randomised(Rounded())
    found = engine.ModelSpeedup(model, image(), dead(model, {"stem": [1, 2]}, bias=True), confidence=2)
    found.speedup_model()
    assert found.plan.slices["stem.weight"].shape[0] == 6 and "64" in found.certificate.dtype
    assert found.certificate.max_error < 1e-12


class LooksUp(nn.Module):
    """Looks its parameters up, as optimizers and adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        weight, bias = self.get_parameter("stem.weight"), self.stem.bias
        assert isinstance(bias, nn.Parameter) and sum(1 for _ in self.parameters()) == 4
        return self.head(nn.functional.conv2d(x, weight, bias).relu())


def test_parameters_are_parameters_in_the_runs_that_are_compared() -> None:
    """Code that looks them up finds them."""
    model = randomised(LooksUp())
    speedup = engine.ModelSpeedup(model, image(), dead(model, {"stem": [1, 2]}, bias=True), confidence=2)
    speedup.speedup_model()
    assert speedup.certificate.verified and model.stem.out_channels == 6

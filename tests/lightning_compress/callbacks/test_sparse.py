"""Tests of sparse training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from lightning_compress import ChannelPruning, ModelCompaction, SparseTraining
from lightning_compress.callbacks import sparse
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.models import Base, Net, OnDemand, Wrapped, fit, seeded
from tests.lightning_compress.small import MODELS, SIDE, Classifier


def groups_of(net: nn.Module, *shape: int) -> list[engine.Group]:
    """Its prunable groups."""
    return [g for g in engine.dependency_groups(net, torch.ones(shape)) if g.reason is None]


def unit_weights(group: engine.Group, net: nn.Module) -> list[Tensor]:
    """The weights of each unit in one vector, differentiable."""
    members = [m for m in group.members if m.role == "out"]
    flat = [(net.get_parameter(m.parameter), m.units.expand(m.shape)) for m in members if len(m.shape) > 1]
    return [torch.cat([weight[units == u] for weight, units in flat]) for u in range(group.size)]


@pytest.mark.parametrize("name", MODELS)
def test_group_lasso_is_the_gradient_of_its_formula(name: str) -> None:
    """What is added is what autograd finds for λ √n ‖w‖ summed over the units, heads and residual groups included."""
    net = MODELS[name]()
    for group in groups_of(net, 1, 3, SIDE, SIDE):
        strength = torch.rand(group.size) + 0.1
        net.zero_grad()
        vectors = unit_weights(group, net)
        sum(s * len(v) ** 0.5 * v.norm() for s, v in zip(strength, vectors, strict=True)).backward()
        for name, factor in sparse.group_lasso(group, net.get_parameter, strength).items():
            parameter = net.get_parameter(name)
            torch.testing.assert_close(factor * parameter.detach(), parameter.grad)


def test_slimming_is_the_gradient_of_its_formula() -> None:
    """What is added is λ sign(γ), and nothing at γ = 0."""
    net: Any = seeded(Net)
    with torch.no_grad():
        net.wide_norm.weight.normal_()[3] = 0
    group = next(g for g in groups_of(net, 1, 3, 8, 8) if g.name == "wide")
    factors, scale = sparse.bn_scale(group, net.get_parameter, torch.arange(16.0)), net.wide_norm.weight.detach()
    assert list(factors) == ["wide_norm.weight"]
    torch.testing.assert_close(factors["wide_norm.weight"] * scale, torch.arange(16.0) * scale.sign())


def test_a_dead_unit_is_left_alone() -> None:
    """At zero the penalty has no direction: nothing is added, and nothing is NaN."""
    net: Any = seeded(Net)
    with torch.no_grad():
        net.wide.weight[5] = 0
    group = next(g for g in groups_of(net, 1, 3, 8, 8) if g.name == "wide")
    factor = sparse.group_lasso(group, net.get_parameter, torch.ones(16))["wide.weight"]
    assert not factor[5].any() and torch.isfinite(factor).all()


def scales(tmp_path: Path, **settings: Any) -> Tensor:
    """|γ| after a fit."""
    module = seeded(Wrapped)
    fit(module, tmp_path, SparseTraining(**settings), max_epochs=6)
    return module.net.wide_norm.weight.detach().abs()


def test_it_shrinks_channels(tmp_path: Path) -> None:
    """The stronger, the smaller the scales; a strength of 0 changes nothing."""
    plain = seeded(Wrapped)
    fit(plain, tmp_path, max_epochs=6)
    none, some, more = (scales(tmp_path, strength=s, growth="one_shot").sum() for s in (0.0, 0.1, 0.5))
    assert torch.equal(none, plain.net.wide_norm.weight.detach().abs().sum())
    assert none > some > more


def test_growth(tmp_path: Path) -> None:
    """The penalty grows from nothing to its whole strength along the schedule."""
    seen: list[float] = []

    class Watching(SparseTraining):
        def _factors(self, group: engine.Group, model: nn.Module, strength: float) -> Any:
            if group.name == "wide":
                seen.append(strength)
            return super()._factors(group, model, strength)

    fit(seeded(Wrapped), tmp_path, Watching(strength=1.0, growth="linear", start=1, end=5))
    assert seen == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]


def test_only_the_smallest_are_penalised(tmp_path: Path) -> None:
    """With `amount` the large ones train as they would without the callback."""
    callback = SparseTraining("bn_scale", strength=1.0, amount=0.25)
    net: Any = seeded(Net)
    with torch.no_grad():
        net.wide_norm.weight.copy_(torch.arange(1.0, 17.0))
    group = next(g for g in groups_of(net, 1, 3, 8, 8) if g.name == "wide")
    added = callback._factors(group, net, 1.0)["wide_norm.weight"] * net.wide_norm.weight.detach()
    assert added.tolist() == [1.0] * 4 + [0.0] * 12


def test_slimming_end_to_end(tmp_path: Path) -> None:
    """Sparse training, pruning by the scales, compaction: together, and verified."""
    compaction = ModelCompaction(on_failure="raise", save=False)
    pruning = ChannelPruning("bn_scale", amount=0.5, scope="global", max_amount=0.9)
    fit(seeded(Wrapped), tmp_path, SparseTraining("bn_scale", 0.01), pruning, compaction)
    assert compaction.certificate is not None and compaction.certificate.verified


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"penalty": "l0"}, "`penalty` must be one of bn_scale, group_lasso, got 'l0'"),
        ({"strength": -1.0}, "`strength`.*-1.0"),
        ({"strength": float("nan")}, "`strength` must be a finite number >= 0, got nan"),
        ({"amount": 2}, "`amount`"),
        ({"growth": "fast"}, "'fast'"),
        ({"unit": "batch"}, "`unit`"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    """Each is an error of the constructor that names it."""
    with pytest.raises(MisconfigurationException, match=message):
        SparseTraining(**arguments)


def test_nothing_to_act_on_is_an_error(tmp_path: Path) -> None:
    """Slimming without a norm fails before the first step, and says what to do."""
    with pytest.raises(MisconfigurationException, match="nothing to penalise.*group_lasso"):
        fit(Classifier("vit_b_16"), tmp_path, SparseTraining(layers="*mlp.0"))


class Choosing(Base):
    """With a network that returns some of its features on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.net = OnDemand()

    def logits(self, x: Tensor) -> Tensor:
        """Output of the model."""
        return self.net(x)


def test_what_another_callback_declares_counts(tmp_path: Path) -> None:
    """An argument that is never passed holds nothing, so that what is pruned is penalised before."""
    pruning, module = ChannelPruning("l1", start=2, constants="embed"), seeded(Choosing)
    fit(module, tmp_path, SparseTraining("group_lasso", 0.01), pruning, max_epochs=4)
    assert pruning.masks["stem"]

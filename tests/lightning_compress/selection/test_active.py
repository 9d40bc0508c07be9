"""Masked and compacted runs choose alike: what only dead channels are read by counts in neither."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.sensitivity.importance import cut
from lightning_compress import ChannelPruning, ModelCompaction, SparseTraining
from lightning_compress.callbacks import sparse
from lightning_compress.selection import criteria
from lightning_compress.selection.active import Active
from lightning_compress.selection.criteria import CRITERIA
from lightning_compress.selection.evidence import Evidence, loss_changes
from tests.lightning_compress.callbacks.test_shrinking import Follow, Trained, errors, widths
from tests.lightning_compress.models import fit, seeded
from tests.lightning_compress.small import MODELS, SIDE

SETTINGS: list[dict[str, Any]] = [
    *({"criterion": name, "scope": "group"} for name in sorted(CRITERIA)),
    *({"criterion": name, "scope": "global"} for name in ("l1", "lamp", "taylor")),
    {"criterion": ["taylor", "l2"], "scope": "isomorphic", "normalize": "standard"},
    {"criterion": "l2", "scope": "global", "target": "macs"},
    {"criterion": "fpgm", "scope": "group", "target": "params", "round_to": 2},
]


def masked_and_compacted(name: str) -> tuple[Any, ...]:
    """A model half of whose units are masked, and the same compacted; groups of both, what is active in the first."""
    torch.manual_seed(0)
    model, x = MODELS[name]().double().train(), torch.rand(4, 3, SIDE, SIDE, dtype=torch.float64)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    groups = engine.dependency_groups(model, x)
    keep = {g.name: cut(torch.rand(g.size), 0.5, g.rows) for g in groups if g.reason is None}
    masks = engine.group_masks(groups, keep)
    for module, own in masks.items():
        for key, mask in own.items():
            model.get_submodule(module).get_parameter(key).data *= mask
    small = engine.ModelSpeedup(copy.deepcopy(model), x, masks).speedup_model()
    return model, small, groups, engine.dependency_groups(small, x), Active(groups, masks)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_left_out_is_what_a_compaction_removes(name: str) -> None:
    """Scores, penalties and numbers of weights of a masked model are those of the compacted one, heads included."""
    model, small, groups, of_small, active = masked_and_compacted(name)
    x = torch.rand(4, 3, SIDE, SIDE, dtype=torch.float64)
    for net in (model, small):
        # A penalty of the user's reaches what is dead too.
        (net(x).square().sum() + sum(p.square().sum() for p in net.parameters())).backward()
    evidence, of_the_rest = (
        Evidence(model.get_parameter, active.kept, reads=active.reads),
        Evidence(small.get_parameter),
    )
    changes, of_small_changes = loss_changes(groups, model, active=active), loss_changes(of_small, small)
    for group, left in zip(groups, of_small, strict=True):
        kept = active.kept[group.name]
        assert active.weights_per_unit(group) == Active().weights_per_unit(left)
        for criterion in (criteria.l1, criteria.l2, criteria.lamp, criteria.fpgm):
            found = criterion(group, evidence)[kept]
            torch.testing.assert_close(found, criterion(left, of_the_rest), rtol=1e-4, atol=0.0)
        torch.testing.assert_close(changes[group.name][kept], of_small_changes[left.name], rtol=1e-4, atol=1e-4)
        factors = sparse.group_lasso(group, model.get_parameter, torch.ones(group.size), active)
        wanted = sparse.group_lasso(left, small.get_parameter, torch.ones(left.size))
        for parameter, factor in factors.items():
            values = _nonzero(factor, model.get_parameter(parameter))
            torch.testing.assert_close(values, _nonzero(wanted[parameter], small.get_parameter(parameter)))


def _nonzero(factor: Tensor, parameter: nn.Parameter) -> Tensor:
    found = (factor * parameter).detach()
    return found[found != 0]


def test_a_dead_entry_has_no_gradient_either(tmp_path: Path) -> None:
    """A criterion of one's own finds zeros, in weights and gradients, where a weight reads masked channels only."""
    net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    active = Active(engine.dependency_groups(net, torch.ones(1, 1)), {"0": {"weight": torch.tensor([[1], [0]])}})
    net(torch.ones(1, 1)).sum().backward()
    net[2].weight.grad.fill_(1.0)
    evidence = Evidence(net.get_parameter, active.kept, reads=active.reads)
    found = evidence("2.weight")
    assert found[0, 1] == 0 and found[0, 0] == net[2].weight[0, 0] and found.grad.tolist() == [[1.0, 0.0]]
    assert net[2].weight.grad.tolist() == [[1.0, 1.0]] and net[2].weight.all()
    assert evidence("0.weight") is net[0].weight


def pruned(folder: Path, when: Any, settings: dict[str, Any], *callbacks: Any) -> Follow:
    """A fit that prunes before two of its three epochs, and what it computed after each step."""
    follow = Follow()
    compaction = ModelCompaction(when=when, save=False, on_failure="raise", confidence=0)
    pruning = ChannelPruning(amount=0.6, schedule=[0.5, 1.0], **settings)
    options = {"precision": "64-true", "max_epochs": 3, "limit_train_batches": 2}
    fit(seeded(Trained), folder, follow, *callbacks, pruning, *([compaction] if when else []), **options)
    return follow


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_masked_and_compacted_runs_choose_alike(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Two prunings, the second after a compaction or after none: the same channels go, by whatever they are scored."""
    settings = {"gather_every": 1, **settings}
    masked, compacted = (pruned(tmp_path, when, settings) for when in (None, range(3)))
    assert widths(masked) == [16] and len(set(widths(compacted))) >= 2
    assert max(errors(masked, compacted)) <= 1e-9


@pytest.mark.parametrize("penalty", ["bn_scale", "group_lasso"])
@pytest.mark.parametrize("amount", [1.0, 0.5])
def test_penalties_do_not_see_what_is_dead(tmp_path: Path, penalty: str, amount: float) -> None:
    """Neither masked channels nor weights that read them are penalised, nor counted among those to be penalised."""
    settings = {"criterion": "l2"}
    masked, compacted = (
        pruned(tmp_path, when, settings, SparseTraining(penalty, strength=0.02, amount=amount, end=6))
        for when in (None, range(3))
    )
    assert len(set(widths(compacted))) >= 2 and max(errors(masked, compacted)) <= 1e-9


def test_what_another_callback_masks_is_dead_too(tmp_path: Path) -> None:
    """Of two prunings over different layers, the second one scores without weights that read what the first masked."""
    settings = {"criterion": "l1", "layers": "wide"}
    masked, compacted = (
        pruned(tmp_path, when, settings, ChannelPruning("l2", 0.5, "one_shot", layers="stem"))
        for when in (None, range(3))
    )
    assert len(set(widths(compacted))) >= 2 and max(errors(masked, compacted)) <= 1e-9

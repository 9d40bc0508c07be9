"""Every criterion with every schedule and scope, on ResNet-18 and ViT-B/16 in small form."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Trainer

import engine
from lightning_compress import ChannelPruning, MaskConflictRepair, ModelCompaction
from lightning_compress.selection.amounts import kept_units
from lightning_compress.selection.criteria import CRITERIA
from lightning_compress.selection.ladders import SCOPES
from lightning_compress.selection.targets import TARGETS
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.models import trainer
from tests.lightning_compress.small import MODELS, SIDE, Classifier

SCHEDULES: dict[str, Any] = {
    "cubic": "cubic",
    "exponential": "exponential",
    "iterative": {"iterative": {"rounds": 2}},
    "linear": "linear",
    "list": [0.5, 1.0],
    "one_shot": "one_shot",
    "warm_up": {"warm_up": {"part": 0.5, "schedule": {"cool_down": {"part": 0.2}}}},
}


def run(folder: Path, name: str, **settings: Any) -> tuple[Classifier, dict[str, Any], ModelCompaction]:
    """Prune half, repair, compact and verify; the model, what the masks kept, and the compaction."""
    module = Classifier(name)
    groups = engine.dependency_groups(module.net, torch.ones(1, 3, SIDE, SIDE))
    pruning = ChannelPruning(end=3, gather_every=2, frequency=1, unit="step", **settings)
    kept: dict[str, Any] = {}

    class Keep(ModelCompaction):
        def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
            kept.update({g.name: k for g, k in zip(groups, kept_units(groups, pruning.masks).values(), strict=True)})
            assert pruning.finished
            super().on_fit_end(trainer, pl_module)

    compaction = Keep(confidence=2, on_failure="raise", save=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The criterion cannot score these layers")
        trainer(folder, pruning, MaskConflictRepair(), compaction, max_epochs=2).fit(module)
    return module, {g.name: kept[g.name] for g in groups if g.reason is None}, compaction


def check(folder: Path, name: str, criterion: str, schedule: str, scope: str) -> None:
    """Half of the channels go (of what the criterion can score), and the compacted model computes the same."""
    _, kept, compaction = run(folder, name, criterion=criterion, schedule=SCHEDULES[schedule], scope=scope)
    assert compaction.certificate is not None and compaction.certificate.verified
    gone = {group: 1 - float(k.float().mean()) for group, k in kept.items()}
    touched = [group for group, part in gone.items() if part]
    assert touched if criterion == "bn_scale" and name == "vit_b_16" else len(touched) > len(kept) / 3
    if scope == "group":
        assert all(abs(gone[group] - 0.5) <= 1 / len(kept[group]) for group in touched)
    else:
        total = sum(len(kept[group]) for group in kept)
        assert sum(int((~k).sum()) for k in kept.values()) <= total / 2


PAIRS = [
    (name, criterion, schedule, scope)
    for turn, criterion in enumerate(sorted(CRITERIA))
    for name in [sorted(MODELS)[turn % 2]]
    for schedule, scope in [(sorted(SCHEDULES)[turn % len(SCHEDULES)], sorted(SCOPES)[turn % len(SCOPES)])]
]
ALL = [
    (name, *rest) for rest in itertools.product(sorted(CRITERIA), sorted(SCHEDULES), sorted(SCOPES)) for name in MODELS
]


@pytest.mark.parametrize(("name", "criterion", "schedule", "scope"), PAIRS)
def test_each_criterion(tmp_path: Path, name: str, criterion: str, schedule: str, scope: str) -> None:
    """Each criterion, with models, schedules and scopes in turn."""
    check(tmp_path, name, criterion, schedule, scope)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "criterion", "schedule", "scope"), [case for case in ALL if case not in PAIRS])
def test_all_combinations(tmp_path: Path, name: str, criterion: str, schedule: str, scope: str) -> None:
    """The whole product."""
    check(tmp_path, name, criterion, schedule, scope)


@pytest.mark.parametrize(("name", "target"), [("resnet18", "macs"), ("vit_b_16", "params")])
def test_targets_are_hit_in_a_fit(tmp_path: Path, name: str, target: str) -> None:
    """After a scheduled fit the compacted model has at most what is asked for, and hardly less; whole model counted."""
    dense = count(Classifier(name), target)
    module, kept, _ = run(tmp_path, name, target=target, amount=0.4, scope="global", schedule="linear")
    assert 0.55 * dense < count(module, target) <= 0.6 * dense
    assert count(run(tmp_path, name, target=target, budget=0.5 * dense)[0], target) <= 0.5 * dense


def count(module: Classifier, target: str) -> int:
    """What a model costs."""
    found = engine.count_flops_params(module.net, (1, 3, SIDE, SIDE), verbose=False)
    return found[0] if target == "macs" else found[1]


def test_latency_follows_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that counts parameters the fit ends at the latency that is asked for."""
    from lightning_compress.selection.targets import Subject

    def seconds(self: Subject, models: Any, rounds: int = 15) -> list[list[float]]:
        return [[1e-6 * sum(p.numel() for p in model.parameters())] * rounds for model in models]

    monkeypatch.setattr(Subject, "seconds", seconds)
    dense = count(Classifier("resnet18"), "params")
    module = run(tmp_path, "resnet18", target="latency", amount=0.5, schedule="one_shot")[0]
    assert count(module, "params") == pytest.approx(0.5 * dense, rel=0.05)


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_out_of_reach_before_the_first_step(tmp_path: Path, target: str) -> None:
    """A count that cannot be reached is an error before training; channels and time go as far as they can."""
    if target in ("macs", "params"):
        with pytest.raises(MisconfigurationException, match="cannot be reached"):
            run(tmp_path, "resnet18", target=target, amount=0.9, max_amount=0.2)
    elif target == "channels":
        _, kept, _ = run(tmp_path, "resnet18", amount=0.9, max_amount=0.25)
        assert all(float(k.float().mean()) == 0.75 for k in kept.values())


def test_what_the_criterion_cannot_score_is_told(tmp_path: Path) -> None:
    """Slimming on a transformer: only the token stream has norms; the layers that stay whole are named."""
    pruning = ChannelPruning("bn_scale", end=1)
    with pytest.warns(UserWarning, match="cannot score these layers.*self_attention.*mlp"):
        trainer(tmp_path, pruning, max_epochs=2).fit(Classifier("vit_b_16"))
    assert {m.rpartition(".")[2] for m in pruning.masks} >= {
        "ln_1",
        "ln_2",
    } and "encoder.layers.encoder_layer_0.mlp.0" not in pruning.masks


def test_nothing_that_can_be_scored_is_an_error(tmp_path: Path) -> None:
    """It comes before the first step; where nothing was gathered, when it is due, and says what to do."""
    with pytest.raises(MisconfigurationException, match="cannot score any layer.*another criterion"):
        trainer(tmp_path, ChannelPruning("bn_scale", layers="*mlp.0")).fit(Classifier("vit_b_16"))
    with pytest.raises(MisconfigurationException, match="statistics.*there are none.*start pruning later"):
        trainer(tmp_path, ChannelPruning("taylor", schedule="one_shot", start=0)).fit(Classifier("vit_b_16"))


@pytest.mark.parametrize("criterion", ["l1", "taylor", "apoz"])
def test_fast_dev_run(tmp_path: Path, criterion: str) -> None:
    """The rehearsal prunes, also by what has to be gathered first."""
    pruning = ChannelPruning(criterion)
    trainer(tmp_path, pruning, fast_dev_run=True).fit(Classifier("resnet18"))
    assert pruning.masks and pruning.finished

"""Distillation while training."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_compress import ChannelPruning, Distillation, ModelCompaction
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.models import Base, Net, Root, Wrapped, fit, seeded, trainer

EXAMPLE = torch.zeros(2, 3, 8, 8)


def teacher() -> Net:
    """A wider network than the student."""
    torch.manual_seed(5)
    return Net(12)


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all that is stored."""
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class ByHand(Wrapped):
    """Adds the teacher's loss in its own step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.others = kind, [teacher().eval()]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross entropy, and what the callback adds."""
        with torch.no_grad():
            wanted = self.others[0](batch[0])
        out = self.logits(batch[0])
        if self.kind == "kl":
            ours, theirs = F.log_softmax(out.float() / 2, 1), F.log_softmax(wanted.float() / 2, 1)
            extra = 4 * (theirs.exp() * (theirs - ours)).sum(1).mean()
        else:
            extra = F.mse_loss(out.float(), wanted.float())
        return F.cross_entropy(out, batch[1]) + 0.7 * extra


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}])
@pytest.mark.parametrize("kind", ["kl", "mse"])
def test_the_loss_is_the_one_that_a_step_would_add_itself(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    """With accumulation and mixed precision too; the teacher stays as it is, and the module has its own step again."""
    hand, module, wide = seeded(ByHand, kind=kind), seeded(Wrapped), teacher()
    before, mode = weights(wide), wide.training
    fit(hand, tmp_path, **options)
    done = fit(module, tmp_path, Distillation(wide, weight=0.7, temperature=2.0, loss=kind), **options)
    for name, value in weights(module).items():
        torch.testing.assert_close(value, weights(hand)[name], rtol=1e-4, atol=1e-6)
    assert same(before, weights(wide)) and wide.training == mode and "training_step" not in vars(module)
    assert done.callback_metrics["distillation_loss"] > 0


@pytest.mark.parametrize("cls", [Wrapped, Root])
def test_no_weight_changes_nothing(tmp_path: Path, cls: type[Base]) -> None:
    """Bit for bit the fit without it; with a weight it is another, from the first pruning on."""
    results = []
    for callbacks in ([], [Distillation(weight=0)], [Distillation(weight=1.0)]):
        module = seeded(cls)
        fit(module, tmp_path, *callbacks, ChannelPruning(amount=0.5, schedule="one_shot", start=1))
        results.append(weights(module))
    assert same(results[0], results[1]) and not same(results[0], results[2])


class Saving(Callback):
    """Saves at the end of an epoch, and the teacher at each."""

    def __init__(self, path: Path, epoch: int) -> None:
        self.path, self.epoch = path, epoch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save."""
        if trainer.current_epoch == self.epoch:
            trainer.save_checkpoint(self.path)


def callbacks() -> list[Any]:
    """Taught by what the model is after an epoch, smaller after three."""
    return [
        Distillation(weight=0.5, layers=["wide"], model="net"),
        ChannelPruning(amount=0.5, schedule="linear", start=1, end=3, example_input=EXAMPLE),
        ModelCompaction(when=[2, 3], confidence=1, on_failure="raise", example_input=EXAMPLE),
    ]


@pytest.mark.parametrize("epoch", [0, 1, 2, 3])
def test_resumed_it_is_the_uninterrupted_run(tmp_path: Path, epoch: int) -> None:
    """Before the first pruning, behind it, and behind compactions, when the teacher is larger than the model."""
    alone, resumed = seeded(Wrapped), seeded(Wrapped)
    fit(alone, tmp_path, *callbacks(), Saving(tmp_path / "one.ckpt", epoch), max_epochs=5)
    torch.manual_seed(0)
    trainer(tmp_path, *callbacks(), max_epochs=5).fit(resumed, ckpt_path=str(tmp_path / "one.ckpt"))
    assert resumed.net.wide.out_channels == 8 and same(weights(alone), weights(resumed))


def test_compaction_while_training_changes_nothing(tmp_path: Path) -> None:
    """The small network trains as the masked one does, inner values included; the teacher stays large."""
    results = []
    for when in (None, [1, 2]):
        module = seeded(Wrapped)
        pruning = ChannelPruning(amount=0.5, schedule="linear", end=2)
        compaction = ModelCompaction(when=when, on_failure="raise")
        distillation = Distillation(weight=0.5, layers=["wide", "back"])
        fit(module, tmp_path, compaction, distillation, pruning, max_epochs=4, precision="64-true")
        results.append(weights(module))
    assert results[0].keys() == results[1].keys()
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=1e-9, atol=1e-12)


def test_a_module_that_is_the_model_is_compacted_while_it_is_taught(tmp_path: Path) -> None:
    """Where the LightningModule itself is the model, in whose place the step stands."""
    module, compaction = seeded(Root), ModelCompaction(when=1, on_failure="raise")
    pruning = ChannelPruning(amount=0.5, schedule="one_shot", start=1)
    done = fit(module, tmp_path, Distillation(weight=0.5), compaction, pruning)
    assert module.features.wide.out_channels == 8 and done.callback_metrics["distillation_loss"] > 0


@pytest.mark.parametrize("compacted", [False, True])
def test_a_checkpoint_teaches(tmp_path: Path, compacted: bool) -> None:
    """Of the same class, in its own size."""
    source, compaction = seeded(Wrapped, width=10), ModelCompaction(tmp_path, on_failure="raise")
    done = fit(source, tmp_path, *([ChannelPruning(amount=0.3), compaction] if compacted else []))
    path = compaction.checkpoint_path if compacted else tmp_path / "dense.ckpt"
    if not compacted:
        done.save_checkpoint(path)
    by_path, by_module = seeded(Wrapped), seeded(Wrapped)
    fit(by_path, tmp_path, Distillation(path))
    fit(by_module, tmp_path, Distillation(copy.deepcopy(source.net)))
    assert same(weights(by_path), weights(by_module))


def test_a_function_of_both_outputs(tmp_path: Path) -> None:
    """Or its import path."""
    one, other = seeded(Wrapped), seeded(Wrapped)
    fit(one, tmp_path, Distillation(teacher(), loss="torch.nn.functional:l1_loss"))
    fit(other, tmp_path, Distillation(teacher(), loss=lambda student, wanted: (student - wanted).abs().mean()))
    assert same(weights(one), weights(other))


class Manual(Wrapped):
    """Steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Elsewhere(Wrapped):
    """Calls a part of the model only."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The stem's output."""
        return self.net.stem(batch[0]).square().mean()


class Maps(Wrapped):
    """Classes of each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The same class everywhere."""
        return F.cross_entropy(self.net(batch[0]), batch[1][:, None, None].expand(-1, 8, 8))


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (Manual, {}, "manual optimization"),
        (Elsewhere, {"teacher": Net()}, "did not call `Net`"),
        (Maps, {}, r"Which dimension of the outputs, of shape \(8, 3, 8, 8\)"),
        (Wrapped, {"layers": ["nothing*"]}, "matches no module of `Net`"),
        (
            Wrapped,
            {"teacher": Net(12), "layers": ["wide"]},
            r"returns shape \(8, 16, 8, 8\), but the teacher's returns",
        ),
        (Wrapped, {"teacher": "nowhere.ckpt"}, "The teacher cannot be loaded from 'nowhere.ckpt'"),
    ],
)
def test_what_cannot_work_is_said(tmp_path: Path, cls: type[Base], options: dict[str, Any], message: str) -> None:
    """Each with what to do about it; afterwards the module has its own step again."""
    module = seeded(cls)
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, tmp_path, Distillation(**options))
    assert "training_step" not in vars(module)


def test_maps_of_classes(tmp_path: Path) -> None:
    """With the dimension that holds the classes."""
    done = fit(seeded(Maps), tmp_path, Distillation(dim=1))
    assert done.callback_metrics["distillation_loss"] >= 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": float("nan")}, "`weight` must be a finite number >= 0, got nan"),
        ({"temperature": float("inf")}, "`temperature` must be a finite number > 0, got inf"),
        ({"weight": -1.0}, "`weight` must be a number"),
        ({"dim": "a"}, "`dim` must be an integer, got 'a'"),
        ({"loss": lambda out: out.sum()}, "`loss=.*` must take the model's outputs and the teacher's outputs"),
        ({"temperature": 0.0}, "`temperature` must be a number"),
        ({"teacher": 3}, "`teacher` must be a `Module` or a string"),
        ({"loss": "cosine"}, "`loss='cosine'`"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    """Each is refused by name."""
    with pytest.raises(MisconfigurationException, match=message):
        Distillation(**arguments)

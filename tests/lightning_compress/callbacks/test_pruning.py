"""Tests of pruning while training."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor

import engine
from lightning_compress import (
    ChannelPruning,
    ComplexityMonitor,
    MaskConflictRepair,
    ModelCompaction,
    load_compacted,
)
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.models import Root, Wrapped, data, fit, seeded, trainer
from tests.lightning_compress.small import SIDE, Classifier


class Watch(Callback):
    """Notes the masked fraction of `wide` and the largest masked weight, and that masked gradients are zero."""

    def __init__(self, pruning: ChannelPruning) -> None:
        self.pruning = pruning
        self.sparsity: list[float] = []
        self.steps: list[float] = []
        self.leaks: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Before each step."""
        self.steps.append(gone(self.pruning))
        if batch_idx == 0:
            self.sparsity.append(gone(self.pruning))
        self._leak(pl_module, lambda p: p)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        """After each step."""
        self._leak(pl_module, lambda p: p)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Before the optimizer acts."""
        self._leak(pl_module, lambda p: p.grad)

    def _leak(self, pl_module: LightningModule, value: Any) -> None:
        model = self.pruning.target(pl_module)[1]
        for module, own in self.pruning.masks.items():
            for name, mask in own.items():
                tensor = value(model.get_submodule(module).get_parameter(name))
                self.leaks.append(tensor[~mask].abs().sum().item())


def gone(pruning: ChannelPruning) -> float:
    """Masked fraction of `wide`'s channels."""
    mask = next((own["weight"] for module, own in pruning.masks.items() if module.endswith("wide")), None)
    return 0.0 if mask is None else 1 - mask.flatten(1).any(1).float().mean().item()


def run(tmp_path: Path, module: Any = None, watch_options: Any = None, **arguments: Any) -> Watch:
    """Fit with ChannelPruning and watch it."""
    pruning = ChannelPruning(**arguments)
    watch = Watch(pruning)
    fit(module or seeded(Wrapped), tmp_path, pruning, watch, **(watch_options or {}))
    return watch


def test_cubic_schedule_over_epochs(tmp_path: Path) -> None:
    """With five epochs 1-(1-t)³ of the amount is masked at t = 0, 1/4, …, 1, so the last epoch trains at the full
    amount.
    """
    watch = run(tmp_path, amount=0.5, watch_options={"max_epochs": 5})
    assert watch.sparsity == [0.0, 4 / 16, 7 / 16, 7 / 16, 8 / 16]


def test_one_epoch_prunes_before_it_starts(tmp_path: Path) -> None:
    """In a one-epoch fit all is masked before the first step, by epochs and by steps."""
    assert run(tmp_path, amount=0.5, watch_options={"max_epochs": 1}).steps == [0.5] * 3
    assert run(tmp_path, amount=0.5, unit="step", watch_options={"max_epochs": 1}).steps == [0.5] * 3


def test_one_shot_at_its_start(tmp_path: Path) -> None:
    """The one-shot schedule masks everything at `start`."""
    watch = run(tmp_path, amount=0.5, schedule="one_shot", start=1)
    assert watch.sparsity == [0.0, 0.5, 0.5]


def test_start_and_end(tmp_path: Path) -> None:
    """Pruning goes from `start` to `end`, linearly here."""
    watch = run(tmp_path, amount=0.5, schedule="linear", start=1, end=3, watch_options={"max_epochs": 5})
    assert watch.sparsity == [0.0, 0.0, 0.25, 0.5, 0.5]


def test_steps(tmp_path: Path) -> None:
    """By steps, pruning follows the optimizer steps and is done one epoch of steps before the end."""
    watch = run(tmp_path, amount=0.5, schedule="linear", unit="step")
    assert watch.steps[0] == 0.0 and watch.steps[3] == 0.25 and watch.steps[6:] == [0.5] * 3
    assert watch.steps == sorted(watch.steps)


def test_steps_prune_at_step_boundaries_only(tmp_path: Path) -> None:
    """Within an accumulation of gradients the masks do not change."""
    options = {"accumulate_grad_batches": 3, "max_epochs": 4}
    watch = run(tmp_path, amount=0.5, schedule="linear", unit="step", watch_options=options)
    assert [watch.steps[i : i + 3] for i in range(0, 12, 3)] == [[v] * 3 for v in (0.0, 2 / 16, 5 / 16, 8 / 16)]


def test_frequency(tmp_path: Path) -> None:
    """Between two prunings there are at least `frequency` epochs, but the end is kept."""
    watch = run(tmp_path, amount=0.5, schedule="linear", frequency=2, watch_options={"max_epochs": 5})
    assert watch.sparsity == [0.0, 2 / 16, 2 / 16, 6 / 16, 8 / 16]


@pytest.mark.parametrize("cls", [Wrapped, Root])
def test_masked_stays_zero(tmp_path: Path, cls: type) -> None:
    """Under momentum and weight decay masked weights are zero before and after each step, and so are their
    gradients.
    """
    watch = run(tmp_path, seeded(cls), amount=0.5)
    assert len(watch.leaks) > 50 and max(watch.leaks) == 0.0


def test_gradient_clipping_does_not_see_masked_gradients(tmp_path: Path) -> None:
    """Masked gradients are zero when the norm is clipped: with all but one channel masked the clipped norm is the
    rest's.
    """

    class Norms(Wrapped):
        seen: list[float] = []

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.seen.append(self.net.wide.weight.grad.flatten(1).norm(dim=1).count_nonzero().item())

    module = seeded(Norms)
    run(tmp_path, module, amount=1.0, watch_options={"max_epochs": 1})
    assert module.seen == [1] * 3


def test_masks_cover_the_whole_group(tmp_path: Path) -> None:
    """The residual's convolutions, their biases and the norm lose the same channels; the output layer loses none."""
    pruning = run(tmp_path, amount=0.5).pruning
    dead = {
        (m, n): (~mask).flatten(1).all(1) if mask.ndim > 1 else ~mask
        for m, own in pruning.masks.items()
        for n, mask in own.items()
    }
    residual = [
        dead[key]
        for key in (("stem", "weight"), ("norm", "weight"), ("norm", "bias"), ("back", "weight"), ("back", "bias"))
    ]
    assert all(torch.equal(one, other) for one, other in itertools.pairwise(residual))
    assert int(residual[0].sum()) == 4
    assert not any(module == "fc" for module, _ in dead)


def test_least_important_go_first(tmp_path: Path) -> None:
    """The channels that go are those with the lowest L1 norm at that time."""
    module = seeded(Wrapped)
    with torch.no_grad():
        module.net.wide.weight[[1, 5, 7]] *= 1e-3
    pruning = run(tmp_path, module, amount=3 / 16, layers="wide", watch_options={"max_epochs": 1}).pruning
    assert (~pruning.masks["wide"]["weight"]).flatten(1).all(1).nonzero().flatten().tolist() == [1, 5, 7]


def test_pruned_stays_pruned(tmp_path: Path) -> None:
    """What is masked at one pruning is masked at all later ones, also with scores that change completely in between."""
    history: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)

    class Keep(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
            if pruning.masks:
                history.append(pruning.masks["wide"]["weight"].clone())

    pruning = ChannelPruning(lambda g, p: torch.rand(g.size, generator=generator), amount=0.75, schedule="linear")
    fit(seeded(Wrapped), tmp_path, Keep(), pruning, max_epochs=6)
    assert not any((later & ~earlier).any() for earlier, later in itertools.pairwise(history))
    assert history[0].sum() > history[-1].sum()


def test_criterion_by_function(tmp_path: Path) -> None:
    """A user's function decides: here the last channels go."""

    def by_position(group: Any, parameter: Any) -> Tensor:
        return -torch.arange(group.size, dtype=torch.float)

    pruning = run(tmp_path, criterion=by_position, amount=0.5, watch_options={"max_epochs": 1}).pruning
    assert pruning.masks["wide"]["bias"].tolist() == [True] * 8 + [False] * 8


def test_a_layer_that_can_be_scored_later_is_named_once(tmp_path: Path) -> None:
    """And once all layers have scores, no warning lists none."""
    scored: list[str] = []

    def later(group: Any, parameter: Any) -> Tensor | None:
        scored.append(group.name)
        return None if scored == [group.name] else torch.ones(group.size)

    with pytest.warns(UserWarning, match="cannot score these layers") as warned:
        run(tmp_path, criterion=later, amount=0.5, layers=["wide", "stem"], watch_options={"max_epochs": 3})
    messages = [str(warning.message) for warning in warned if "cannot score" in str(warning.message)]
    assert len(messages) == 1 and "not pruned: ." not in messages[0]


def test_nothing_is_pruned_at_amount_zero(tmp_path: Path) -> None:
    """Amount 0 masks nothing, and the fit is that of a Trainer without the callback, bit for bit."""
    plain, pruned = seeded(Wrapped), seeded(Wrapped)
    fit(plain, tmp_path)
    watch = run(tmp_path, pruned, amount=0.0)
    assert watch.pruning.masks == {}
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), pruned.parameters(), strict=True))


def test_resume_keeps_masks_and_schedule(tmp_path: Path) -> None:
    """A run stopped after two of five epochs and resumed ends with the masks and weights of an uninterrupted one."""
    settings: dict[str, Any] = {"amount": 0.5, "schedule": "linear", "end": 4, "frequency": 2}
    whole, first, second = seeded(Wrapped), seeded(Wrapped), seeded(Wrapped)
    uninterrupted, resumed = ChannelPruning(**settings), ChannelPruning(**settings)
    fit(whole, tmp_path, uninterrupted, max_epochs=5)
    with pytest.warns(UserWarning, match="fit ended before epoch 4"):
        stopped = fit(first, tmp_path, ChannelPruning(**settings), max_epochs=2)
    stopped.save_checkpoint(tmp_path / "last.ckpt")
    watch = Watch(resumed)
    trainer(tmp_path, resumed, watch, max_epochs=5).fit(second, ckpt_path=str(tmp_path / "last.ckpt"))
    assert watch.sparsity == [2 / 16, 6 / 16, 8 / 16] and max(watch.leaks) == 0.0
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))
    assert torch.equal(uninterrupted.masks["wide"]["weight"], resumed.masks["wide"]["weight"])


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_masks_hold_from_the_first_step_of_a_mid_epoch_resume(tmp_path: Path) -> None:
    """Resumed in the middle of an epoch, no epoch starts, and the masks are in force at once."""
    saver = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    pruning = ChannelPruning(amount=0.5, schedule="one_shot")
    fit(seeded(Wrapped), tmp_path, pruning, saver, enable_checkpointing=True)
    resumed = ChannelPruning(amount=0.5, schedule="one_shot")
    watch = Watch(resumed)
    saver = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2, save_top_k=0)
    trainer(tmp_path, watch, resumed, saver, enable_checkpointing=True).fit(
        seeded(Wrapped), ckpt_path=str(tmp_path / "step=2.ckpt")
    )
    assert len(watch.steps) >= 7 and set(watch.steps) == {0.5}  # older versions of Lightning repeat a step
    assert max(watch.leaks) == 0.0
    assert torch.equal(pruning.masks["wide"]["weight"], resumed.masks["wide"]["weight"])


def test_masks_of_another_model_are_dropped(tmp_path: Path) -> None:
    """A callback that is used again with another LightningModule starts anew."""
    pruning = ChannelPruning(amount=0.5, schedule="one_shot", start=1)
    watch = Watch(pruning)
    fit(seeded(Wrapped), tmp_path, pruning, watch, max_epochs=2)
    fit(seeded(Wrapped, width=4), tmp_path, pruning, watch, max_epochs=2)
    assert watch.sparsity == [0.0, 0.5, 0.0, 0.5]


def test_two_prunings_have_states_of_their_own(tmp_path: Path) -> None:
    """Two callbacks over different layers keep their states apart in a checkpoint."""
    first, second = ChannelPruning(layers="stem"), ChannelPruning(layers="wide")
    assert first.state_key != second.state_key
    result = fit(seeded(Wrapped), tmp_path, first, second, max_epochs=1)
    result.save_checkpoint(tmp_path / "both.ckpt")
    states = torch.load(tmp_path / "both.ckpt", weights_only=True)["callbacks"]
    assert "wide" not in states[first.state_key]["masks"] and "wide" in states[second.state_key]["masks"]


def test_fast_dev_run_rehearses_the_pruning(tmp_path: Path) -> None:
    """A rehearsal of one batch prunes too, whatever `start` says."""
    assert run(tmp_path, amount=0.5, start=7, watch_options={"fast_dev_run": True}).steps == [0.5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"amount": 1.5}, r"`amount` must be a fraction.*1\.5"),
        ({"unit": "batch"}, "`unit` must be 'epoch' or 'step', got 'batch'"),
        ({"start": -1}, "`start`.*-1"),
        ({"start": 5, "end": 3}, "`end` must not precede `start`"),
        ({"frequency": 0}, "`frequency`.*0"),
        ({"start": 1.5}, r"`start` must be a number of epochs >= 0, got 1\.5"),
        ({"end": "3"}, "`end` must be a number of epochs, got '3'"),
        ({"gather_every": 0}, "`gather_every` must be an integer >= 1, got 0"),
        ({"samples": float("nan")}, "`samples` must be an integer >= 2, got nan"),
        ({"target": "macs", "budget": float("inf")}, "`budget` must be a finite number of multiply-accumulates > 0"),
        ({"layers": 3}, "`layers` must be a string or a list or None, got 3"),
        ({"exclude": ["a", 1]}, "`exclude` must be a name pattern or a list of them"),
        ({"constants": 5}, "`constants` must be a string or a list or None, got 5"),
        ({"criterion": lambda group: 1}, "`criterion=.*` must take a group and an `Evidence`: too many"),
        ({"criterion": "gradient"}, "`criterion='gradient'`"),
        ({"schedule": "cosine"}, "`schedule='cosine'`"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    """Each bad argument is an error of the constructor that names it."""
    with pytest.raises(MisconfigurationException, match=message):
        ChannelPruning(**arguments)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ({"layers": "conv9*"}, {}, r"'conv9\*' matches no layer.*stem"),
        ({"exclude": ["nothing"]}, {}, "'nothing' matches no layer"),
        ({"layers": "fc"}, {}, "Nothing can be pruned.*fc"),
        ({"start": 3}, {"max_epochs": 3}, "`start=3` is after epoch 2"),
        ({}, {"max_epochs": -1, "max_steps": -1}, "length of the fit in epochs is not known.*pass `end`"),
    ],
)
def test_errors_come_before_the_first_step(
    tmp_path: Path, arguments: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    """What cannot work is an error before training starts, and the weights are as they were."""
    module = seeded(Wrapped)
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(MisconfigurationException, match=message):
        fit(module, tmp_path, ChannelPruning(**arguments), **options)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_length_from_max_steps(tmp_path: Path) -> None:
    """With `max_steps` alone the epochs follow from it: seven steps are three epochs, of which the last is not pruned
    in.
    """
    watch = run(tmp_path, amount=0.5, schedule="linear", watch_options={"max_epochs": -1, "max_steps": 7})
    assert watch.sparsity == [0.0, 0.25, 0.5]


def test_early_end_is_told(tmp_path: Path) -> None:
    """Where the fit ends before the schedule, a warning says how much is masked."""
    with pytest.warns(UserWarning, match="fit ended before epoch 9.*50% of the amount"):
        run(tmp_path, amount=0.5, schedule=lambda t: 0.5 + t / 1e9, end=9)


def test_lightnings_data_are_not_consumed(tmp_path: Path) -> None:
    """Each step still gets its batch: drawing the example input takes none away."""
    seen: list[Tensor] = []

    class Batches(Callback):
        def on_train_batch_start(
            self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
        ) -> None:
            seen.append(batch[0])

    fit(seeded(Wrapped), tmp_path, ChannelPruning(), Batches(), max_epochs=1)
    assert all(torch.equal(one, batch[0]) for one, batch in zip(seen, data(), strict=True))


class Manual(Wrapped):
    """Two optimizers that are stepped by hand, one of them every other time."""

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Both halves of the network."""
        front, back = self.optimizers()
        loss = self.loss(self.net(batch[0]), batch[1])
        front.zero_grad()
        back.zero_grad()
        self.manual_backward(loss)
        front.step()
        if batch_idx % 2 == 0:
            back.step()

    def configure_optimizers(self) -> Any:
        """Momentum and weight decay would revive zeros."""
        front = [*self.net.stem.parameters(), *self.net.norm.parameters(), *self.net.wide.parameters()]
        back = [*self.net.wide_norm.parameters(), *self.net.back.parameters(), *self.net.fc.parameters()]
        return torch.optim.SGD(front, 0.05, momentum=0.9, weight_decay=0.1), torch.optim.AdamW(back, 0.01)


@pytest.mark.parametrize("criterion", ["l2", "taylor", "mean_activation", "bn_scale"])
def test_several_optimizers_stepped_by_hand(tmp_path: Path, criterion: str) -> None:
    """Under manual optimization it prunes by epochs, and by steps where `end` is given; masked weights stay zero."""
    by_epoch = run(tmp_path, seeded(Manual), criterion=criterion, amount=0.5, gather_every=1)
    assert by_epoch.sparsity[-1] == 0.5 and max(by_epoch.leaks) == 0.0
    by_step = run(
        tmp_path, seeded(Manual), criterion=criterion, unit="step", start=3, end=8, amount=0.5, gather_every=1
    )
    assert by_step.steps[0] == 0.0 and by_step.steps[-1] == 0.5 and max(by_step.leaks) == 0.0


def test_steps_by_hand_need_an_end(tmp_path: Path) -> None:
    """How many optimizer steps a fit has is not known under manual optimization."""
    with pytest.raises(MisconfigurationException, match="length of the fit in steps is not known.*pass `end`"):
        run(tmp_path, seeded(Manual), unit="step", amount=0.5)


def test_one_epoch_is_too_short_to_gather(tmp_path: Path) -> None:
    """A criterion that needs statistics prunes from the second epoch on, and says so where there is none."""
    assert run(tmp_path, criterion="taylor", amount=0.5, gather_every=1).sparsity == [0.0, 0.0, 0.5]
    with pytest.raises(MisconfigurationException, match="the criterion first collects statistics"):
        run(tmp_path, criterion="taylor", amount=0.5, watch_options={"max_epochs": 1})


def test_cool_down(tmp_path: Path) -> None:
    """The last epochs train at final sparsity, as many as are asked for."""
    watch = run(tmp_path, amount=0.5, schedule="linear", cool_down=3, watch_options={"max_epochs": 5})
    assert watch.sparsity == [0.0, 0.25, 0.5, 0.5, 0.5]


def test_widths_are_rounded_on_the_way(tmp_path: Path) -> None:
    """At each pruning the width that is left is a multiple, and at the end what the amount asks for, rounded up."""
    watch = run(tmp_path, amount=0.6, schedule="linear", round_to=4, watch_options={"max_epochs": 6})
    assert all(16 * part % 4 == 0 for part in watch.sparsity) and watch.sparsity[-1] == 0.5


def test_the_whole_state_goes_along(tmp_path: Path) -> None:
    """A target stays relative to the unpruned model through a resume, and the flag `finished` too."""
    settings: dict[str, Any] = {"amount": 0.5, "target": "params", "schedule": "linear", "end": 4}
    whole, second = ChannelPruning(**settings), ChannelPruning(**settings)
    fit(seeded(Wrapped), tmp_path, whole, max_epochs=5)
    with pytest.warns(UserWarning, match="fit ended before"):
        stopped = fit(seeded(Wrapped), tmp_path, ChannelPruning(**settings), max_epochs=3)
    stopped.save_checkpoint(tmp_path / "last.ckpt")
    trainer(tmp_path, second, max_epochs=5).fit(seeded(Wrapped), ckpt_path=str(tmp_path / "last.ckpt"))
    assert whole.finished and second.finished
    assert torch.equal(whole.masks["wide"]["weight"], second.masks["wide"]["weight"])
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]  # primitives and tensors only


def test_dimensions_of_heads(tmp_path: Path) -> None:
    """They go in place of heads, half of them in all heads; the other callbacks go along, and a copy does."""
    module = Classifier("vit_b_16")
    compaction, monitor = ModelCompaction(confidence=2, on_failure="raise"), ComplexityMonitor()
    callbacks = [monitor, compaction, MaskConflictRepair(), ChannelPruning("l1", 0.5, end=1, attention="dimensions")]
    trainer(tmp_path, *callbacks, max_epochs=2).fit(module)
    attention = module.net.encoder.layers[0].self_attention
    assert attention.in_proj_weight.shape == (3 * 8, 8) and attention.head_dim == 2 and attention.num_heads == 4
    small = load_compacted(compaction.checkpoint_path, Classifier, name="vit_b_16")
    x = torch.randn(2, 3, SIDE, SIDE)
    assert torch.equal(small.eval().net(x), module.eval().net(x))
    assert engine.dependency_groups(copy.deepcopy(module.net), x)[1].size == 2


def test_unknown_units_of_attention() -> None:
    """They are named."""
    with pytest.raises(MisconfigurationException, match="'heads' or 'dimensions', got 'rows'"):
        ChannelPruning(attention="rows")

"""Tests of the compaction at the end of the fit, alone and together with the other callbacks."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer, callbacks
from pytorch_lightning.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn

import engine
from engine.errors import VerificationError
from lightning_compress import (
    ChannelPruning,
    ComplexityMonitor,
    CompressionReport,
    FinalMetric,
    MaskConflictRepair,
    ModelCompaction,
    load_compacted,
)
from lightning_compress.callbacks import compaction as compaction_module
from lightning_compress.report.latency import Comparison, Spread, compare
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.callbacks.test_repair import structured
from tests.lightning_compress.models import Base, Reference, Root, Wrapped, data, difference, fit, seeded, trainer

# Every callback first once, every callback last once, and neighbours in both orders.
ORDERS = [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1), (1, 3, 0, 2)]


def widths(module: LightningModule) -> tuple[int, int]:
    """Channels of the residual and of the wide convolution."""
    net = module.features if isinstance(module, Root) else module.net
    return net.stem.weight.shape[0], net.wide.weight.shape[0]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("cls", [Wrapped, Root])
def test_all_together_in_any_order(tmp_path: Path, order: tuple[int, ...], cls: type[Base]) -> None:
    """Whatever the order, the fit ends with a small model that computes what the masked one did, to 1e-9 in float64."""
    compaction, monitor, reference = ModelCompaction(on_failure="raise"), ComplexityMonitor(), Reference()
    callbacks = [ChannelPruning("l1", amount=0.5), MaskConflictRepair(policy="union"), monitor, compaction]
    module = seeded(cls)
    fit(module, tmp_path, reference, *[callbacks[i] for i in order], precision="64-true")
    assert widths(module) == (4, 8)
    assert reference.error(module) <= 1e-9
    assert compaction.certificate is not None and compaction.certificate.verified
    assert compaction.plan is not None and not compaction.plan.is_empty
    assert monitor.history[-2]["complexity/macs_compacted"] == monitor.history[-1]["complexity/macs"]
    assert Path(compaction.checkpoint_path) == tmp_path / "compacted.ckpt"


def test_pruning_and_compaction_alone(tmp_path: Path) -> None:
    """Two of the four suffice, here in float32."""
    module, reference = seeded(Wrapped), Reference()
    fit(module, tmp_path, reference, ChannelPruning(amount=0.75), ModelCompaction(on_failure="raise"))
    assert widths(module) == (2, 4)
    assert reference.error(module) <= 1e-4


def test_alone_it_removes_what_the_user_zeroed(tmp_path: Path) -> None:
    """Without any masks the zeros in the weights are removed; the unmasked norm behind them leaves a constant."""

    class Zero(Callback):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            for parameter in (pl_module.net.wide.weight, pl_module.net.wide.bias):
                parameter.data[:8] = 0

    module, reference = seeded(Wrapped), Reference()
    fit(module, tmp_path, reference, Zero(), ModelCompaction(on_failure="raise"), precision="64-true")
    assert widths(module)[0] == 8 and widths(module)[1] <= 9  # one dead channel may carry the constants
    assert reference.error(module) <= 1e-9


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_model_pruning_repaired_and_compacted(tmp_path: Path, order: tuple[int, ...]) -> None:
    """Lightning's ModelPruning, repair and compaction in any order: exact, and half of `wide` is gone."""
    module, reference = seeded(Wrapped), Reference()
    callbacks = [structured(module, "wide"), MaskConflictRepair(), ModelCompaction(on_failure="raise")]
    fit(module, tmp_path, reference, *[callbacks[i] for i in order], precision="64-true")
    assert widths(module) == (8, 8)
    assert reference.error(module) <= 1e-9
    assert all("_orig" not in name and "_mask" not in name for name in module.state_dict())


def test_masks_that_are_not_permanent_are_made_so(tmp_path: Path) -> None:
    """ModelPruning(make_pruning_permanent=False) leaves buffers; the compacted model has none and its checkpoint
    loads.
    """
    module = seeded(Wrapped)
    compaction = ModelCompaction(on_failure="raise")
    fit(module, tmp_path, structured(module, "wide", make_pruning_permanent=False), MaskConflictRepair(), compaction)
    assert widths(module) == (8, 8)
    assert difference(load_compacted(compaction.checkpoint_path, Wrapped), module) == 0.0


def test_masks_are_not_permanent_if_the_compaction_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is as before: its originals, masked weights included, and the masks."""

    def fail(*args: Any) -> Any:
        raise VerificationError("This is a test.")

    monkeypatch.setattr(compaction_module, "shrink", fail)
    module = seeded(Wrapped)
    pruning = structured(module, "wide", make_pruning_permanent=False)
    with pytest.warns(UserWarning, match=r"is unchanged: This is a test\."):
        fit(module, tmp_path, pruning, MaskConflictRepair(), ModelCompaction())
    wide = module.net.wide
    assert not wide.weight_mask.all() and wide.weight_orig[wide.weight_mask == 0].count_nonzero() > 0
    assert torch.equal(wide.weight, wide.weight_orig * wide.weight_mask)


def test_module_and_parameters_stay_the_same_objects(tmp_path: Path) -> None:
    """Compaction is in place: modules, Parameters and the optimizer's references to them are those of before."""
    module = seeded(Wrapped)
    modules, parameters = list(module.modules()), list(module.parameters())
    result = fit(module, tmp_path, ChannelPruning(amount=0.5), ModelCompaction(on_failure="raise"))
    assert all(a is b for a, b in zip(modules, module.modules(), strict=True))
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    optimizer = result.optimizers[0]
    assert all(optimizer.state[p]["momentum_buffer"].shape == p.shape for p in module.parameters())


def test_compacted_model_trains_on(tmp_path: Path) -> None:
    """A second fit of the compacted model runs, prunes what is left, and compacts again."""
    module, pruning = seeded(Wrapped), ChannelPruning(amount=0.5)
    fit(module, tmp_path, pruning, ModelCompaction(on_failure="raise"))
    assert pruning.masks == {}
    with pytest.warns(UserWarning, match="compacted at the end of an earlier fit"):
        fit(module, tmp_path, pruning, ModelCompaction(on_failure="raise"))
    assert widths(module) == (2, 4)


def test_what_is_said_is_short(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line for what became smaller, whatever the size of the model, one for the verdict, and where to read more."""
    module, compaction = seeded(Wrapped), ModelCompaction(on_failure="raise")
    before = sum(p.numel() for p in module.parameters())
    with caplog.at_level("INFO"):
        fit(module, tmp_path, ChannelPruning(amount=0.5), MaskConflictRepair(), compaction)
    (said,) = (record.getMessage() for record in caplog.records if "ModelCompaction:" in record.getMessage())
    first, *rest = said.splitlines()
    assert f"{before:,} -> {sum(p.numel() for p in module.parameters()):,} parameters" in first
    assert "print(compaction.plan)" in first and rest == str(compaction.certificate).splitlines()


def test_nothing_masked_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With nothing masked it says so, writes no file, and weights are those of a fit without it, bit for bit."""
    plain, module, compaction = seeded(Wrapped), seeded(Wrapped), ModelCompaction(on_failure="raise")
    fit(plain, tmp_path)
    with caplog.at_level("INFO"):
        fit(module, tmp_path, compaction)
    assert "no masked channels" in caplog.text
    assert all(
        torch.equal(a, b) for a, b in zip(plain.state_dict().values(), module.state_dict().values(), strict=True)
    )
    assert compaction.checkpoint_path is None and compaction.plan is None
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_small_model_that_is_trained_further_is_saved(tmp_path: Path) -> None:
    """Nothing more is removed, but its weights are others than in the file of the first fit."""
    module, first, second = seeded(Wrapped), ModelCompaction(tmp_path), ModelCompaction(tmp_path)
    fit(module, tmp_path, ChannelPruning(amount=0.5), first)
    loaded = load_compacted(first.checkpoint_path, Wrapped)
    for small in (module, loaded):
        fit(small, tmp_path, second)
        assert second.plan is None and second.failure is None
        again = load_compacted(second.checkpoint_path, Wrapped)
        assert widths(again) == widths(small) == (4, 8)
        assert torch.equal(again.net.wide.weight, small.net.wide.weight)


@pytest.mark.parametrize("ending", ["early_stopping", "max_time", "should_stop"])
def test_early_endings(tmp_path: Path, ending: str) -> None:
    """EarlyStopping, max_time and `trainer.should_stop` end the fit early; it is compacted all the same."""

    class Stop(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
            trainer.should_stop = True

    callbacks: dict[str, list[Any]] = {
        "early_stopping": [EarlyStopping("val_loss", patience=1)],
        "max_time": [],
        "should_stop": [Stop()],
    }
    options = {"max_time": timedelta(seconds=0.3)} if ending == "max_time" else {}
    module, reference, compaction = seeded(Wrapped), Reference(), ModelCompaction(on_failure="raise")
    pruning = ChannelPruning(amount=0.5, schedule="one_shot", end=9999)
    stopped = fit(
        module,
        tmp_path,
        reference,
        compaction,
        pruning,
        *callbacks[ending],
        max_epochs=10_000,
        limit_val_batches=1,
        **options,
    )
    assert 0 < stopped.current_epoch < 9000
    assert widths(module) == (4, 8)
    assert reference.error(module) <= 1e-4
    assert difference(load_compacted(compaction.checkpoint_path, Wrapped), module) == 0.0


@pytest.fixture
def interrupt() -> Iterator[Callback]:
    """A callback that presses Ctrl-C in the second epoch; Lightning then ignores the signal, which is undone here."""

    class Interrupt(Callback):
        def on_train_batch_start(self, trainer: Trainer, *rest: Any) -> None:
            if trainer.current_epoch == 1:
                raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    yield Interrupt()
    signal.signal(signal.SIGINT, handler)


def test_keyboard_interrupt(tmp_path: Path, interrupt: Callback) -> None:
    """Ctrl-C ends the process with Lightning's exit code, the model compacted and its checkpoint written."""
    module, compaction = seeded(Wrapped), ModelCompaction(on_failure="raise")
    with pytest.raises(SystemExit):
        fit(module, tmp_path, compaction, ChannelPruning(amount=0.5, schedule="one_shot"), interrupt)
    assert widths(module) == (4, 8)
    assert difference(load_compacted(compaction.checkpoint_path, Wrapped), module) == 0.0


def test_keyboard_interrupt_under_model_pruning(tmp_path: Path, interrupt: Callback) -> None:
    """On Ctrl-C ModelPruning's buffers are still there: the checkpoint holds plain weights."""
    module, compaction = seeded(Wrapped), ModelCompaction(on_failure="raise")
    with pytest.raises(SystemExit):
        fit(module, tmp_path, compaction, structured(module, "wide"), MaskConflictRepair(), interrupt)
    assert widths(module) == (8, 8)
    assert difference(load_compacted(compaction.checkpoint_path, Wrapped), module) == 0.0


# Lightning looks for a file of an earlier interruption before it trains, and warns that there is none.
@pytest.mark.filterwarnings("ignore:.*was called without a model", "ignore:.*no last checkpoint available")
def test_checkpoint_saved_by_others_after_the_compaction_holds_the_plan(tmp_path: Path, interrupt: Callback) -> None:
    """OnExceptionCheckpoint saves after the compaction on Ctrl-C: its file loads as a compacted one."""
    module = seeded(Wrapped)
    saver = OnExceptionCheckpoint(tmp_path, filename="interrupted")
    callbacks = [saver, ModelCompaction(), ChannelPruning(amount=0.5, schedule="one_shot"), interrupt]
    with pytest.raises(SystemExit):
        fit(module, tmp_path, *callbacks, enable_checkpointing=True)
    assert difference(load_compacted(tmp_path / "interrupted.ckpt", Wrapped), module) == 0.0


def test_other_exceptions_leave_the_model_alone(tmp_path: Path) -> None:
    """An error in the training is passed on; nothing is compacted or written."""

    class Fail(Callback):
        def on_train_batch_start(self, trainer: Trainer, *rest: Any) -> None:
            if trainer.current_epoch == 1:
                raise RuntimeError("broken")

    module = seeded(Wrapped)
    with pytest.raises(RuntimeError, match="broken"):
        fit(module, tmp_path, ChannelPruning(amount=0.5, schedule="one_shot"), ModelCompaction(), Fail())
    assert widths(module) == (8, 16)
    assert not list(tmp_path.rglob("*.ckpt"))


def test_interrupt_before_training_leaves_the_model_alone(tmp_path: Path, interrupt: Callback) -> None:
    """Ctrl-C during the set-up: nothing has been trained, so nothing is compacted."""

    class Early(Callback):
        def setup(self, trainer: Trainer, *rest: Any, **options: Any) -> None:
            raise KeyboardInterrupt

    module = seeded(Wrapped)
    with pytest.raises(SystemExit):
        fit(module, tmp_path, ModelCompaction(), Early())
    assert widths(module) == (8, 16)


def test_resuming_a_finished_run_compacts(tmp_path: Path) -> None:
    """Lightning skips on_train_end where a finished run is resumed; the restored masks are compacted all the same."""
    first, second, compaction = seeded(Wrapped), seeded(Wrapped), ModelCompaction(on_failure="raise")
    fit(first, tmp_path, ChannelPruning(amount=0.5)).save_checkpoint(tmp_path / "end.ckpt")
    trainer(tmp_path, ChannelPruning(amount=0.5), compaction).fit(second, ckpt_path=str(tmp_path / "end.ckpt"))
    assert widths(second) == (4, 8)
    assert difference(first, second) <= 1e-4


def test_averaged_weights_are_masked_again(tmp_path: Path) -> None:
    """Weight averaging mixes unpruned weights in; what is masked is zero again before it is removed."""
    module, compaction = seeded(Wrapped), ModelCompaction(on_failure="raise")
    averaging = StochasticWeightAveraging(0.01, swa_epoch_start=1)
    fit(module, tmp_path, compaction, averaging, ChannelPruning(amount=0.5), max_epochs=5)
    assert widths(module) == (4, 8)


@pytest.mark.skipif(not hasattr(callbacks, "WeightAveraging"), reason="comes with a later Lightning")
def test_averaged_weights_are_masked_where_compaction_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the model that stays as it is has zeros where it is masked, after weight averaging put others there."""
    failing(monkeypatch)
    module, averaging = seeded(Wrapped), callbacks.WeightAveraging()
    with pytest.warns(UserWarning, match="not compacted"):
        fit(module, tmp_path, ModelCompaction(), averaging, ChannelPruning(amount=0.5), max_epochs=5)
    assert int((module.net.wide.weight.flatten(1) == 0).all(1).sum()) == 8


def test_model_by_path(tmp_path: Path) -> None:
    """Pruning and compaction find the same model by its path, and by different paths to parts of one another."""
    module, reference = seeded(Root), Reference()
    pruning = ChannelPruning(amount=0.5, model="features")
    fit(module, tmp_path, reference, pruning, ModelCompaction(model="", on_failure="raise"), precision="64-true")
    assert widths(module) == (4, 8)
    assert reference.error(module) <= 1e-9


@pytest.mark.parametrize("source", ["attribute", "argument", "batch"])
def test_example_input_from_anywhere(tmp_path: Path, source: str) -> None:
    """It works with `example_input_array`, an argument, or the first batch."""
    module, reference = seeded(Wrapped), Reference()
    if source == "attribute":
        module.example_input_array = torch.ones(1, 3, 8, 8)
    given = torch.ones(1, 3, 8, 8) if source == "argument" else None
    callbacks = [ChannelPruning(amount=0.5, example_input=given), ModelCompaction(example_input=given)]
    fit(module, tmp_path, reference, *callbacks)
    assert widths(module) == (4, 8)
    assert reference.error(module) <= 1e-4


@pytest.mark.parametrize(("after", "warns"), [(1.2, True), (1.01, False), (0.5, False)])
def test_a_network_that_became_slower_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: float, warns: bool
) -> None:
    """Timed in turns right after; what is within the noise is not a loss."""

    def times(masked: nn.Module, compacted: nn.Module, example: Any, runs: int) -> Comparison:
        return Comparison(Spread(1.0, 1.0, 1.0), Spread(after, after, after), runs, "[2, 3, 8, 8]", "CPU, 1 thread")

    monkeypatch.setattr(compaction_module, "compare", times)
    expected = pytest.warns(UserWarning, match=r"slower.*masked 1 ms.*compacted 1\.2 ms") if warns else nullcontext()
    with expected:
        fit(seeded(Wrapped), tmp_path, ChannelPruning(amount=0.5), ModelCompaction(latency_runs=5))


def test_nothing_is_timed_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default no forward pass is spent on it; where this or another callback asks, the real clock is read."""
    silent = ModelCompaction()
    fit(seeded(Wrapped), tmp_path, ChannelPruning(amount=0.5), silent)
    assert silent.latency is None and silent.not_timed == ""
    asked = ModelCompaction(latency_runs=2)
    fit(seeded(Wrapped), tmp_path, ChannelPruning(amount=0.5), asked)
    assert asked.latency is not None and asked.latency.runs == 2 and asked.latency.example == "2×3×8×8"
    report = CompressionReport(terminal="none", figures=False, latency_runs=3)
    fit(seeded(Wrapped), tmp_path, report, ChannelPruning(amount=0.5), silent)
    assert silent.latency is not None and silent.latency.runs == 3
    assert report.report is not None and report.report.latency == silent.latency


def test_the_masked_network_is_timed_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared are the wide network with its zeros and the narrow one, with the same outputs."""
    seen: list[tuple[int, int, bool]] = []

    def watched(masked: Any, compacted: Any, example: Any, runs: int) -> Comparison:
        same = torch.allclose(masked.eval()(example), compacted.eval()(example), atol=1e-5)
        seen.append((masked.stem.out_channels, compacted.stem.out_channels, same))
        return compare(masked, compacted, example, runs)

    monkeypatch.setattr(compaction_module, "compare", watched)
    fit(seeded(Wrapped), tmp_path, ChannelPruning(amount=0.5), ModelCompaction(latency_runs=2))
    assert seen == [(8, 4, True)]


def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every verification fail, as the engine does: with an error, the model untouched."""

    def fail(self: Any, *rest: Any, **options: Any) -> nn.Module:
        raise VerificationError("channel 3 of norm differs")

    monkeypatch.setattr(engine.ModelSpeedup, "compacting", fail)


def test_failure_warns_and_keeps_the_masked_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default a long fit ends with a warning; the masked model is untouched, and its checkpoint is written and
    loads.
    """
    failing(monkeypatch)
    module, reference, compaction = seeded(Wrapped), Reference(), ModelCompaction()
    with pytest.warns(UserWarning, match="not compacted.*channel 3 of norm differs"):
        fit(module, tmp_path, reference, ChannelPruning(amount=0.5), compaction)
    assert widths(module) == (8, 16) and reference.error(module) == 0.0
    assert compaction.plan is None and compaction.certificate is None
    assert difference(load_compacted(compaction.checkpoint_path, Wrapped), module) == 0.0


def test_failure_raises_where_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With on_failure="raise" the engine's error is raised, the model untouched and no file written."""
    failing(monkeypatch)
    module = seeded(Wrapped)
    with pytest.raises(VerificationError, match="channel 3"):
        fit(module, tmp_path, ChannelPruning(amount=0.5), ModelCompaction(on_failure="raise"))
    assert widths(module) == (8, 16)
    assert not list(tmp_path.rglob("*.ckpt"))


def test_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    """Where the checkpoint could not be written an error says so before the fit; the old content stays."""
    (tmp_path / "file").write_text("not a folder")
    module = seeded(Wrapped)
    before = [parameter.clone() for parameter in module.parameters()]
    with pytest.raises(MisconfigurationException, match="file/compacted.ckpt could not be written"):
        fit(module, tmp_path, ChannelPruning(amount=0.5), ModelCompaction(dirpath=tmp_path / "file"))
    assert all(map(torch.equal, before, module.parameters()))
    assert (tmp_path / "file").read_text() == "not a folder"


def test_checkpoint_goes_to_the_log_folder(tmp_path: Path) -> None:
    """By default it is `compacted.ckpt` in the Trainer's log folder; folder and name can be given."""
    default, named = ModelCompaction(), ModelCompaction(tmp_path / "there", filename="small")
    logger = CSVLogger(tmp_path)
    fit(seeded(Wrapped), tmp_path, ChannelPruning(amount=0.5), default, logger=logger)
    fit(seeded(Wrapped), tmp_path, ChannelPruning(amount=0.5), named)
    assert default.checkpoint_path == str(Path(logger.log_dir) / "compacted.ckpt")
    assert named.checkpoint_path == str(tmp_path / "there" / "small.ckpt")
    assert Path(default.checkpoint_path).is_file() and Path(named.checkpoint_path).is_file()


@pytest.mark.parametrize("options", [{"save": False}, {"rehearsal": True}])
def test_no_file_where_none_is_wanted(tmp_path: Path, options: dict[str, bool]) -> None:
    """With save=False, and in a rehearsal (fast_dev_run), the model is compacted and no file written."""
    module, rehearsal = seeded(Wrapped), options.pop("rehearsal", False)
    fit(module, tmp_path, ChannelPruning(amount=0.5), ModelCompaction(**options), fast_dev_run=rehearsal)
    assert widths(module) == (4, 8)
    assert not list(tmp_path.rglob("*.ckpt"))


def test_states_are_saved_where_asked(tmp_path: Path) -> None:
    """By default weights only, from which no fit goes on; with states, which are as small as the weights, one does."""
    small, whole = ModelCompaction(tmp_path, "small"), ModelCompaction(tmp_path, "whole", save_weights_only=False)
    module = seeded(Wrapped)
    fit(module, tmp_path, ChannelPruning(amount=0.5), small)
    with pytest.raises(KeyError, match="contains only the model"):  # Lightning's
        trainer(tmp_path, ModelCompaction(), max_epochs=4).fit(seeded(Wrapped), ckpt_path=small.checkpoint_path)
    fit(seeded(Wrapped), tmp_path, ChannelPruning(amount=0.5), whole)
    state = torch.load(whole.checkpoint_path, weights_only=True)["optimizer_states"][0]["state"]
    shapes = [p.shape for p in module.parameters()]
    assert [state[n]["momentum_buffer"].shape for n in range(len(shapes))] == shapes
    resumed = trainer(tmp_path, ChannelPruning(amount=0.5), ModelCompaction(save=False), max_epochs=4)
    resumed.fit(seeded(Wrapped), ckpt_path=whole.checkpoint_path)
    assert resumed.global_step == 12


def test_a_finished_schedule_stays_finished_when_resumed(tmp_path: Path) -> None:
    """The files hold masks that fit the small model and the end of the schedule: nothing is pruned a second time."""
    compaction, pruning = ModelCompaction(save_weights_only=False), ChannelPruning(amount=0.5)
    later = fit(seeded(Wrapped), tmp_path, pruning, MaskConflictRepair(), compaction)
    assert pruning.finished and pruning.masks == {}
    later.save_checkpoint(tmp_path / "later.ckpt")
    for path in (compaction.checkpoint_path, tmp_path / "later.ckpt"):
        module, again = seeded(Wrapped), ChannelPruning(amount=0.5)
        callbacks = [again, MaskConflictRepair(), FinalMetric("val_loss"), ModelCompaction(save=False)]
        resumed = trainer(tmp_path, *callbacks, max_epochs=5, limit_val_batches=1)
        resumed.fit(module, ckpt_path=str(path))
        assert widths(module) == (4, 8) and again.finished
        assert resumed.callback_metrics["val_loss_final"] == 1.0


def test_an_unfinished_schedule_continues_when_resumed(tmp_path: Path) -> None:
    """Channels that were removed count as pruned; a fit of the same callbacks without a checkpoint starts anew."""
    options: dict[str, Any] = {"amount": 0.5, "schedule": "linear", "end": 4}
    compaction, pruning = ModelCompaction(save_weights_only=False), ChannelPruning(**options)
    with pytest.warns(UserWarning, match="fit ended before epoch 4"):
        fit(seeded(Wrapped), tmp_path, pruning, compaction)
    module = seeded(Wrapped)
    resumed = trainer(tmp_path, ChannelPruning(**options), ModelCompaction(save=False), max_epochs=6)
    resumed.fit(module, ckpt_path=compaction.checkpoint_path)
    assert widths(module) == (4, 8)
    other = seeded(Wrapped)
    fit(other, tmp_path, pruning, ModelCompaction(save=False), max_epochs=6)
    assert widths(other) == (4, 8)


class Pair(Base):
    """Two networks in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 3, 1))
        self.second = nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), nn.Conv2d(16, 3, 1))

    def logits(self, x: Tensor) -> Tensor:
        """Output of both."""
        return self.second(self.first(x)).mean((2, 3))


def both(**options: Any) -> list[Any]:
    """Pruning and compaction of each of the two, from the same example."""
    example, paths = torch.zeros(2, 3, 8, 8), ("first", "second")
    prunings = [ChannelPruning(amount=0.5, model=path, example_input=example) for path in paths]
    compactions = [ModelCompaction(model=path, filename=path, example_input=example, **options) for path in paths]
    return [*prunings, *compactions]


def test_two_networks_have_compactions_and_states_of_their_own(tmp_path: Path) -> None:
    """Each removes half of its network, and the checkpoint holds the plan of each."""
    module, callbacks = seeded(Pair), both(when=[1], on_failure="raise", save=False)
    fit(module, tmp_path, *callbacks).save_checkpoint(tmp_path / "last.ckpt")
    states = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]
    for callback, own in zip(callbacks[2:], ("first", "second"), strict=True):
        assert states[callback.state_key]["model"] == own and callback.plan is not None
    assert module.first[0].out_channels == 4 and module.second[0].out_channels == 8


def test_a_state_from_before_compactions_had_their_own(tmp_path: Path) -> None:
    """It is found under the name of the class, unless it is that of a compaction of another model."""
    compaction = ModelCompaction(model="net")
    assert compaction._legacy_state_key == "ModelCompaction" == ModelCompaction().state_key != compaction.state_key
    compaction.load_state_dict({"epoch": 3, "plan": None, "certificate": None})
    assert compaction._epoch == 3
    compaction.load_state_dict({"epoch": 4, "plan": None, "certificate": None, "model": None})
    assert compaction._epoch == 3


@pytest.mark.parametrize("rehearsal", [False, True])
def test_another_fit_of_a_compacted_module_is_reported(tmp_path: Path, rehearsal: bool) -> None:
    """It prunes the small network further; a rehearsal compacts too; the first fit causes no warning."""
    module = seeded(Wrapped)
    fit(module, tmp_path, ChannelPruning(amount=0.5), ModelCompaction(save=False), fast_dev_run=rehearsal)
    with pytest.warns(UserWarning, match=r"compacted at the end of an earlier fit \(\d+ -> \d+ parameters"):
        fit(module, tmp_path, ChannelPruning(amount=0.5), ModelCompaction(save=False))
    assert widths(module) == (2, 4)


def test_an_unfinished_schedule_is_reported_after_an_interrupt(tmp_path: Path, interrupt: Callback) -> None:
    """As after any other early end."""
    with (
        pytest.warns(UserWarning, match="fit ended before epoch 2, .* only 0% of the amount"),
        pytest.raises(SystemExit),
    ):
        fit(seeded(Wrapped), tmp_path, ChannelPruning(start=1, end=2), ModelCompaction(save=False), interrupt)


@pytest.mark.skipif(not hasattr(callbacks, "EMAWeightAveraging"), reason="Lightning 2.6")
def test_states_beside_an_average(tmp_path: Path) -> None:
    """What is saved is what was verified, and not an average that a callback puts into every checkpoint."""
    compaction, average = ModelCompaction(save_weights_only=False), callbacks.EMAWeightAveraging(decay=0.5)
    module = seeded(Wrapped)
    fit(module, tmp_path, ChannelPruning(amount=0.5), compaction, average)
    assert difference(load_compacted(compaction.checkpoint_path, Wrapped), module) == 0.0


def test_model_checkpoint_saves_the_masked_model(tmp_path: Path) -> None:
    """ModelCheckpoint's files are from before the compaction and load into the full class."""
    saver = ModelCheckpoint(dirpath=tmp_path, filename="best", save_last=True)
    fit(seeded(Wrapped), tmp_path, ModelCompaction(), ChannelPruning(amount=0.5), saver, enable_checkpointing=True)
    assert widths(Wrapped.load_from_checkpoint(tmp_path / "last.ckpt")) == (8, 16)


def test_validation_alone_does_nothing(tmp_path: Path) -> None:
    """`trainer.validate` and `trainer.test` run no compaction."""
    module = seeded(Wrapped)
    module.net.wide.weight.data[:8] = 0
    trainer(tmp_path, ModelCompaction(), ChannelPruning(), limit_val_batches=1).validate(module, data(), verbose=False)
    assert widths(module) == (8, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_failure": "ignore"}, "`on_failure` must be 'warn' or 'raise', got 'ignore'"),
        ({"when": []}, r"`when` must be an epoch >= 0, .*; got \[\]"),
        ({"confidence": -1}, "`confidence`.*-1"),
        ({"dirpath": "s3://bucket/run"}, "`dirpath` must be a local folder, got 's3://bucket/run'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    """Each bad argument is an error of the constructor that names it."""
    with pytest.raises(MisconfigurationException, match=message):
        ModelCompaction(**arguments)


def test_the_ending_is_not_doubled() -> None:
    """Whether the name has it or not."""
    assert ModelCompaction(filename="small.ckpt").filename == ModelCompaction(filename="small").filename == "small"


def test_a_second_run_does_not_overwrite_the_first(tmp_path: Path) -> None:
    """Its checkpoint gets a number, as those of `ModelCheckpoint` do, and `checkpoint_path` says which."""
    first, second = ModelCompaction(tmp_path), ModelCompaction(tmp_path)
    fit(seeded(Wrapped), tmp_path, ChannelPruning(amount=0.5), first)
    content = Path(first.checkpoint_path).read_bytes()
    fit(seeded(Wrapped), tmp_path, ChannelPruning(amount=0.25), second)
    assert Path(second.checkpoint_path).name == "compacted-v1.ckpt"
    assert Path(first.checkpoint_path).read_bytes() == content
    assert not list(tmp_path.glob(".lightning-compress-*"))


class Stream(Base):
    """A residual sum in front of a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.norm = nn.Linear(3, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, 4)."""
        x = self.stem(x.mean((2, 3)))
        return self.head(self.norm(x + self.body(x)))  # type: ignore[no-any-return]

    def logits(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, 4)."""
        return self(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("plain", [False, True])
def test_norms_may_become_ordinary_ones(tmp_path: Path, plain: bool) -> None:
    """Only if asked for; the certificate and the report say that this is another function."""
    module, compaction = seeded(Stream), ModelCompaction(on_failure="raise", plain_norms=plain)
    report = CompressionReport(terminal="none", figures=False, latency_runs=0)
    fit(module, tmp_path, ChannelPruning(amount=0.5, exclude="head"), MaskConflictRepair(), compaction, report)
    assert module.stem.out_features == 4
    assert (type(module.norm) is nn.LayerNorm) is plain
    assert compaction.certificate is not None and compaction.certificate.exact is not plain
    assert report.report is not None and ("ordinary norms" in report.report.verdict[1]) is plain

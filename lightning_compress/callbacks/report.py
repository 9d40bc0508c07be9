"""Compression report at the end of a fit: an HTML page, a summary in the terminal, and entries for loggers."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

import engine
from engine.bounds import check_kinds
from engine.plots import accuracy_figure, channels_figure, dependency_figure
from lightning_compress.callbacks.base import CompressionCallback
from lightning_compress.callbacks.compaction import ModelCompaction
from lightning_compress.callbacks.complexity import ComplexityMonitor
from lightning_compress.callbacks.masking import active_masks
from lightning_compress.checkpoints.saving import check_room
from lightning_compress.report import loggers, page, terminal
from lightning_compress.report.content import Report, gains, kept_channels, sections
from lightning_compress.report.latency import check_runs, device_name
from lightning_compress.report.stages import Point, against_cost, stages
from lightning_compress.report.survey import Survey, survey
from lightning_compress.report.text import markdown
from lightning_compress.trainer.packages import MisconfigurationException
from lightning_compress.trainer.strategy import parallel, shards

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

# Metrics for the comparison of runs, beside the settings; ComplexityMonitor logs them.
COMPARED = ("complexity/macs", "complexity/params", "sparsity/channels")

# Arguments that are hyperparameters of a run even at their defaults.
MAIN = ("amount", "criterion")

PACKAGE = __name__.partition(".")[0]

# Callbacks and arguments that do not affect the compressed model, so they are no hyperparameters.
OUTPUT = (
    *("CompressionReport", "ComplexityMonitor", "dirpath", "filename", "save", "save_weights_only", "model"),
    *("confidence", "latency_runs", "on_failure"),
)

# Sections that loggers get under their own tags.
TAGGED = ("Plan", "Certificate")


class CompressionReport(CompressionCallback):
    """Report the compression at the end of the fit.

    It writes a self-contained HTML page, prints the same to the terminal, and logs figures, tables and hyperparameters
    to the loggers that support them (TensorBoard supports all). It compares the model at the start of training with the
    model at the end, whatever compressed it and whatever the order of the callbacks. Curves over the training come from
    ``ComplexityMonitor``, if there is one.

    It acts in ``teardown``. Lightning does not call that on Ctrl-C, so it acts in ``on_exception`` then, and
    `ModelCompaction` has to precede it in the list of callbacks.

    Args:
        dirpath: local folder of the page; by default the Trainer's log folder.
        filename: its name, without ``.html``. If the file exists, ``-v1`` is appended, and so on.
        terminal: ``"rich"``, ``"plain"`` (needs no other package), or ``"none"``.
        figures: whether to draw figures for the loggers; requires matplotlib.
        latency_runs: number of timed forward passes of the masked and of the compacted network, in turns, when
            `ModelCompaction` compacts; 0: latency is not measured.
        model: path of the model inside the LightningModule.
        example_input: example input of the model.

    Attributes:
        path: path of the page, once written.
        report: its content.

    Raises:
        MisconfigurationException: at the start of a fit, if a package is missing.

    Example:
        >>> CompressionReport(terminal="plain", figures=False).path is None
        True
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str = "compression",
        terminal: str = "rich",
        figures: bool = True,
        latency_runs: int = 10,
        model: str | None = None,
        example_input: Any = None,
    ) -> None:
        check_kinds(CompressionReport.__init__, locals(), MisconfigurationException)
        super().__init__(model, example_input)
        check_runs(latency_runs)
        self.dirpath, self.filename, self.terminal = dirpath, filename, terminal
        self.figures, self.latency_runs = figures, latency_runs
        self.path: Path | None = None
        self.report: Report | None = None
        self._before: Survey | None = None
        self._folder: Path | None = None
        self._metrics: dict[str, float] = {}
        self._points: list[Point] = []

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(model=self.model)

    @override
    def state_dict(self) -> dict[str, Any]:
        before = None if self._before is None else self._before.state_dict()
        return {"before": before, "points": [point.state_dict() for point in self._points]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # A resumed fit may start from a model that has already lost channels.
        self._before = None if state_dict["before"] is None else Survey.from_state_dict(state_dict["before"])
        self._points = [Point(**point) for point in state_dict.get("points", ())]

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        terminal.check(self.terminal)
        if self.figures and importlib.util.find_spec("matplotlib") is None:
            raise MisconfigurationException(
                "`figures=True` needs matplotlib, which is not installed. Install the extra, "
                "pip install 'lightning-compress[report]', or choose `figures=False`."
            )
        self._before, self.report, self.path = None, None, None
        self._points = []
        self._folder = Path(self.dirpath or trainer.log_dir or trainer.default_root_dir)
        check_room(trainer, self._folder / f"{self.filename}.html")

    @override
    def why_not_sharded(self) -> str | None:
        return None

    @override
    def timed_runs(self) -> int:
        return self.latency_runs

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        changed = settings(trainer, changed=True)  # columns of defaults would crowd out the metrics
        own = {
            f"{name}/{key}": value
            for name, args in settings(trainer).items()
            for key, value in args.items()
            if not name.startswith(OUTPUT) and key not in OUTPUT and (key in changed[name] or key in MAIN)
        }
        monitored = any(isinstance(c, ComplexityMonitor) for c in trainer.callbacks)  # type: ignore[attr-defined]
        metrics = dict.fromkeys(COMPARED, 0.0) if monitored else {}
        for logger in trainer.loggers:
            loggers.log_settings(logger, {**pl_module.hparams, **own}, metrics)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero and not shards(trainer):
            return
        with self.planning(trainer, pl_module) as (model, example):
            if self._before is None:
                self._before = survey(model, example)
            dependency = engine.ChannelDependency(model, example)
        sets = [[name for name in dependency.channels if name in names] for names in dependency.dependency_sets]
        if self.figures and sets:
            self._show("dependency", dependency_figure(sets, dependency.channels), trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        masks = active_masks(callbacks, pl_module, self.target(pl_module)[0])
        masked = sum(int((mask == 0).sum()) for own in masks.values() for mask in own.values())
        compacted = any(c.plan is not None for c in callbacks if isinstance(c, ModelCompaction))
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self._points.append(Point(trainer.global_step, masked, compacted, metrics))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Later evaluations overwrite the Trainer's metrics.
        self._metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt):
            self._finish(trainer, pl_module)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._finish(trainer, pl_module)

    def _finish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._before is None or self._folder is None or self.report is not None or not trainer.is_global_zero:
            return
        was, strategy = pl_module.device, parallel(trainer)
        strategy.move(pl_module, trainer.strategy.root_device)  # Lightning has moved it to the CPU
        try:
            self.report = self._collect(trainer, pl_module, self._before)
        finally:
            strategy.move(pl_module, was)
        self.path = page.write(self.report, self._folder / f"{self.filename}.html")
        self._log(trainer, self.report)
        terminal.show(self.report, self.terminal, where=str(self.path))
        rank_zero_info(f"CompressionReport: {self.path}")

    def _collect(self, trainer: Trainer, pl_module: LightningModule, before: Survey) -> Report:
        path = self.target(pl_module)[0]
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        masks = active_masks(callbacks, pl_module, path)
        with self.planning(trainer, pl_module) as (model, example):
            name = type(model if path else pl_module).__name__
            small = engine.count_flops_params(model, example, verbose=False, masks=masks) if masks else None
            after = survey(model, example, masks)
        mine = {c: c.target(pl_module)[0] for c in callbacks if isinstance(c, ModelCompaction)}
        mine = {c: own for c, own in mine.items() if _inside(own, path) or _inside(path, own)}
        done = next((c for c in mine if c.plan is not None), None)
        monitor = next((c for c in callbacks if isinstance(c, ComplexityMonitor)), None)
        return Report(
            model=name,
            before=before,
            after=after,
            plan=None if done is None else done.plan,
            certificate=None if done is None else done.certificate,
            predicted=None if small is None else (int(small[0]), int(small[1])),
            latency=None if done is None else done.latency,
            not_timed="" if done is None else done.not_timed,
            note=next((c.failure for c in mine if c.failure), ""),
            history=() if monitor is None else tuple(monitor.history),
            metrics=self._metrics,
            settings={name: own for name, own in settings(trainer, changed=True).items() if own},
            stages=stages(
                self._points,
                (before.macs, before.params),
                None if done is None else (after.macs, after.params),
                exact=done is None or done.certificate is None or done.certificate.exact,
            ),
            facts={
                "date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
                "device": device_name(model),
                "run": str(self._folder),
            },
            part=mine[done].removeprefix(path).lstrip(".") if done and _inside(mine[done], path) else "",
        )

    def _log(self, trainer: Trainer, report: Report) -> None:
        kept = kept_channels(report)
        if self.figures and kept:
            self._show("channels", channels_figure(kept), trainer)
        metric, points = against_cost(report.stages)
        if self.figures and points:
            self._show("accuracy_against_cost", accuracy_figure(metric, points), trainer)
        report_sections = sections(report)
        texts = {
            "report": "\n\n".join(f"## {s.title}\n\n{markdown(s)}" for s in report_sections if s.title not in TAGGED),
            **{s.title.lower(): markdown(s) for s in report_sections if s.title in TAGGED},
        }
        for logger in trainer.loggers:
            for tag, text in texts.items():
                loggers.log_text(logger, f"compression/{tag}", text, trainer.global_step)
            loggers.log_summary(logger, gains(report))

    def _show(self, tag: str, figure: Any, trainer: Trainer) -> None:
        for logger in trainer.loggers:
            loggers.log_figure(logger, f"compression/{tag}", figure, trainer.global_step)


def _inside(path: str, other: str) -> bool:
    """Whether a path is that of another module or of one of its submodules."""
    return f"{path}.".startswith(f"{other}." if other else "")


def settings(trainer: Trainer, changed: bool = False) -> dict[str, dict[str, Any]]:
    """Return the arguments of this package's callbacks that are not None, by class name.

    Args:
        trainer: the Trainer.
        changed: whether to omit defaults.

    Returns:
        Plain values; functions are represented by their names.
    """
    callback_arguments: dict[str, dict[str, Any]] = {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, CompressionCallback):
            name, count = type(callback).__name__, 2
            while name in callback_arguments:
                name, count = f"{type(callback).__name__}{count}", count + 1
            callback_arguments[name] = arguments(callback, changed)
    return callback_arguments


def arguments(callback: CompressionCallback, changed: bool = False) -> dict[str, Any]:
    """Return the arguments of a callback that are attributes of the callback or of its parts.

    Args:
        callback: a callback of this package.
        changed: whether to omit defaults.

    Example:
        >>> arguments(ModelCompaction(confidence=2), changed=True)
        {'confidence': 2}
    """
    defaults = {name: p.default for name, p in inspect.signature(type(callback).__init__).parameters.items()}
    names = [name for name in defaults if name != "example_input"]
    parts = [part for part in vars(callback).values() if type(part).__module__.startswith(PACKAGE)]
    kept = {name: value for part in [*parts, callback] for name, value in getattr(part, "__dict__", {}).items()}
    shown = [name for name in names if kept.get(name) not in (None, ())]
    return {name: _plain(kept[name]) for name in shown if not changed or _plain(kept[name]) != _plain(defaults[name])}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return ", ".join(str(_plain(item)) for item in value)
    return value if isinstance(value, (bool, int, float, str)) else getattr(value, "__qualname__", str(value))

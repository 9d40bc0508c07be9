"""The main example, on a net of a few channels and two short fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import digits

ROOT = Path(digits.__file__).parents[1]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Command line of a run of seconds."""
    logs = tmp_path_factory.mktemp("runs")
    small = ["--width", "8", "--epochs", "2", "--prune-epochs", "3", "--limit", "320", "--batch-size", "16"]
    return [*small, "--rounds", "1", "--quiet", "--accelerator", "cpu", "--log-dir", str(logs)]


@pytest.fixture(scope="module")
def report(arguments: list[str]) -> Iterator[digits.Report]:
    """Train, prune, compact and reload once for all tests of this module."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # the fresh process finds the packages whether they are installed or not
        yield digits.run(digits.parser().parse_args(arguments))
    torch.set_num_threads(threads)


def test_compacted_equals_masked(report: digits.Report) -> None:
    """The compacted network classifies exactly as many images correctly as the masked one, and is certified."""
    _, masked, compacted = report.rows
    assert compacted.correct == masked.correct > 0.3 * report.images  # it has learned something: chance is 10 %
    assert report.certificate.verified
    assert report.certificate.max_error <= 1e-4
    assert report.difference <= 1e-5


def test_compacted_is_smaller(report: digits.Report) -> None:
    """Half of the channels gone leaves at most 40 % of the parameters and 50 % of the MACs, and a smaller file."""
    dense, masked, compacted = report.rows
    assert compacted.params <= 0.4 * dense.params
    assert compacted.macs <= 0.5 * dense.macs
    assert compacted.size < dense.size
    assert (masked.params, masked.macs) == (dense.params, dense.macs)


def test_fresh_process_agrees(report: digits.Report) -> None:
    """A process that knows only the checkpoint gets the same images right; exactness holds whatever the settings."""
    assert report.reloaded == report.rows[2].correct
    assert digits.broken_promises(report, targets=False) == []


def test_report_names_every_figure(report: digits.Report) -> None:
    """The printed report holds the three networks, each quantity, and paths that exist."""
    console = Console(record=True, width=160)
    digits.show(report, console)
    text = console.export_text()
    for word in ("dense", "masked", "compacted", "accuracy", "MACs", "parameters", "size", "batch 1", "batch 64"):
        assert word in text
    assert str(report.checkpoint) in text and report.checkpoint.is_file()
    assert list(Path(report.logs).glob("events.out.tfevents*"))


ROW = digits.Row("dense", correct=590, macs=1000, params=1000, size=4000, latency={1: 1.0, 64: 8.0})
SMALL = dataclasses.replace(ROW, macs=400, params=300, latency={1: 1.0, 64: 5.0})
KEPT = digits.Report(
    rows=(ROW, dataclasses.replace(ROW, name="masked"), dataclasses.replace(SMALL, name="compacted")),
    images=599,
    predicted=(400, 300),
    difference=1e-6,
    certificate=SimpleNamespace(verified=True, max_error=1e-6),
    logs=Path("logs"),
    checkpoint=Path("compacted.ckpt"),
    reloaded=590,
)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"correct": 591}, "masked 590"),
        ({"correct": 580}, "accuracy fell by 1.67 points"),
        ({"params": 401}, "over 40 %"),
        ({"macs": 501}, "over 50 %"),
        ({"latency": {1: 1.0, 64: 8.5}}, "64 images take 8.50 ms"),
        ({"macs": 399}, "(399, 300), predicted were (400, 300)"),
    ],
)
def test_a_broken_promise_is_named(change: dict[str, object], sentence: str) -> None:
    """Each figure of the compacted network that misses its mark yields a sentence with that figure."""
    rows = (*KEPT.rows[:2], dataclasses.replace(KEPT.rows[2], **change))
    assert any(sentence in said for said in digits.broken_promises(dataclasses.replace(KEPT, rows=rows), targets=True))


def test_kept_promises_are_silent() -> None:
    """Where all marks are met, nothing is reported."""
    assert digits.broken_promises(KEPT, targets=True) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"certificate": SimpleNamespace(verified=False, max_error=0.0)}, "certificate"),
        ({"certificate": SimpleNamespace(verified=True, max_error=2e-4)}, "certificate"),
        ({"difference": 2e-4}, "differ by 2.0e-04"),
        ({"difference": float("nan")}, "differ by nan"),
        ({"reloaded": 589}, "reloaded gets 589 right"),
    ],
)
def test_exactness_is_promised_at_any_settings(change: dict[str, object], sentence: str) -> None:
    """What speaks of exactness is a broken promise even where size, speed and accuracy are not promised."""
    (broken,) = digits.broken_promises(dataclasses.replace(KEPT, **change), targets=False)
    assert sentence in broken


def test_program_fails_on_a_broken_promise(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The program ends with status 1 and the sentence."""
    monkeypatch.setattr(digits, "quieten", lambda: None)  # it would silence the log for the tests after this one too
    monkeypatch.setattr(digits, "run", lambda args: dataclasses.replace(KEPT, reloaded=3))
    monkeypatch.setattr("sys.argv", ["digits.py", *arguments])
    with pytest.raises(SystemExit, match="Promise not kept: reloaded gets 3 right, compacted 590"):
        digits.main()


def test_tensorboard_holds_the_costs(report: digits.Report) -> None:
    """Costs, their prediction and sparsity are scalars over the epochs; what was predicted is what came."""
    log = EventAccumulator(str(report.logs)).Reload()
    for tag in ("macs", "flops", "params", "macs_compacted", "params_compacted"):
        assert len(log.Scalars(f"complexity/{tag}")) >= 3
    assert log.Scalars("sparsity/channels")
    compacted = report.rows[2]
    assert report.predicted == (compacted.macs, compacted.params)
    assert log.Scalars("complexity/params")[-1].value == compacted.params
    assert log.Scalars("complexity/flops")[-1].value == 2 * compacted.macs

"""What the report says."""

from __future__ import annotations

import dataclasses

import engine
from lightning_compress.report.content import Report, Section, costs, kept_channels, sections
from lightning_compress.report.latency import Comparison, Spread
from lightning_compress.report.page import html
from tests.lightning_compress.reports import compacted, masked


def by_title(report: Report) -> dict[str, Section]:
    """The sections."""
    return {section.title: section for section in sections(report)}


def test_the_summary_has_the_costs_before_and_after() -> None:
    """As counted; latency where it was measured, with how."""
    report = compacted()
    rows = {row[0]: row[1:] for row in by_title(report)["Summary"].rows}
    before, after = report.before, report.after
    assert rows["MACs per sample"][:2] == (f"{before.macs}", f"{after.macs}")
    assert rows["Parameters"][2] == f"−{100 * (before.params - after.params) / before.params:.1f} %"
    assert "Forward pass" in rows and report.latency is not None
    lead = by_title(report)["Summary"].lead
    assert "input 1×1×2×2" in lead and report.latency.device in lead and "3 forward passes each, in turns" in lead
    silent = dataclasses.replace(report, latency=None, not_timed="there is not enough memory")
    assert not any("Forward" in row[0] for row in by_title(silent)["Summary"].rows)
    assert "Not timed: there is not enough memory." in by_title(silent)["Summary"].lead


def test_a_slowdown_looks_like_one() -> None:
    """With its sign and the word, and in the colour of a loss; a gain has the other colour."""
    times = Comparison(Spread(1.0, 0.9, 1.1), Spread(1.4, 1.3, 1.5), 9, "[1, 1, 2, 2]", "CPU, 1 thread")
    slow = dataclasses.replace(compacted(), latency=times)
    assert costs(slow)[-1] == ("Forward pass", "1 ms", "1.4 ms", "+40.0 %, slower")
    assert '<b class="worse">+40.0 %, slower</b>' in html(slow) and '<b class="better">−' in html(slow)


def test_every_layer_is_shown_before_and_after() -> None:
    """What is coupled shrinks together, the reader's columns count in its parameters."""
    rows = {row[0]: row[1:] for row in by_title(compacted())["Layers"].rows}
    assert rows["first (Conv2d)"][0] == rows["back (Conv2d)"][0] == "8 → 4"
    assert rows["last (Conv2d)"] == ("4", "36 → 20", "128 → 64")
    assert rows["fc (Linear)"][0] == "2"


def test_what_stays_whole_has_its_reason_and_source_line() -> None:
    """The size that the author wrote down, with file and line."""
    (row,) = [row for row in by_title(compacted())["Not prunable, and why"].rows if row[0] == "last"]
    assert row[2] == "4" and "reports.py:" in row[3] and "16" in row[3]


def test_the_certificate_and_the_plan_are_tables() -> None:
    """With what was compared, and each tensor that was cut."""
    found = by_title(compacted())
    verdict = dict(found["Certificate"].rows)
    assert verdict["Verified by numbers"] == "yes" and "float64" in verdict["Largest relative error"]
    assert ("first.weight", "8×1×1×1", "4×1×1×1") in found["Plan"].rows
    assert found["Metrics"].rows == (("val_acc", "0.9375"),)
    assert ("ChannelPruning", "amount", "0.5") in found["Settings"].rows


def test_the_rest_of_the_plan_is_text() -> None:
    """Folds and notes follow the table; nothing is said twice."""
    report = compacted()
    plan = dataclasses.replace(report.plan, notes=("a note",))
    section = by_title(dataclasses.replace(report, plan=plan))["Plan"]
    assert section.text == "Notes:\n  a note" and len(section.rows) == len(plan.slices)


def test_the_verdict_says_what_happened() -> None:
    """Compacted and verified, compacted only, not compacted and why."""
    good, bad = compacted(), masked()
    assert good.verdict[0] == "good" and "verified" in good.verdict[1]
    assert bad.verdict == ("bad", "Not compacted. It differs at <node>.")
    assert dataclasses.replace(bad, note="").verdict[0] == "fair"
    unproven = dataclasses.replace(good, certificate=engine.Certificate())
    assert unproven.verdict[0] == "fair" and "only shapes were compared" in unproven.verdict[1]


def test_a_masked_model_shows_what_would_be_left() -> None:
    """The prediction, and the channels that the masks keep; costs are those of now."""
    found = by_title(masked())
    assert found["After compaction"].rows[0][2] != found["Summary"].rows[0][1]
    assert kept_channels(masked()) == {"first": (2, 8), "inner": (8, 8), "back": (2, 8), "last": (4, 4), "fc": (2, 2)}
    assert "Certificate" not in found and "Plan" not in found
    assert kept_channels(compacted())["first"] == (4, 8)

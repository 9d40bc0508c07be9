"""What compensation did, as text."""

from __future__ import annotations

from engine.compensation.report import Compensated, CompensationReport


def test_what_was_left_alone_is_named() -> None:
    """Errors by group, then the layers that kept their weights, with the reason."""
    report = CompensationReport({"stem": Compensated(0.5, 0.125, ("a",), {"b": "its weight is read 2 times"})})
    assert str(report).splitlines() == ["stem: error 0.5 -> 0.125", "  b: its weight is read 2 times"]

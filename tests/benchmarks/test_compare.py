"""What a change costs in removal."""

from __future__ import annotations

from benchmarks.compare import differences, rows

BEFORE = """
| model | verdict | error | parameters, M | MACs, G | seconds |
|---|---|---|---|---|---|
| same | exact | 5e-16 | 10.0 → 2.5 | 1 → 1 | 1.6 |
| larger | exact | 5e-16 | 10.0 → 2.5 | 1 → 1 | 1.6 |
| gone | exact | 5e-16 | 10.0 → 2.5 | 1 → 1 | 1.6 |
| broken | exact | 5e-16 | 10.0 → 2.5 | 1 → 1 | 1.6 |
"""
AFTER = BEFORE.replace("larger | exact | 5e-16 | 10.0 → 2.5", "larger | exact | 5e-16 | 10.0 → 4.0").replace(
    "broken | exact | 5e-16 | 10.0 → 2.5 | 1 → 1 |", "broken | refused: reads data | | |"
)


def test_models_that_lose_less_or_change_their_verdict_are_named() -> None:
    """A model within a point is not; the medians are over models that were compacted both times."""
    after = rows("\n".join(line for line in AFTER.splitlines() if "gone" not in line))
    lines = list(differences(rows(BEFORE), after))
    assert lines == [
        "  larger: exact 25.0 % -> exact 40.0 %",
        "  broken: exact 25.0 % -> refused nan %",
        "  gone: only before",
        "  median of 2 models: 25.0 % -> 32.5 %",
    ]


def test_prose_is_no_model() -> None:
    """A line of text that begins with a verdict is none of the table's rows."""
    assert rows("of 448 architectures 1 is refused, 0\nfailed and 8 timed out\n" + BEFORE).keys() == rows(BEFORE).keys()

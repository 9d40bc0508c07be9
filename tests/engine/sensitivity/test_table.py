"""The table of a sensitivity analysis, as CSV and as amounts."""

from __future__ import annotations

import pickle
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from engine.errors import InputError
from engine.sensitivity.table import SensitivityTable, columns, fraction

ROWS = {"a": {0.1: 0.9, 0.2: 0.85, 0.3: 0.7}, "b[0]": {0.1: 0.6}, "c": {0.1: 0.95, 0.2: 0.5, 0.3: 0.9}}


def table(better: str | None = None) -> SensitivityTable:
    """Three layers: sensitive late, sensitive at once, and up and down."""
    return SensitivityTable(ROWS, [0.1, 0.2, 0.3], 0.9, better)


def test_export_is_nnis_csv(tmp_path: Path) -> None:
    """Header, then a row per layer; short where a sweep was stopped."""
    table().export(tmp_path / "table.csv")
    text = "layername,0.1,0.2,0.3\na,0.9,0.85,0.7\nb[0],0.6\nc,0.95,0.5,0.9\n"
    assert (tmp_path / "table.csv").read_text() == text


def test_suggest_takes_the_longest_prefix_within_the_budget() -> None:
    """What comes after a sparsity that costs too much does not count, and improvements cost nothing."""
    assert list(table().suggest(0.06).values()) == [0.2, 0.0, 0.1]
    assert list(table().suggest(1).values()) == [0.3, 0.1, 0.3]
    assert list(table().suggest(0).values()) == [0.1, 0.0, 0.1]


def test_suggested_names_are_patterns_for_themselves() -> None:
    """``ChannelPruning`` takes names as patterns: one with brackets must match its layer and no other."""
    names = list(table().suggest(0.06))
    assert fnmatchcase("b[0]", names[1]) and not fnmatchcase("b0", names[1])


def test_which_way_is_worse() -> None:
    """From the argument, the early-stop mode, or what pruning does; without any of them it is an error."""
    assert table().suggest(0.06) == table("higher").suggest(0.06) == table().suggest(0.06, "higher")
    assert list(table("lower").suggest(0.06).values()) == [0.3, 0.1, 0.3]
    with pytest.raises(InputError, match="pass which is better"):
        SensitivityTable({"a": {0.1: 0.5}}, [0.1], 0.5).suggest(0.1)


@pytest.mark.parametrize("budget", [-0.1, float("nan"), "1", True, None])
def test_a_bad_budget_is_refused(budget: object) -> None:
    """It is a number from 0 on."""
    with pytest.raises(InputError, match="`budget`"):
        table().suggest(budget)  # type: ignore[arg-type]


def test_a_bad_direction_is_refused() -> None:
    """Higher or lower."""
    with pytest.raises(InputError, match="`better`"):
        table().suggest(0.1, "up")


def test_it_travels_between_processes() -> None:
    """With its baseline and columns."""
    copied = pickle.loads(pickle.dumps(table("lower")))
    assert copied == table() and (copied.baseline, copied.sparsities, copied.better) == (0.9, [0.1, 0.2, 0.3], "lower")


def test_columns_are_what_they_are_called() -> None:
    """Rounded, ascending, each once."""
    assert columns([0.30000000000000004, 0.1, 0.3]) == [0.1, 0.3]
    assert columns(None) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]


@pytest.mark.parametrize("value", [1, -0.1, "0.5", True, None, float("nan")])
def test_a_bad_fraction_is_refused(value: object) -> None:
    """It names the argument."""
    with pytest.raises(InputError, match="`ratio` is a fraction"):
        fraction(value, "`ratio`")

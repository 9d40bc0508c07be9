"""Pictures of the report."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from lightning_compress.report import svg


def test_a_bar_is_filled_by_its_share() -> None:
    """In percent of its place."""
    picture = ET.fromstring(svg.bar(0.5, 'a "b" & c'))
    assert [rect.get("width") for rect in picture] == ["100%", "50.00%"]
    assert picture.get("aria-label") == 'a "b" & c'


def test_lines_span_the_picture_from_zero_to_the_top() -> None:
    """The largest value of all series is at the top, zero at the bottom, in order of the steps."""
    picture = ET.fromstring(svg.lines({"now": [(0, 10.0), (5, 0.0)], "later": [(0, 5.0), (5, 5.0)]}))
    first, second = (line.get("points") for line in picture.iter("polyline"))
    assert first == "0.00,4.00 100.00,100.00" and second == "0.00,52.00 100.00,52.00"


@pytest.mark.parametrize("points", [[(3, 0.0), (3, 0.0)], [(1, 2.0)]])
def test_lines_without_an_extent_are_drawn(points: list[tuple[float, float]]) -> None:
    """No division by zero."""
    assert "polyline" in svg.lines({"one": points})


def test_rails_join_what_hangs_together() -> None:
    """A line through all rows between the first and the last of a set, and a dot in those that belong to it."""
    pieces = {name: ET.fromstring(piece) for name, piece in svg.rails([["a", "c"], ["b"]], "abcd").items()}
    ends = {name: [(line.get("y1"), line.get("y2")) for line in piece.iter("line")] for name, piece in pieces.items()}
    assert ends == {"a": [("50%", "100%")], "b": [("0", "100%")], "c": [("0", "50%")], "d": []}
    assert [len(list(piece.iter("circle"))) for piece in pieces.values()] == [1, 1, 1, 0]
    (beside,) = pieces["b"].iter("circle")
    assert beside.get("cx") != next(pieces["a"].iter("circle")).get("cx")


def test_a_layer_of_two_sets_has_two_dots() -> None:
    """As behind a concatenation."""
    assert svg.rails([["a", "b"], ["b", "c"]], "abc")["b"].count("<circle") == 2


def test_points_are_joined_in_their_order() -> None:
    """The widest is at the right, the best at the top, and a point without an extent is drawn."""
    picture = ET.fromstring(svg.scatter([("dense", 10, 0.9), ("small", 5, 0.5)], 0.9, 0.5, height=116))
    dots = [(dot.get("cx"), dot.get("cy"), dot.get("class")) for dot in picture.iter("circle")]
    assert dots == [("94.00%", "8.0", "set0"), ("47.00%", "108.0", "set1")]
    assert [line.get("class") for line in picture.iter("line")].count("way") == 1
    assert svg.scatter([("only", 0, 1.0)], 1.0, 1.0).count("<circle") == 1

"""The code on the pages of the documentation runs, and gives what the page says."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_examples_of_a_page(page: Path) -> None:
    """Each example prints what stands below it."""
    failed, _ = doctest.testfile(str(page), module_relative=False)
    assert failed == 0


def test_there_are_pages_with_examples() -> None:
    """The page on ops has some."""
    parsed = doctest.DocTestParser().get_examples((PAGES[0].parent / "add-an-op.md").read_text())
    assert len(parsed) > 10

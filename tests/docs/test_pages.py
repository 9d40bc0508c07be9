"""The code on the pages of the documentation runs, and gives what the page says."""

from __future__ import annotations

import doctest
import importlib.util
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(r"(?:<!-- (needs|not run)(.*?) -->\n)?```python\n(.*?)```", re.DOTALL)


def name(page: Path) -> str:
    """Its path below docs/."""
    return str(page.relative_to(DOCS))


def blocks(page: Path) -> list[str]:
    """Its blocks without prompts that are to be run here."""
    found = []
    for mark, rest, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        missing = [p for p in re.findall(r"\w+", rest) if mark == "needs" and importlib.util.find_spec(p) is None]
        if ">>>" not in code and mark != "not run" and not missing:
            found.append(code)
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_examples_of_a_page(page: Path) -> None:
    """Each example prints what stands below it."""
    failed, _ = doctest.testfile(str(page), module_relative=False)
    assert failed == 0


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name)
def test_the_blocks_of_a_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, in one program, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    program: dict[str, Any] = {"__name__": "page"}
    try:
        for number, code in enumerate(blocks(page), 1):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch's own, while it exports
                warnings.filterwarnings("ignore", ".*exists and is not empty")  # as in a resumed fit
                warnings.filterwarnings("ignore", ".*LeafSpec.*", category=FutureWarning)
                exec(compile(code, f"{name(page)}, block {number}", "exec"), program)
    finally:
        torch.set_num_threads(threads)


def test_there_are_pages_with_examples() -> None:
    """The page on ops has prompts, the tutorial has blocks; others name packages, a large model or processes."""
    parsed = doctest.DocTestParser().get_examples((DOCS / "add-an-op.md").read_text())
    assert len(parsed) > 10 and len(blocks(DOCS / "tutorial.md")) >= 6
    skipped = [page for page in PAGES if "<!-- not run -->" in page.read_text()]
    guides = [f"guide/{topic}.md" for topic in ("deployment", "loading", "sharded")]
    assert [name(page) for page in skipped] == ["from-nni.md", *guides]


def test_every_page_is_in_the_site() -> None:
    """The navigation lists each of them."""
    listed = re.findall(r": ([\w/-]+\.md)$", (DOCS.parent / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(map(name, PAGES))

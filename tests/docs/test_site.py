"""The site: what is in it, where each name is documented, and how wide its code is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import engine
import lightning_compress

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]
WIDTH = 85  # columns that a box of code shows without scrolling


def code_lines(text: str) -> list[str]:
    """Lines inside of fences."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.split("\n")]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_fits_its_box(page: Path) -> None:
    """No line of code is cut off."""
    assert [line for line in code_lines(page.read_text(encoding="utf-8")) if len(line) > WIDTH] == []


def test_each_public_name_is_on_one_page() -> None:
    """Of the reference, by topic; no page has more than a dozen names."""
    pages = {path.stem: re.findall(r"^::: ([\w.]+)$", path.read_text(), re.MULTILINE) for path in DOCS.glob("api/*.md")}
    documented = sorted(name for names in pages.values() for name in names)
    public = {f"{m.__name__}.{name}" for m in (engine, lightning_compress) for name in m.__all__}
    assert documented == sorted(public)
    assert max(map(len, pages.values())) <= 12


def test_nothing_of_the_build_is_in_the_site() -> None:
    """The pages' folder holds pages, pictures and a style sheet."""
    assert {path.suffix for path in DOCS.rglob("*") if path.is_file()} <= {".md", ".css", ".svg", ".png"}


@pytest.mark.parametrize("word", ["wandb", "huggingface", "yolo", "resume", "slower", "notebook", "mlflow", "onnx"])
def test_a_search_finds_an_answer(word: str) -> None:
    """The search of the site looks for whole words in the pages' text."""
    assert any(re.search(rf"\b{word}\b", page.read_text(encoding="utf-8").lower()) for page in DOCS.rglob("*.md"))

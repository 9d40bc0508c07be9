"""The version."""

from __future__ import annotations

import re
from pathlib import Path

import engine
import lightning_compress

ROOT = Path(__file__).parents[2]


def test_one_version_everywhere() -> None:
    """Packages, distribution, citation and changelog name the same."""
    version = engine.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", version) and lightning_compress.__version__ == version
    assert 'version = {attr = "engine.version.__version__"}' in (ROOT / "pyproject.toml").read_text()
    assert f'version: "{version}"' in (ROOT / "CITATION.cff").read_text()


def test_the_changelog_has_a_dated_section_for_it() -> None:
    """And the citation has the date."""
    text = (ROOT / "CHANGELOG.md").read_text()
    dated = re.search(rf"^## \[{re.escape(engine.__version__)}\] - (\d{{4}}-\d\d-\d\d)$", text, re.MULTILINE)
    assert dated and f'date-released: "{dated[1]}"' in (ROOT / "CITATION.cff").read_text()

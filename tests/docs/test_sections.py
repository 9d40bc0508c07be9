"""Docstrings as the site shows them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

PATH = Path(__file__).parents[2] / "site_build" / "sections.py"


def test_an_example_is_a_section_of_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heading is renamed, and only where it is one; what has no docstring is left alone."""
    griffe = ModuleType("griffe")
    griffe.Extension = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "griffe", griffe)
    spec = importlib.util.spec_from_file_location("sections", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    documented = SimpleNamespace(
        docstring=SimpleNamespace(value="Add.\n\nExample:\n    >>> 1 + 1  # an Example:\n    2")
    )
    for thing in (documented, SimpleNamespace(docstring=None)):
        module.ExampleSections().on_object(obj=thing)
    assert documented.docstring.value == "Add.\n\nExamples:\n    >>> 1 + 1  # an Example:\n    2"
    assert "extensions: [site_build/sections.py]" in (PATH.parents[1] / "mkdocs.yml").read_text()

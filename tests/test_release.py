"""The files beside the code: workflows, templates, licence, metadata."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_there_are_workflows_for_each_job() -> None:
    """Tests, lint, docs and wheels."""
    assert [path.stem for path in WORKFLOWS] == ["docs", "lint", "tests", "wheels"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.stem)
def test_a_workflow_is_valid(path: Path) -> None:
    """It is YAML, may only read, and calls targets of the Makefile that exist."""
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"} and workflow["jobs"]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", path.read_text())) <= targets


def test_the_tests_run_on_each_python_that_is_claimed() -> None:
    """Classifiers and workflow agree, from the oldest that is required."""
    (job,) = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"].values()
    claimed = re.findall(r"Programming Language :: Python :: (3\.\d+)", PROJECT)
    assert job["strategy"]["matrix"]["python"] == claimed
    assert re.search(r'requires-python = ">=(.*)"', PROJECT)[1] == claimed[0]
    oldest = {name: re.search(rf'"{name}>=([\d.]+)"', PROJECT)[1] for name in ("torch", "pytorch-lightning")}
    installed = (ROOT / ".github/workflows/tests.yml").read_text()
    assert all(f"{name}=={version}" in installed for name, version in oldest.items())


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda p: p.stem)
def test_issue_forms_are_valid(path: Path) -> None:
    """A name, what it is for, and fields with labels."""
    form = yaml.safe_load(path.read_text())
    if path.stem != "config":
        assert form["name"] and form["description"]
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert fields and all(field["attributes"]["label"] and field["id"] for field in fields)


def test_licence_and_citation() -> None:
    """A year and the authors; the citation is of that licence."""
    assert re.search(r"^Copyright \(c\) 20\d\d the lightning-compress authors$", (ROOT / "LICENSE").read_text(), re.M)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["license"] == "MIT" and citation["cff-version"] == "1.2.0"


def test_nothing_is_invented() -> None:
    """No address is given for this project until there is one."""
    assert "[project.urls]" not in PROJECT

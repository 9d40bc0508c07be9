"""What the packages import is what they depend on."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
OWN = {"engine", "lightning_compress"}
# Under other names than they are imported by; those of optional parts are in the extras.
NAMES = {"lightning_fabric": "pytorch-lightning"}  # its distribution brings this package along
NOT_IMPORTED = {"pytorch_lightning", "torchvision", "tensorboard"}  # found by name; models; Lightning's default logger


def test_the_dependencies_are_what_is_imported() -> None:
    """Every import at the top of a module is of the standard library, of these packages, or of a dependency."""
    text = (ROOT / "pyproject.toml").read_text().split("dependencies = [")[1].split("\n]")[0]
    listed = {re.split(r"[<>=\[]", name)[0].replace("-", "_") for name in re.findall(r'^    "([^"]+)"', text, re.M)}
    imported: set[str] = set()
    for path in (file for package in OWN for file in (ROOT / package).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    outside = {NAMES.get(name, name).replace("-", "_") for name in imported - OWN - set(sys.stdlib_module_names)}
    assert outside - {"__future__"} <= listed
    assert listed - outside <= NOT_IMPORTED

"""The folders of the callbacks: which imports which, and that each module has its tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lightning_compress

ROOT = Path(lightning_compress.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if path.stem not in ("__init__", "__main__"))
ORDER = "namesake trainer selection report checkpoints stock callbacks one_shot command".split()


def room_of(path: Path) -> str:
    """The folder, or the file that stands in the package itself."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The rooms from which a file imports, for type checkers too."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module == "lightning_compress":
            names += [f"lightning_compress.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("lightning_compress.")}
    return rooms


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_folders_import_in_one_direction(path: Path) -> None:
    """Each imports only what stands before it in the order."""
    assert {room_of(file) for file in FILES} == set(ORDER)
    for room in imported(path):
        assert ORDER.index(room) <= ORDER.index(room_of(path)), f"imports {room}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_has_a_test_file(path: Path) -> None:
    """``lightning_compress/x/y.py`` is tested in ``tests/lightning_compress/x/test_y.py``."""
    relative = path.relative_to(ROOT)
    assert (Path(__file__).parent / relative.parent / f"test_{path.name}").exists()

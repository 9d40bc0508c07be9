"""The folders of the callbacks: which imports which, and that each module has its tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import engine
import lightning_compress

ROOT = Path(lightning_compress.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if path.stem not in ("__init__", "__main__"))
ORDER = "namesake trainer selection report checkpoints stock callbacks one_shot summary command".split()


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


PUBLIC = [engine, *(vars(engine)[name] for name in ("bounds", "errors", "plots", "progress", "repair"))]
PUBLIC += [module for name, module in sorted(vars(engine).items()) if hasattr(module, "__path__") and name != "ops"]


def internal_names(tree: ast.AST) -> Iterator[str]:
    """Names of the engine that a file uses although neither the package nor one of its folders exports them."""
    exported = {module.__name__: {*getattr(module, "__all__", ())} for module in PUBLIC}
    exported["engine"] |= {"__version__", *(name.partition(".")[2] for name in exported)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("engine.") and a.name not in exported)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "engine":
            module, names = node.module or "", {alias.name for alias in node.names}
            yield from (f"{module}.{name}" for name in names - exported.get(module, set()) if module != "engine.errors")
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in exported:
            if node.attr not in exported[ast.unparse(node.value)] and ast.unparse(node.value) != "engine.errors":
                yield ast.unparse(node)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_only_public_names_of_the_engine_are_used(path: Path) -> None:
    """Those of ``engine`` and those that its folders export (docs/api/building-blocks.md)."""
    assert [*internal_names(ast.parse(path.read_text()))] == []


@pytest.mark.parametrize(
    "code",
    [
        "from engine.tracer import trace",
        "from engine.files.archive import read_archive",
        "from engine.files import Record",
        "from engine import Slots",
        "import engine.tracer",
        "engine.tracer.trace(model)",
    ],
)
def test_the_test_above_can_see_names(code: str) -> None:
    """Whichever way they are written."""
    assert [*internal_names(ast.parse(code))]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_has_a_test_file(path: Path) -> None:
    """``lightning_compress/x/y.py`` is tested in ``tests/lightning_compress/x/test_y.py``."""
    relative = path.relative_to(ROOT)
    assert (Path(__file__).parent / relative.parent / f"test_{path.name}").exists()


def test_the_table_of_files_is_complete() -> None:
    """Every file is in the table of docs/design.md, in the order of imports, and every name in the table is a file."""
    table = (ROOT.parent / "docs" / "design.md").read_text().split("of the callbacks | modules")[1].split("\n## ")[0]
    listed: dict[str, set[str]] = {}
    for first, second in re.findall(r"^\| (`[^|]*)\|([^|]*)\|", table, re.M):
        listed |= {
            part.removesuffix("/"): {*re.findall(r"`(\w+)`", second)} for part in re.findall(r"`(\w+/?)`", first)
        }
    files: dict[str, set[str]] = {}
    for path in FILES:
        files.setdefault(room_of(path), set()).update(
            {path.stem} - {room_of(path)} if path.parent == ROOT else {path.stem}
        )
    assert listed == files and [*listed] == ORDER


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_engine_names_ops(path: Path) -> None:
    """No op is compared with or taken from ``aten``, but to write it down as source."""
    if path.parent.name != "stock":
        assert not re.search(r"ops\.aten|\.op (==|in|!=)|torch\.ops\.", path.read_text())

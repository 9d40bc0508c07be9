"""The package as a whole: what it exports, imports and names."""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

import engine

ROOT = Path(engine.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MODULES = sorted(m.name for m in pkgutil.walk_packages([str(ROOT)], "engine."))
ORDER = """
    version errors bounds limits html progress program
    source numbers flow running observations alternatives unrecorded recording
    analysis rule surgery ops tracer removal groups masks plots dependency sensitivity
    compaction compensation verification cost speedup repair checking files
""".split()


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file, which nobody changes."""
    return ast.parse(path.read_text())


def test_the_public_api_is_sorted_and_true() -> None:
    """Every name of ``__all__`` is there, and everything public is listed."""
    assert engine.__all__ == sorted(engine.__all__, key=lambda n: (not n.isupper(), n[0].islower(), n))
    assert len(set(engine.__all__)) == len(engine.__all__)
    public = {n for n, v in vars(engine).items() if not n.startswith("_") and type(v).__name__ != "module"}
    assert public | {"errors"} == set(engine.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_each_module_exports_what_it_says(name: str) -> None:
    """Its ``__all__`` exists, and it has a docstring; a folder needs no more than that."""
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", []) if hasattr(module, "__path__") else module.__all__
    assert module.__doc__ and all(hasattr(module, n) for n in exported)


def test_what_folders_export_is_documented() -> None:
    """The page of building blocks lists them, and the files beside the folders that front ends use."""
    page = (ROOT.parent / "docs" / "api" / "building-blocks.md").read_text()
    listed = {
        module: re.findall(r"`(\w+)`", names)
        for module, names in re.findall(r"^\| `(engine\.\w+)` \|[^|]*\| (.*) \|$", page, re.M)
    }
    folders = {
        f"engine.{path.parent.name}" for path in FILES if path.name == "__init__.py" and path.parent.parent == ROOT
    }
    exported = {name: importlib.import_module(name) for name in sorted(folders | listed.keys())}
    names = {name: getattr(module, "__all__", []) for name, module in exported.items()}
    assert listed == {name: own for name, own in names.items() if own and name != "engine.ops"}
    for own in listed.values():
        assert own == sorted(own, key=lambda n: (not n.isupper(), n[0].islower(), n))


def test_folders_and_files_import_in_one_direction() -> None:
    """Each imports only what stands before it, for type checkers too: a reader can go through them in this order."""
    assert sorted(ORDER) == sorted({part_of(path) for path in FILES} - {"__init__"})
    for path in FILES:
        for name in imports(path):
            package, _, part = name.partition(".")
            if package == "engine" and part and part_of(path) != "__init__":
                assert ORDER.index(part.split(".")[0]) <= ORDER.index(part_of(path)), f"{path} imports {name}"


def part_of(path: Path) -> str:
    """The folder, or the file, that stands in ``engine`` itself."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Names of all modules that a file imports, and of what it imports from them."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("package", ["engine", "lightning_compress"])
def test_no_files_import_each_other(package: str) -> None:
    """Not even in a circle of several, nor for type checkers; what a folder exports is left out."""
    files = {module_name(path): path for path in (ROOT.parent / package).rglob("*.py") if path.stem != "__init__"}
    left = {name: imports(path) & files.keys() for name, path in files.items()}
    while ready := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in ready:
            del left[name]
    assert not left


def module_name(path: Path) -> str:
    """``engine/x/y.py`` is ``engine.x.y``."""
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_module_imports_lightning(path: Path) -> None:
    """Nor the callbacks, nor torchvision."""
    for name in imports(path):
        assert not name.startswith(("lightning", "pytorch_lightning", "torchvision")), name


def test_importing_the_engine_loads_no_lightning() -> None:
    """In a process of its own. (An editable installation has a finder that carries the project's name.)"""
    packages = ("lightning", "pytorch_lightning", "lightning_compress", "torchvision")
    code = f"import sys, engine; print([m for m in sys.modules if m.partition('.')[0] in {packages}])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert out.stdout.strip() == "[]"


def strings_and_names(path: Path) -> set[str]:
    """Strings (without docstrings) and attributes of ``torch.ops.aten`` in a file."""
    tree = parsed(path)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    skip = {id(n.body[0].value) for n in ast.walk(tree) if isinstance(n, documented) and _is_text(n.body[0])}
    skip |= {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and _is_text(n)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skip:
            found |= {node.value}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("ops.aten"):
            found.add(node.attr)
    return found


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def compared_with_op(path: Path) -> list[str]:
    """Comparisons of a node's op with a literal."""
    found = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            literal = any(isinstance(n, ast.Constant) for side in sides for n in ast.walk(side))
            if literal and any(ast.unparse(side).endswith(".op") for side in sides):
                found.append(ast.unparse(node))
    return found


def tables(path: Path) -> Iterator[set[str]]:
    """Collections of strings in a file, and strings that are split into words."""
    for node in ast.walk(parsed(path)):
        items: list[ast.expr | None] = []
        if isinstance(node, (ast.Set, ast.List, ast.Tuple)):
            items = [*node.elts]
        elif isinstance(node, ast.Dict):
            items = [*node.keys]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "split":
            text = getattr(node.func, "value", None)
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield set(text.value.split())
        yield {n.value for n in items if isinstance(n, ast.Constant) and isinstance(n.value, str)}


OPS = {op for op in engine.RULES if "::" not in op}
CERTAIN = {op for op in OPS if re.search(r"[_0-9]", op)}
"""Those whose names are no words of other things too (``sum``, ``index``)."""

EXEMPT = {ROOT / "surgery" / "edits.py"}
"""Its table says where a call, as code writes it, has the sizes that are replaced."""


def names_ops(names: set[str]) -> bool:
    """Whether strings are names of ops: one that is nothing else, or several of which half are."""
    return bool(names & CERTAIN) or len(names & OPS) >= max(2, len(names) / 2)


@pytest.mark.parametrize("path", [p for p in FILES if part_of(p) != "ops"], ids=lambda p: str(p.relative_to(ROOT)))
def test_only_rules_name_ops(path: Path) -> None:
    """Outside of ``engine/ops`` no op is compared with, taken from ``torch.ops``, or written, alone or in a table."""
    assert not strings_and_names(path) & CERTAIN
    assert not re.search(r"ops\.aten\.\w+|aten::\w+|ops\.prims\.\w+", path.read_text()) and not compared_with_op(path)
    assert path in EXEMPT or not [names for names in tables(path) if names_ops(names)]


def test_the_test_above_can_see_names() -> None:
    """It finds what the rules themselves write down."""
    assert "batch_norm" in strings_and_names(ROOT / "ops" / "norm.py")
    assert compared_with_op(ROOT / "ops" / "join.py")
    for file in ("calls", "draws", "filled", "norm"):
        assert any(map(names_ops, tables(ROOT / "ops" / f"{file}.py")))
    assert all(any(map(names_ops, tables(path))) for path in EXEMPT)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_module_has_a_test_file(path: Path) -> None:
    """``engine/x/y.py`` is tested in ``tests/engine/x/test_y.py``."""
    if path.name != "__init__.py":
        relative = path.relative_to(ROOT)
        assert (Path(__file__).parent / relative.parent / f"test_{path.name}").exists()


def test_every_rule_covers_an_op_that_exists() -> None:
    """Names with a namespace are the engine's own; others are of aten, though not of the oldest torch that will do."""
    unknown = {op for op in engine.RULES if "::" not in op and not hasattr(torch.ops.aten, op)}
    assert unknown <= ({"_grouped_mm"} if TorchVersion(torch.__version__) < (2, 8) else set())


# ---------------------------------------------------------------- docs/design.md

DESIGN = (ROOT.parent / "docs" / "design.md").read_text()
PRIVATE_TABLES = {name for name in vars(torch.nn.Module()) if name.startswith("_")}


def test_the_table_of_files_is_complete() -> None:
    """Every file of ``engine`` is in the table of docs/design.md, and every name in the table is a file.

    A folder in a folder stands for its files.
    """
    listed: dict[str, set[str]] = {}
    for first, second in re.findall(
        r"^\| (`[^|]*)\|([^|]*)\|", DESIGN.split("`lightning_compress` is arranged")[0], re.M
    ):
        listed |= {part: set(re.findall(r"`(\w+)`", second)) for part in re.findall(r"`(\w+/?)`", first)}
    files: dict[str, set[str]] = {}
    for path in FILES:
        folder = f"{part_of(path)}/" if path.parent != ROOT else path.stem
        name = path.relative_to(ROOT).parts[1].removesuffix(".py") if path.parent != ROOT else path.stem
        files.setdefault(folder, set()).update({name} - {"__init__", folder})
    del files["__init__"]
    assert listed.keys() == files.keys()
    assert {name: own for name, own in files.items() if name != "ops/"} == {
        n: o for n, o in listed.items() if n != "ops/"
    }


def private_names(path: Path) -> set[str]:
    """Names of torch that a file uses and torch does not document."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith("torch.")}
        elif isinstance(node, ast.Attribute):
            text = re.sub("^nn[.]", "torch.nn.", re.sub("^F[.]", "torch.nn.functional.", ast.unparse(node)))
            if re.fullmatch(r"torch(\.\w+)+", text):
                names.add(text)
            elif node.attr in PRIVATE_TABLES and ast.unparse(node.value) != "self":
                names.add(f"torch.nn.Module.{node.attr}")
    return {name for name in names if re.search(r"[.]_[a-zA-Z]", name)}


def listed_private_names() -> set[str]:
    """Names in the list of docs/design.md."""
    rows = re.findall(
        r"^\| (`[^|]*)\|", DESIGN.split("## Private names of torch")[1].split("attributes of objects")[0], re.M
    )
    return {re.sub("^nn[.]", "torch.nn.", name) for row in rows for name in re.findall("`([^`]+)`", row)}


def test_private_names_of_torch_are_listed_with_a_reason() -> None:
    """In docs/design.md; what is listed is used."""
    listed, packages = listed_private_names(), (ROOT, ROOT.parent / "lightning_compress")
    names = {name for package in packages for path in package.rglob("*.py") for name in private_names(path)}
    names -= {name for name in names if any(other.startswith(f"{name}.") for other in names)}  # parts of others
    assert {name for name in names if not any(f"{name}.".startswith(f"{entry}.") for entry in listed)} == set()
    assert {entry for entry in listed if not any(f"{name}.".startswith(f"{entry}.") for name in names)} == set()


def private_attributes(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Attributes with an underscore that a file reads, and names that it defines."""
    used, own = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if re.match("_[a-zA-Z]", node.attr):
                used.add(node.attr)
            if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("self", "cls"):
                own.add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
    return used, own


def test_private_attributes_of_others_are_listed_with_a_reason() -> None:
    """In docs/design.md, those of torch's and Lightning's objects; what is listed is used."""
    used: set[str] = set()
    own = {
        "_engine_made_by",
        "_engine_size",
        "_engine_spans",
        "_engine_spread_dim",
        "_engine_spread_fill",
        "_engine_spread_table",
        "_unpinned",
    }  # members of classes made at run time
    own |= {"_asdict", "_replace", "_getframe"}  # of Python, and documented
    for package in (ROOT, ROOT.parent / "lightning_compress"):
        for path in package.rglob("*.py"):
            more_used, more_own = private_attributes(parsed(path))
            used, own = used | more_used, own | more_own
    rows = re.findall(r"^\| (`[^|]*)\|", DESIGN.split("attributes of objects")[1], re.M)
    listed = {name for row in rows for name in re.findall("`([^`]+)`", row)}
    elsewhere = {part for name in listed_private_names() for part in name.split(".")}
    assert used - own - elsewhere == listed


def test_private_names_of_torch_exist() -> None:
    """A release of torch that drops one is noticed here, by name."""
    for name in listed_private_names():
        if not name.startswith("torch.nn.Module."):
            first, *rest = name.split(".")
            part: object = sys.modules[first]
            for number, attribute in enumerate(rest):
                if not hasattr(part, attribute):
                    importlib.import_module(".".join([first, *rest[: number + 1]]))
                part = getattr(part, attribute)
        else:
            assert name.rpartition(".")[2] in PRIVATE_TABLES

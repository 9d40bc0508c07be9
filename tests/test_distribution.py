"""What users install: sdist and wheel, built from the sources and installed into an empty environment."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
USE = """
import sys, torch
from pathlib import Path
from torch import nn
import engine, lightning_compress
for package in (engine, lightning_compress):
    assert Path(package.__file__).is_relative_to(sys.prefix), package.__file__
    assert (Path(package.__file__).parent / "py.typed").is_file()
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
mask = torch.arange(8) % 2
masks = {"0": {"weight": mask.view(8, 1).expand(8, 4), "bias": mask}}
speedup = engine.ModelSpeedup(net, torch.ones(1, 4), masks)
speedup.speedup_model()
print(net[0].out_features, speedup.certificate.verified, len(lightning_compress.__all__))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without what this process has on its path."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    out = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, cwd=cwd, env=env)
    assert out.returncode == 0, out.stdout + out.stderr
    return out.stdout


def environment(folder: Path, *requirements: str | Path) -> Path:
    """An empty environment with what is asked for; its folder of commands."""
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    pip = (folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, *requirements, cwd=folder.parent)
    return folder / "bin"


def sources(folder: Path) -> Path:
    """A copy of the files that git knows of: builds leave folders beside them."""
    names = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    for name in filter(None, names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.mark.slow
def test_sdist_and_wheel(tmp_path: Path) -> None:
    """The sdist holds what the wheel is built of; the wheel, alone with its dependencies, compacts a network."""
    build = environment(tmp_path / "build", "build")
    project = sources(tmp_path / "project")
    run(build / "python", "-m", "build", "--outdir", tmp_path / "dist", project, cwd=tmp_path)  # the wheel of the sdist
    (sdist,), (wheel,) = (tmp_path / "dist").glob("*.tar.gz"), (tmp_path / "dist").glob("*.whl")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= packed
    own = {
        str(p.relative_to(project)) for package in ("engine", "lightning_compress") for p in tracked(project / package)
    }
    with zipfile.ZipFile(wheel) as archive:
        installed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert installed == own and own <= packed
    commands = environment(tmp_path / "empty", wheel)
    run(commands / "python", "-m", "pip", "check", cwd=tmp_path)
    assert run(commands / "python", "-c", USE, cwd=tmp_path).split()[:2] == ["4", "True"]
    assert "compact" in run(commands / "lightning-compress", "--help", cwd=tmp_path)


def tracked(folder: Path) -> list[Path]:
    """The files in a folder of sources, without what building left there."""
    return [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def test_the_lock_file_is_up_to_date() -> None:
    """Every dependency of the packages and of their tests is in it, at a version that is allowed."""
    project = (ROOT / "pyproject.toml").read_text()
    lists = [project.split(f"\n{name} = [")[1].split("\n]")[0] for name in ("dependencies", "dev")]
    names = {entry for text in lists for line in text.splitlines() for entry in names_in(line)}
    locked = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert names and {name.lower().replace("_", "-") for name in names} <= locked


def names_in(line: str) -> list[str]:
    """The packages that a line of a list names."""
    quoted = line.partition("#")[0].split('"')[1::2]
    return [entry.partition("[")[0].partition(">")[0].partition("=")[0] for entry in quoted]

"""Which tests a change touches: those beside the files that differ from a revision, and the doctests in these files.

python tests/changed.py [revision]      (default: origin/main); prints paths for pytest, one per line
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]


def paths_to_test(paths: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the tests and doctests of changed files, as far as they exist.

    Args:
        paths: of changed files, relative to the root of the project.
        root: of the project.

    Example:
        >>> paths_to_test(["engine/errors.py", "README.md"])
        ['engine/errors.py', 'tests/engine/test_errors.py']
    """
    existing = {path for changed in paths for path in _beside(PurePosixPath(changed)) if (root / path).exists()}
    return sorted(existing)


def _beside(path: PurePosixPath) -> Iterator[str]:
    if path.suffix != ".py":
        return
    if path.parts[0] == "tests":
        yield from [str(path)] if path.name.startswith("test_") else []
    else:
        yield from [str(path)] if path.parts[0] in ("engine", "lightning_compress") else []
        yield str(PurePosixPath("tests") / path.parent / f"test_{path.name}")


def changed_files(revision: str) -> list[str]:
    """Return the files that differ from where this branch left a revision, and those that git does not track yet."""
    base = _git("merge-base", "HEAD", revision)[0]
    return [*_git("diff", "--name-only", base), *_git("ls-files", "--others", "--exclude-standard")]


def _git(*command: str) -> list[str]:
    shown = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
    return shown.stdout.splitlines()


if __name__ == "__main__":
    print("\n".join(paths_to_test(changed_files(sys.argv[1] if len(sys.argv) > 1 else "origin/main"))))

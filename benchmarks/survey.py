"""A survey over many models: results are kept by name and state of the code, so that it can be resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "Survey", "code_state"]

ROOT = Path(__file__).resolve().parents[1]

Row = dict[str, Any]


def code_state(script: str, *versions: str) -> str:
    """Return a hash of what results depend on.

    Args:
        script: path of the benchmark; all of the engine counts, too.
        versions: of the packages that matter.
    """
    digest = hashlib.sha256(" ".join(versions).encode())
    for file in [*sorted((ROOT / "engine").rglob("*.py")), Path(script)]:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


class Survey:
    """Rows of results by name.

    Args:
        results: the file that they are kept in, a line each; rows of other states of the code are left in there.
        key: what a name is called in it.
        state: of the code.
        any_state: take rows of other states, too; the latest of each name counts.
    """

    def __init__(self, results: Path, key: str, state: str, any_state: bool = False) -> None:
        self._results, self._key, self._state = results, key, state
        rows = map(json.loads, results.read_text().splitlines() if results.exists() else [])
        self._done: dict[str, Row] = {row[key]: row for row in rows if any_state or row["state"] == state}

    def row(self, name: str, run: Callable[[], Row]) -> Row:
        """Return what came of a model; run it, and keep that, where it is not known."""
        if name not in self._done:
            self._done[name] = {self._key: name, "state": self._state} | run()
            self._results.parent.mkdir(exist_ok=True)
            with self._results.open("a") as out:
                out.write(json.dumps(self._done[name]) + "\n")
        return self._done[name]

    def stored(self, name: str) -> Row | None:
        """Return the row of a name, or None."""
        return self._done.get(name)

    def finished(self) -> list[Row]:
        """Return all rows that are known."""
        return list(self._done.values())

    def all(self, names: Sequence[str]) -> list[Row] | None:
        """Return the rows of these names; None where one is not known yet."""
        return [self._done[name] for name in names] if set(names) <= self._done.keys() else None

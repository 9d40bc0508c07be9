"""Metrics that were measured, kept in a file of JSON lines as they come, so that nothing is measured twice."""

from __future__ import annotations

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.errors import InputError

__all__ = ["Journal", "Key", "fingerprint"]


_START = b'{"weights"'
_DAMAGED = (AttributeError, KeyError, TypeError, ValueError)


class Key(NamedTuple):
    """What a metric depends on, apart from the function that measures it and its data.

    Attributes:
        weights: fingerprint of the model's weights.
        prune_type, group: how layers are pruned.
        layer: which layer is pruned, None for the un-pruned model.
        sparsity: how much of it.
    """

    weights: str
    prune_type: str
    group: bool
    layer: str | None
    sparsity: float

    @property
    def setting(self) -> tuple[str, str, bool]:
        """All but the place."""
        return self[:3]


class Journal:
    """What is known of metrics.

    Args:
        path: file that is read, where there is one already, and to which every new metric is added; None: none.

    Raises:
        InputError: where the file holds something else.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "results.jsonl")
        >>> Journal(path).add(Key("4f1a", "l1", False, "conv1", 0.5), 0.75)
        >>> Journal(path).known
        {Key(weights='4f1a', prune_type='l1', group=False, layer='conv1', sparsity=0.5): 0.75}
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path)
        self.known: dict[Key, float] = {}
        if self.path is not None and self.path.exists():
            if not self.path.is_file():
                raise InputError(f"`results_path` is the name of a file; {str(self.path)!r} is none.")
            self.read(self.path)

    def read(self, path: Path) -> list[Key]:
        """Add what a file holds. A last line that was cut off while it was written counts for nothing."""
        found: dict[Key, float] = {}
        *complete, rest = path.read_bytes().split(b"\n")
        for number, line in enumerate([*complete, rest] if rest else complete, 1):
            try:
                key, metric = _parsed(line)
                found[key] = metric
            except _DAMAGED as error:
                if number > len(complete) and _torn(line):
                    break
                raise InputError(
                    f"Line {number} of {str(path)!r} is no result of a sensitivity analysis; give `results_path` a "
                    "file of its own."
                ) from error
        self.known.update(found)
        return list(found)

    def add(self, key: Key, metric: float) -> None:
        """Remember a metric, and write it down before anything else happens."""
        if self.path is not None:
            self.known[key] = metric
            self.path.parent.mkdir(parents=True, exist_ok=True)
            line = json.dumps({**key._asdict(), "metric": metric})
            with open(self.path, "ab+") as file:
                _drop_torn_line(file)
                file.write(line.encode() + b"\n")


def _parsed(line: bytes) -> tuple[Key, float]:
    entry = json.loads(line)
    metric = float(entry.pop("metric"))
    key = Key(**entry)
    return key._replace(sparsity=float(key.sparsity)), metric


def _torn(line: bytes) -> bool:
    """Whether a line that cannot be read is the beginning of one that could."""
    return line.startswith(_START) or _START.startswith(line)


def _drop_torn_line(file: Any) -> None:
    """Remove an unfinished last line; where only its end is missing, add that."""
    file.seek(0)
    *_, rest = file.read().split(b"\n")
    if rest:
        try:
            _parsed(rest)
        except _DAMAGED:
            file.truncate(file.tell() - len(rest))
        else:
            file.write(b"\n")


def fingerprint(model: nn.Module) -> str:
    """Return a number, as hexadecimal digits, that differs where any weight or buffer does.

    Args:
        model: any module.

    Example:
        >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> fingerprint(one) == fingerprint(one), fingerprint(one) == fingerprint(other)
        (True, False)
    """
    found = sha256()
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            found.update(data.numpy().tobytes())
    return found.hexdigest()[:16]

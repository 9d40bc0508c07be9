"""Cache of measured metrics in a JSON Lines file, written immediately, so that nothing is measured twice."""

from __future__ import annotations

import json
import os
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.errors import InputError

__all__ = ["Journal", "Key", "fingerprint"]


_START = b'{"weights"'
_DAMAGED = (AttributeError, KeyError, RecursionError, TypeError, ValueError)


class Key(NamedTuple):
    """What a metric depends on, apart from its function and data.

    Attributes:
        weights: fingerprint of the model's weights.
        prune_type, group: how layers are pruned.
        layer: name of the pruned layer, None for the unpruned model.
        sparsity: fraction that is pruned.
    """

    weights: str
    prune_type: str
    group: bool
    layer: str | None
    sparsity: float

    @property
    def setting(self) -> tuple[str, str, bool]:
        """All fields except layer and sparsity."""
        return self[:3]


class Journal:
    """Known metrics.

    Args:
        path: file that is read if it exists, and to which every new metric is appended; None: no file.

    Raises:
        InputError: if the file has other content, or cannot be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "results.jsonl")
        >>> Journal(path).add(Key("4f1a", "l1", False, "conv1", 0.5), 0.75)
        >>> Journal(path).metrics
        {Key(weights='4f1a', prune_type='l1', group=False, layer='conv1', sparsity=0.5): 0.75}
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path)
        self.metrics: dict[Key, float] = {}
        if self.path is not None and self.path.exists():
            if not self.path.is_file():
                raise InputError(f"`results_path` is the name of a file; {str(self.path)!r} is none.")
            self.read(self.path)
        elif self.path is not None:
            _check_folder(self.path)  # before hours of measuring

    def read(self, path: Path) -> list[Key]:
        """Add the results in a file, ignoring an incomplete last line."""
        metrics: dict[Key, float] = {}
        *complete, rest = path.read_bytes().split(b"\n")
        for number, line in enumerate([*complete, rest] if rest else complete, 1):
            try:
                key, metric = _parsed(line)
                metrics[key] = metric
            except _DAMAGED as error:
                if number > len(complete) and _torn(line):
                    break
                raise InputError(
                    f"Line {number} of {str(path)!r} is not a result of a sensitivity analysis; give `results_path` a "
                    "file of its own."
                ) from error
        self.metrics.update(metrics)
        return list(metrics)

    def add(self, key: Key, metric: float) -> None:
        """Add a metric and append it to the file at once."""
        if self.path is not None:
            self.metrics[key] = metric
            self.path.parent.mkdir(parents=True, exist_ok=True)
            line = json.dumps({**key._asdict(), "metric": metric})
            with open(self.path, "ab+") as file:
                _drop_torn_line(file)
                file.write(line.encode() + b"\n")


def _check_folder(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InputError(
            f"`results_path` must be the name of a file that can be written; nothing can be written to "
            f"{str(path.parent)!r}: {error.strerror}."
        ) from error


def _parsed(line: bytes) -> tuple[Key, float]:
    entry = json.loads(line)
    metric = float(entry.pop("metric"))
    key = Key(**entry)
    return key._replace(sparsity=float(key.sparsity)), metric


def _torn(line: bytes) -> bool:
    """Whether an invalid line is the beginning of a valid one."""
    return line.startswith(_START) or _START.startswith(line)


def _drop_torn_line(file: Any) -> None:
    """Remove an incomplete last line, or complete it if only the newline is missing."""
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
    """Return a hexadecimal hash of all weights and buffers.

    Args:
        model: any module.

    Example:
        >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
        >>> fingerprint(one) == fingerprint(one), fingerprint(one) == fingerprint(other)
        (True, False)
    """
    hasher = sha256()
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):
            hasher.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            hasher.update(data.numpy().tobytes())
    return hasher.hexdigest()[:16]

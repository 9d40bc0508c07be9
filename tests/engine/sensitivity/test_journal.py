"""Results that are kept in a file as they come."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from engine.errors import InputError
from engine.sensitivity.journal import Journal, Key, fingerprint

KEYS = [Key("f00", "l1", False, layer, 0.1) for layer in (None, "a", "b")]


def written(path: Path) -> Journal:
    """A journal of three metrics that no decimal fraction is."""
    journal = Journal(path)
    for number, key in enumerate(KEYS):
        journal.add(key, number / 3)
    return journal


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """To the last bit, infinities too."""
    journal = written(tmp_path / "new" / "results.jsonl")
    journal.add(KEYS[2]._replace(sparsity=0.2), float("inf"))
    assert Journal(tmp_path / "new" / "results.jsonl").metrics == journal.metrics and len(journal.metrics) == 4


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_torn_last_line_counts_for_nothing(tmp_path: Path, cut: int) -> None:
    """Wherever it was cut, what stands before it is read, and what is added after it can be read again."""
    path = tmp_path / "results.jsonl"
    written(path)
    path.write_bytes(path.read_bytes()[:-cut])
    journal = Journal(path)
    assert set(journal.metrics) == set(KEYS[:2] if cut > 1 else KEYS)
    journal.add(KEYS[2], 7.0)
    assert Journal(path).metrics == {**{key: n / 3 for n, key in enumerate(KEYS[:2])}, KEYS[2]: 7.0}


@pytest.mark.parametrize(
    "text",
    [
        b"one line of something else",
        b"[" * 100_000,
        b"{}\n",
        b'{"weights": 1}\n',
        b"[1, 2]\n",
        b"\x80\x04\x95\n\n",
        b"\n",
        b"null\n",
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: bytes) -> None:
    """With the line, and it is left alone."""
    path = tmp_path / "model.pt"
    path.write_bytes(text)
    with pytest.raises(InputError, match="Line 1 of .*model.pt.* is not a result"):
        Journal(path)
    assert path.read_bytes() == text


def test_a_folder_is_refused(tmp_path: Path) -> None:
    """It is not a file."""
    with pytest.raises(InputError, match="is the name of a file"):
        Journal(tmp_path)


def test_without_a_file_nothing_is_remembered() -> None:
    """Data may change between two analyses."""
    journal = Journal(None)
    journal.add(KEYS[0], 1.0)
    assert journal.metrics == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_fingerprint_sees_every_entry(dtype: torch.dtype) -> None:
    """One bit of a weight or a buffer changes it; mode and gradients do not."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)).to(dtype)
    first = fingerprint(model)
    model.eval().requires_grad_(False)
    assert fingerprint(model) == first
    for tensor in (model[0].weight, model[1].running_mean, model[1].num_batches_tracked):
        with torch.no_grad():
            tensor.view(-1)[0] += 1
        assert fingerprint(model) != first
        first = fingerprint(model)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """An error before anything is measured."""
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="`results_path` .* nothing can be written to .*file'"):
        Journal(tmp_path / "file" / "results.jsonl")

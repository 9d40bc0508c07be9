"""What the tests of the short examples share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import fitting
import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums depend on the number of threads, and small networks are slower on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run(example: ModuleType, folder: Path, *options: str, limit: int = 96, epochs: int = 2) -> dict[str, Any]:
    """Run an example in small."""
    arguments = ["--log-dir", str(folder), "--limit", str(limit), "--epochs", str(epochs), *options]
    with one_thread():
        return example.run(fitting.parser(example.__doc__, epochs).parse_args(arguments))

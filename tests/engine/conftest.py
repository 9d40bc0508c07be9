"""Settings of the engine's tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def reproducible() -> None:
    """Tiny networks are slower on several threads, and every test starts from the same random state."""
    torch.set_num_threads(1)
    torch.manual_seed(0)

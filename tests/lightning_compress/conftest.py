"""Settings of the callbacks' tests."""

from __future__ import annotations

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    """Warnings of others that these tiny runs cause; all the rest are errors."""
    for message in (
        "`isinstance\\(treespec, LeafSpec\\)` is deprecated",  # Lightning's use of torch's pytree
        "The '.*_dataloader' does not have many workers",  # Lightning's advice where there are more than two cores
        "GPU available but not used",  # Lightning's advice on a CUDA machine
    ):
        config.addinivalue_line("filterwarnings", f"ignore:{message}")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny networks are slower on several threads, and sums depend on their number."""
    torch.set_num_threads(1)

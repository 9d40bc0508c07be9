"""What a network of the survey is: its package, how to build it, and what it is fed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Network", "by_key", "integers", "noise"]


@dataclass(frozen=True)
class Network:
    """A network of a package.

    Attributes:
        package: distribution that it comes from, as pip names it.
        label: of the network, unique in the package.
        make: builds it; imports the package only then.
        inputs: by batch size: a tensor, a tuple of arguments, or a dict of keyword arguments.
        batches: two batch sizes.
        constants: arguments that users of the network rarely pass, declared to keep their value.
        dtype: float32 where the network converts to that inside, and so runs in no other.
    """

    package: str
    label: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    batches: tuple[int, int] = (1, 2)
    dtype: torch.dtype = torch.float64
    constants: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The package and the label."""
        return f"{self.package} {self.label}"


def by_key(networks: Iterable[Network]) -> dict[str, Network]:
    """Return networks by package and label."""
    return {network.key: network for network in networks}


def noise(*shape: int) -> Callable[[int], Tensor]:
    """Return a function that makes random tensors of a shape, batch first."""

    def inputs(batch: int) -> Tensor:
        return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(batch), dtype=torch.float64)

    return inputs


def integers(below: int, *shape: int) -> Callable[[int], Tensor]:
    """Return a function that makes random integers of a shape, batch first."""

    def inputs(batch: int) -> Tensor:
        return torch.randint(0, below, (batch, *shape), generator=torch.Generator().manual_seed(batch))

    return inputs

"""Networks side by side, on the CPU: accuracy, MACs, parameters, size on disk, latency."""

from __future__ import annotations

import io
import logging
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import engine


@dataclass(frozen=True)
class Row:
    """One network, measured on the CPU."""

    name: str
    correct: int
    macs: int
    params: int
    size: int
    latency: dict[int, float]


@contextmanager
def evaluating(*nets: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; restores the modes, because Lightning trains a network in the mode it is in."""
    modes = [(module, module.training) for net in nets for module in net.modules()]
    for net in nets:
        net.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def count_correct(net: nn.Module, test: TensorDataset) -> int:
    """Number of test images that ``net`` classifies correctly."""
    with evaluating(net):
        return sum(int((net(images).argmax(1) == labels).sum()) for images, labels in DataLoader(test, batch_size=256))


def relative_difference(one: nn.Module, other: nn.Module, images: Tensor) -> float:
    """Largest difference between the outputs of two networks, relative to the largest output."""
    with evaluating(one, other):
        wanted, outputs = one(images), other(images)
        return float((wanted - outputs).abs().max() / wanted.abs().max())


def bytes_on_disk(net: nn.Module) -> int:
    """Size of the saved state dict."""
    buffer = io.BytesIO()
    torch.save(net.state_dict(), buffer)
    return buffer.tell()


def millilatency(net: nn.Module, images: Tensor) -> float:
    """Wall time of one forward pass."""
    with evaluating(net):
        start = time.perf_counter()
        net(images)
        return 1e3 * (time.perf_counter() - start)


def latencies(nets: dict[str, nn.Module], images: Tensor, rounds: int) -> dict[str, float]:
    """Median forward time of each network, taken in turns, so that a busy moment of the machine hits all alike."""
    for net in nets.values():
        millilatency(net, images)
    times = [{name: millilatency(net, images) for name, net in nets.items()} for _ in range(rounds)]
    return {name: statistics.median(turn[name] for turn in times) for name in nets}


def measure(nets: dict[str, nn.Module], test: TensorDataset, rounds: int) -> tuple[Row, ...]:
    """One row for each network."""
    images = test.tensors[0][torch.arange(64) % len(test)]
    latency = {batch: latencies(nets, images[:batch], rounds) for batch in (1, 64)}
    rows = []
    for name, net in nets.items():
        macs, params, _ = engine.count_flops_params(net, images[:1], verbose=False)
        by_batch = {batch: latency[batch][name] for batch in latency}
        rows.append(Row(name, count_correct(net, test), macs, params, bytes_on_disk(net), by_batch))
    return tuple(rows)


def quieten() -> None:
    """Silence what Lightning says about this machine and these data, and nobody can act on here."""
    logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the images are in memory: workers only cost
    warnings.filterwarnings("ignore", ".*LeafSpec.*is deprecated.*")  # Lightning's own use of torch

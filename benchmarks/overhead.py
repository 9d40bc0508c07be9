"""What the callbacks cost a training step on which nothing is pruned, as Markdown.

    python benchmarks/overhead.py [--device cpu] [--size 64] [--batch 32] [--pairs 60] [--model resnet18] [--clock wall]

Two fits run in turns, step by step: one without the callbacks, one with them and with half of all channels masked. A
step goes from the time at which Lightning is given a batch to the time at which it asks for the next one. The median
over the pairs of steps does not see what happens now and then; the mean does. "nothing" compares two plain fits: how
far it is from 1 is the noise. On a CPU that others use as well, ``--clock cpu`` counts the time that this process got.
"""

from __future__ import annotations

import argparse
import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lightning_compress import (
    ChannelPruning,
    ComplexityMonitor,
    FinalMetric,
    MaskConflictRepair,
    ModelCompaction,
    SparseTraining,
)

WARM_UP = 3
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def pruning(criterion: str) -> ChannelPruning:
    """Half of the channels after the first step, nothing more afterwards."""
    return ChannelPruning(criterion, amount=0.5, unit="step", schedule="one_shot", start=1, end=1)


def everything(criterion: str) -> list[Callback]:
    """All callbacks together."""
    rest = [MaskConflictRepair(), ComplexityMonitor(), ModelCompaction(save=False), FinalMetric("loss")]
    return [SparseTraining("bn_scale", 1e-5), pruning(criterion), *rest]


SETS: dict[str, Callable[[], list[Callback]]] = {
    "nothing": list,
    "all, criterion l1": lambda: everything("l1"),
    "all, criterion taylor": lambda: everything("taylor"),
    "all, criterion apoz": lambda: everything("apoz"),
    "ChannelPruning": lambda: [pruning("l1")],
    "SparseTraining, bn_scale": lambda: [SparseTraining("bn_scale", 1e-5)],
    "SparseTraining, group_lasso": lambda: [SparseTraining("group_lasso", 1e-5)],
}


class Turns:
    """Lets several threads run one after the other, a step each."""

    def __init__(self, count: int) -> None:
        self._count, self._turn = count, 0
        self.failure: BaseException | None = None
        self._changed = threading.Condition()

    def wait(self, place: int) -> None:
        """Wait until it is the turn of a place."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or self._turn % self._count == place)
        if self.failure is not None:
            raise RuntimeError("The other fit failed.") from self.failure

    def fail(self, failure: BaseException) -> None:
        """Let all go, since one of them will never come back."""
        with self._changed:
            self.failure = self.failure or failure
            self._changed.notify_all()

    def over(self) -> None:
        """Hand the turn over."""
        with self._changed:
            self._turn += 1
            self._changed.notify_all()


class Paced:
    """A dataloader of one batch that gives it out when it is this fit's turn, and times what happens with it."""

    def __init__(self, batch: Any, steps: int, turns: Turns, place: int, clock: Callable[[], float]) -> None:
        self._batch, self._steps, self._turns, self._place = batch, steps, turns, place
        self._clock = clock
        self.seconds: list[float] = []

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._steps):
            self._turns.wait(self._place)
            start = self._clock()
            yield self._batch
            self.seconds.append(self._clock() - start)
            self._turns.over()


class Classifier(LightningModule):
    """A torchvision network under SGD with momentum and weight decay."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        self.net = getattr(torchvision.models, name)(weights=None)
        self.example_input_array = torch.zeros(2, 3, size, size)  # drawing a batch would take a turn

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross entropy."""
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)


def compare(callbacks: Callable[[], list[Callback]], options: argparse.Namespace) -> tuple[float, list[float]]:
    """Median milliseconds of a plain step, and the ratios of the pairs: half of them with the other fit going first."""
    runs = [in_turns([list, callbacks], options), in_turns([callbacks, list], options)[::-1]]
    plain, paid = ([time for run in runs for time in run[place]] for place in range(2))
    return 1e3 * median(plain), [b / a for a, b in zip(plain, paid, strict=True)]


def in_turns(callbacks: Sequence[Callable[[], list[Callback]]], options: argparse.Namespace) -> list[list[float]]:
    """Seconds of the steps of two fits."""
    turns, device = Turns(2), torch.device(options.device)
    steps = options.pairs // 2 + WARM_UP
    batch = (torch.randn(options.batch, 3, options.size, options.size), torch.arange(options.batch) % 1000)
    loaders = [Paced(batch, steps, turns, place, clock_of(device, options.clock)) for place in range(2)]
    modules = [Classifier(options.model, options.size) for _ in loaders]
    threads = [
        threading.Thread(target=fit, args=(module, loader, extra, device.type, turns))
        for module, loader, extra in zip(modules, loaders, [make() for make in callbacks], strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if turns.failure is not None:
        raise turns.failure
    return [loader.seconds[WARM_UP:] for loader in loaders]


def clock_of(device: torch.device, kind: str) -> Callable[[], float]:
    """Seconds, read once the device is done."""
    read, synchronize = CLOCKS[kind], torch.get_device_module(device).synchronize

    def clock() -> float:
        synchronize()
        return read()

    return clock


def fit(module: Classifier, loader: Paced, callbacks: list[Callback], accelerator: str, turns: Turns) -> None:
    """One epoch."""
    run = Trainer(
        accelerator=accelerator,
        devices=1,
        max_epochs=1,
        logger=False,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        run.fit(module, loader)
        turns.over()  # after the last batch Lightning asks for no other: that step is not timed
    except BaseException as failure:  # raised again by the main thread
        turns.fail(failure)


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--clock", default="wall", choices=list(CLOCKS))
    parser.add_argument("--sets", nargs="*", default=list(SETS), choices=list(SETS))
    options = parser.parse_args()
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    setting = f"{options.model}, {options.size} px, batch {options.batch}, {options.device}"
    print(f"{setting}, {options.pairs} pairs, {options.clock} time\n")
    print("| callbacks | plain step, ms | median ratio | mean ratio |\n|---|---|---|---|")
    for name in options.sets:
        plain, ratios = compare(SETS[name], options)
        print(f"| {name} | {plain:.1f} | {median(ratios):.4f} | {fmean(ratios):.4f} |", flush=True)


if __name__ == "__main__":
    main()

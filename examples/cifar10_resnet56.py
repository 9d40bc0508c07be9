"""ResNet-56 on CIFAR-10, the field's benchmark: train dense, prune while training on, compare over several seeds.

What this example teaches:

1. A target in multiply-accumulates: ``ChannelPruning(target="macs", amount=1 - 1 / 2.11)`` masks until the compacted
   network has 2.11 times fewer of them, whatever the architecture.
2. A fair comparison: each pruned network starts from the dense one of the same seed, and the difference is paired.
3. Long runs in pieces: with ``--minutes 9`` it stops in time, and the same command goes on where it was.

    make example NAME=cifar10_resnet56 ARGS="--data-dir data"            # the full protocol; on CUDA, in bfloat16
    make example NAME=cifar10_resnet56 ARGS="--data-dir data --short"    # a small net, few epochs; on a CPU

``data`` holds torchvision's files (``--download`` fetches them), or ``cifar10.npz``, or its parts, which
``python examples/image_data.py data`` makes, each under 60 MB. All images lie on the device; crops and flips are made
there. The table that comes out is written to ``results.md`` in ``--log-dir``. Each pruned network in it was loaded from
its checkpoint, and has the same accuracy as before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from image_data import Data, load
from lightning_compress import (
    ChannelPruning,
    ComplexityMonitor,
    MaskConflictRepair,
    ModelCompaction,
    load_compacted,
)
from measuring import count_correct, quieten


@dataclass(frozen=True)
class Protocol:
    """Sizes of the network and of the training. ``images``: of the training set, None for all of it."""

    depth: int
    width: int
    images: int | None
    dense_epochs: int
    pruned_epochs: int
    batch_size: int = 128
    dense_lr: float = 0.1
    pruned_lr: float = 0.05
    weight_decay: float = 5e-4
    ratios: tuple[float, ...] = (2.11, 2.57)


FULL = Protocol(depth=56, width=16, images=None, dense_epochs=200, pruned_epochs=150)
SHORT = Protocol(depth=14, width=8, images=10_000, dense_epochs=12, pruned_epochs=8)

# Accuracy in per cent that others report for ResNet-56 (dense about 93.5), by method and times fewer MACs.
PUBLISHED = {
    2.11: [("DepGraph", 2.13, 93.77), ("ResRep", 2.12, 93.71), ("group L1", 2.12, 92.93)],
    2.57: [("DepGraph", 2.57, 93.64)],
}


# ------------------------------------------------------------------------------------------------------------- network


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) -> (N, outputs, H / stride, W / stride)."""
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


class CifarResNet(nn.Module):
    """The ResNets of He et al. (2015), section 4.2: three stages of (depth - 2) / 6 blocks."""

    def __init__(self, depth: int, width: int, classes: int = 10) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        widths = [width, *(width * 2**stage for stage in range(3) for _ in range(blocks))]
        pairs = zip(widths, widths[1:], strict=False)
        self.blocks = nn.Sequential(*(Block(i, o, 2 if o > i else 1) for i, o in pairs))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, classes)."""
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Classifier(pl.LightningModule):
    """SGD with momentum, its learning rate falling to zero along a cosine."""

    def __init__(self, depth: int, width: int, lr: float, weight_decay: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = CifarResNet(depth, width)
        self.example_input_array = torch.zeros(2, 3, 32, 32)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, 32, 32) -> (N, 10)."""
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy of one batch."""
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        """One step of the schedule an epoch."""
        optimizer = torch.optim.SGD(
            self.parameters(), self.hparams.lr, 0.9, weight_decay=self.hparams.weight_decay, nesterov=True
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs),
        }


# ---------------------------------------------------------------------------------------------------------------- data


class Batches:
    """Batches of images that lie on the device, in a new order each time, shifted by up to four pixels and flipped."""

    def __init__(self, images: Tensor, labels: Tensor, size: int) -> None:
        self.images, self.labels, self.size = F.pad(images, (4, 4, 4, 4)), labels, size

    def __len__(self) -> int:
        return len(self.labels) // self.size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.labels), device=self.labels.device)
        for n in range(len(self)):
            chosen = order[n * self.size : (n + 1) * self.size]
            yield self.augmented(self.images[chosen]), self.labels[chosen]

    def augmented(self, padded: Tensor) -> Tensor:
        """(N, 3, 40, 40) -> (N, 3, 32, 32): a window of each image, every second one mirrored."""
        count, device = len(padded), padded.device
        across = torch.arange(32, device=device)
        flip = torch.rand(count, 1, device=device) < 0.5
        columns = torch.where(flip, across.flip(0), across) + torch.randint(9, (count, 1), device=device)
        rows = across + torch.randint(9, (count, 1), device=device)
        return padded[torch.arange(count, device=device)[:, None, None], :, rows[:, :, None], columns[:, None]].permute(
            0, 3, 1, 2
        )


# ------------------------------------------------------------------------------------------------------------ training


class OutOfTime(Exception):
    """The time is over; what is done is on disk."""


class Pause(Callback):
    """Stops before an epoch that may not be done in time.

    An exception, unlike ``max_time``, leaves the masked model alone: it does not end the fit, and nothing is compacted.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline, self.started, self.longest = deadline, 0.0, 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Expect that the next epoch takes as long as the longest so far; the first one of a piece is always run."""
        now = time.monotonic()
        if self.started:
            self.longest = max(self.longest, now - self.started)
            if now + 1.5 * self.longest > self.deadline:
                raise OutOfTime
        self.started = now


def fit(model: Classifier, train: Batches, folder: Path, epochs: int, callbacks: list[Callback]) -> None:
    """Train, or go on where an earlier run was stopped."""
    last = ModelCheckpoint(folder, filename="latest", enable_version_counter=False)
    trainer = pl.Trainer(
        max_epochs=epochs,
        precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
        logger=TensorBoardLogger(folder, name="", version=""),
        callbacks=[*callbacks, last],
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=50,
        devices=1,
    )
    paused = folder / "latest.ckpt"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")  # it is what we go on from
        trainer.fit(model, train, ckpt_path=paused if paused.exists() else None)


@torch.inference_mode()
def accuracy(net: nn.Module, data: Data) -> float:
    """Per cent of the test images that are classified correctly, in float32, wherever the network is."""
    return 100 * count_correct(net, data.test) / len(data.test)


def train_dense(args: argparse.Namespace, seed: int, train: Batches, data: Data) -> dict[str, float]:
    """The dense network of one seed."""
    p, folder = args.protocol, args.log_dir / f"seed{seed}" / "dense"
    pl.seed_everything(seed, verbose=False)
    model = Classifier(p.depth, p.width, p.dense_lr, p.weight_decay)
    fit(model, train, folder, p.dense_epochs, [Pause(args.deadline)])
    torch.save(model.state_dict(), folder / "dense.pt")
    macs, params, _ = engine.count_flops_params(model.net, model.example_input_array[:1], verbose=False)
    return {"accuracy": accuracy(model.net, data), "macs": macs, "params": params}


def train_pruned(args: argparse.Namespace, seed: int, ratio: float, train: Batches, data: Data) -> dict[str, float]:
    """The network of one seed with ``ratio`` times fewer MACs, from the dense one; pruned in the first third."""
    p, folder = args.protocol, args.log_dir / f"seed{seed}" / f"{ratio}x"
    pl.seed_everything(seed, verbose=False)
    model = Classifier(p.depth, p.width, p.pruned_lr, p.weight_decay)
    model.load_state_dict(torch.load(args.log_dir / f"seed{seed}" / "dense" / "dense.pt", weights_only=True))
    compaction = ModelCompaction(folder, on_failure="raise")
    callbacks = [
        ChannelPruning("l2", amount=1 - 1 / ratio, target="macs", end=max(1, p.pruned_epochs // 3)),
        MaskConflictRepair(),
        ComplexityMonitor(latency_runs=0),
        compaction,
        Pause(args.deadline),
    ]
    fit(model, train, folder, p.pruned_epochs, callbacks)
    again = load_compacted(compaction.checkpoint_path, Classifier)
    measured, loaded = accuracy(model.net, data), accuracy(again.net, data)
    if measured != loaded:
        raise SystemExit(f"The reloaded checkpoint has {loaded:.2f} % instead of {measured:.2f} %.")
    macs, params, _ = engine.count_flops_params(again.net, again.example_input_array[:1], verbose=False)
    return {"accuracy": loaded, "macs": macs, "params": params}


def run_seed(args: argparse.Namespace, seed: int) -> None:
    """Do what is not done yet; every result is written as it comes."""
    p, folder = args.protocol, args.log_dir / f"seed{seed}"
    data = load("cifar10", args.data_dir, args.download)
    images, labels = (tensor[: p.images].to(args.device) for tensor in data.train.tensors)
    train = Batches(images, labels, p.batch_size)
    for name in ("dense", *(f"{ratio}x" for ratio in p.ratios)):
        path = folder / f"{name}.json"
        if not path.exists():
            started = time.monotonic()
            ratio = None if name == "dense" else float(name[:-1])
            row = (
                train_dense(args, seed, train, data) if ratio is None else train_pruned(args, seed, ratio, train, data)
            )
            path.write_text(json.dumps(row))
            print(f"seed {seed}, {name}: {row['accuracy']:.2f} % ({time.monotonic() - started:.0f} s)", flush=True)


# ------------------------------------------------------------------------------------------------------------- results


def results(args: argparse.Namespace) -> str:
    """The table, as far as it is known: each seed, means and deviations, and the published figures."""
    p = args.protocol
    lines = [
        "| network | times fewer MACs | parameters | accuracy by seed, % | mean ± deviation, % | minus dense, points |",
        "|---|---:|---:|---|---:|---:|",
    ]
    dense = measured_rows(args, "dense")
    for name in ("dense", *(f"{ratio}x" for ratio in p.ratios)):
        rows = {seed: row for seed, row in measured_rows(args, name).items() if seed in dense}
        if rows:
            lines.append(row_of(f"ResNet-{p.depth}, width {p.width}", name, rows, dense))
            lines += [] if p.width != FULL.width or p.depth != FULL.depth else published(name)
    where = torch.cuda.get_device_name() if args.device.type == "cuda" else "a CPU"
    caption = (
        f"{p.images or 50_000:,} training images, {p.dense_epochs} epochs dense and {p.pruned_epochs} more pruned, "
        f"batches of {p.batch_size}, on {where}, torch {torch.__version__}. Accuracy on all test images, last epoch."
    )
    return "\n".join([caption, "", *lines, ""])


def measured_rows(args: argparse.Namespace, name: str) -> dict[int, dict[str, float]]:
    """Results of each seed that is done."""
    paths = {seed: args.log_dir / f"seed{seed}" / f"{name}.json" for seed in args.seeds}
    return {seed: json.loads(path.read_text()) for seed, path in paths.items() if path.exists()}


def row_of(network: str, name: str, rows: dict[int, dict[str, float]], dense: dict[int, dict[str, float]]) -> str:
    """One line of the table."""
    each = [row["accuracy"] for row in rows.values()]
    first, whole = next(iter(rows.values())), next(iter(dense.values()))
    differences = [row["accuracy"] - dense[seed]["accuracy"] for seed, row in rows.items()]
    times = whole["macs"] / statistics.mean(row["macs"] for row in rows.values())
    cells = (
        f"{network}, {'dense' if name == 'dense' else 'pruned'}",
        "1" if name == "dense" else f"{times:.2f}",
        f"{first['params']:,.0f}",
        ", ".join(f"{value:.2f}" for value in each),
        mean_and_deviation(each),
        "" if name == "dense" else mean_and_deviation(differences, sign="+"),
    )
    return f"| {' | '.join(cells)} |"


def mean_and_deviation(values: list[float], sign: str = "") -> str:
    """Mean ± sample deviation, the latter where there are several."""
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.2f}{deviation}"


def published(name: str) -> list[str]:
    """Lines of the others, for ResNet-56."""
    others = PUBLISHED.get(0.0 if name == "dense" else float(name[:-1]), [])
    return [f"| {who}, as published | {times} | | | {value:.2f} | |" for who, times, value in others]


# ------------------------------------------------------------------------------------------------------------- program


def parser() -> argparse.ArgumentParser:
    """Command line; its help is the manual."""
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--data-dir", type=Path, default=Path("data"), help="folder of CIFAR-10's files (default %(default)s)")
    add("--download", action="store_true", help="let torchvision download what is missing there")
    add("--log-dir", type=Path, default=Path("runs/cifar10"), help="folder of all that comes out (default %(default)s)")
    add("--short", action="store_true", help="a small net and few epochs, for a CPU")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds (default 0 1 2)")
    add("--jobs", type=int, default=1, help="seeds at the same time, each in a process (default %(default)s)")
    add("--minutes", type=float, default=float("inf"), help="stop in time; the same command goes on later")
    add("--threads", type=int, default=1, help="CPU threads of each process (default %(default)s)")
    return result


def each_in_a_process(args: argparse.Namespace) -> int:
    """Run several seeds at a time; returns the worst status."""
    waiting, running, worst = list(args.seeds), [], 0
    shared = [sys.executable, __file__, "--data-dir", str(args.data_dir), "--log-dir", str(args.log_dir)]
    shared += ["--minutes", str(args.minutes), "--threads", str(args.threads), *(["--short"] if args.short else [])]
    while waiting or running:
        while waiting and len(running) < args.jobs:
            running.append(subprocess.Popen([*shared, "--seeds", str(waiting.pop(0))]))
        worst = max(worst, running.pop(0).wait())
    return worst


def run(args: argparse.Namespace) -> str:
    """All seeds, then the table."""
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.deadline = time.monotonic() + 60 * args.minutes
    torch.set_num_threads(args.threads)
    if args.jobs > 1:
        if each_in_a_process(args):
            raise OutOfTime
    else:
        for seed in args.seeds:
            run_seed(args, seed)
    table = results(args)
    (args.log_dir / "results.md").write_text(table, encoding="utf-8")
    return table


def main() -> None:
    """Run and print the table; status 75 says that the time is over and the command is to be run again."""
    args = parser().parse_args()
    args.protocol = SHORT if args.short else FULL
    quieten()
    try:
        print(run(args))
    except OutOfTime:
        print("The time is over; run the same command again to go on.", file=sys.stderr)
        raise SystemExit(75) from None


if __name__ == "__main__":
    main()

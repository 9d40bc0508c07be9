"""Train a network, prune it while it trains, and end with a smaller network that computes the same.

What this example teaches, on handwritten digits and within two minutes on two CPU cores:

1. An ordinary LightningModule is trained densely. Nothing in it knows of pruning.
2. A second fit adds four callbacks. ``ChannelPruning`` masks more and more channels on a schedule,
   ``MaskConflictRepair`` keeps the masks of coupled layers consistent, ``ComplexityMonitor`` logs MACs,
   parameters and sparsity over the epochs, and ``ModelCompaction`` removes at the end what the masks zeroed and
   writes a checkpoint.
3. The compacted network is measured against the masked one (same function, so the same accuracy) and against the dense
   one (smaller and faster), then loaded from its checkpoint in a fresh process.

    make demo

The network has what makes removing channels hard: residual sums, a depthwise convolution, and a concatenation.
The program ends with status 1 and a sentence for each promise that does not hold.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytorch_lightning as pl
import torch
import torchmetrics
from pytorch_lightning.callbacks import Callback, RichProgressBar
from pytorch_lightning.loggers import TensorBoardLogger
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import engine
from image_data import SETS, Data, load
from lightning_compress import ChannelPruning, ComplexityMonitor, MaskConflictRepair, ModelCompaction, load_compacted
from measuring import Row, count_correct, measure, quieten, relative_difference

# ------------------------------------------------------------------------------------------------------------- network


def conv_bn(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution without bias, then batch norm."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class ResidualBlock(nn.Module):
    """x + f(x): the channels of x and of f(x) can only go together."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = conv_bn(width, width)
        self.conv2 = conv_bn(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(N, width, H, W) -> same."""
        return F.relu(x + self.conv2(F.relu(self.conv1(x))))


class DepthwiseBlock(nn.Module):
    """1x1, depthwise 3x3, 1x1: a depthwise convolution's outputs are its inputs, so both lose the same channels."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.expand = conv_bn(inputs, 2 * outputs, kernel=1)
        self.depthwise = conv_bn(2 * outputs, 2 * outputs, stride=2, groups=2 * outputs)
        self.project = conv_bn(2 * outputs, outputs, kernel=1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) -> (N, outputs, H/2, W/2)."""
        return F.relu(self.project(F.relu(self.depthwise(F.relu(self.expand(x))))))


class ConcatBlock(nn.Module):
    """Pooled inputs next to new channels: whoever reads the result must follow both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = conv_bn(width, width, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """(N, width, H, W) -> (N, 2 * width, H/2, W/2)."""
        return torch.cat([F.max_pool2d(x, 2, ceil_mode=True), F.relu(self.conv(x))], dim=1)


class SmallResNet(nn.Module):
    """A CIFAR-style ResNet of three stages, ``width``, ``2 * width`` and ``4 * width`` channels wide."""

    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_bn(channels, width), nn.ReLU())
        self.stage1 = ResidualBlock(width)
        self.stage2 = nn.Sequential(DepthwiseBlock(width, 2 * width), ResidualBlock(2 * width))
        self.stage3 = nn.Sequential(ConcatBlock(2 * width), ResidualBlock(4 * width))
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) -> (N, classes)."""
        return self.head(self.stage3(self.stage2(self.stage1(self.stem(x)))).mean(dim=(2, 3)))


class Classifier(pl.LightningModule):
    """An ordinary LightningModule. ``example_input_array`` is what the callbacks trace the network with."""

    def __init__(self, channels: int, size: int, classes: int = 10, width: int = 32, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.net = SmallResNet(channels, classes, width)
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(classes, average="micro")
        self.example_input_array = torch.zeros(2, channels, size, size)

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, H, W) -> (N, classes)."""
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the cross-entropy of one batch."""
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Log the accuracy on images that the training does not see."""
        self.accuracy(self(batch[0]), batch[1])
        self.log("test/accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        """AdamW, its learning rate falling to zero over the fit."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=5e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


# ------------------------------------------------------------------------------------------------------------ training


class KeepMasked(Callback):
    """Copy the network as it is masked, right before ``ModelCompaction`` (later in the list) makes it small."""

    def __init__(self) -> None:
        self.net: nn.Module | None = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep a copy on the CPU."""
        self.net = copy.deepcopy(pl_module.net).cpu()


def fit(args: argparse.Namespace, data: Data, model: Classifier, name: str, callbacks: list[Callback]) -> pl.Trainer:
    """Train ``model`` with a progress bar and TensorBoard logs under ``--log-dir``/``name``."""
    epochs = args.epochs if name == "dense" else args.prune_epochs
    Console(quiet=args.quiet).rule(f"{name}: {epochs} epochs")
    bar = [] if args.quiet else [RichProgressBar()]
    trainer = pl.Trainer(
        max_epochs=epochs,
        logger=TensorBoardLogger(args.log_dir, name=name),
        callbacks=[*callbacks, *bar],
        enable_progress_bar=not args.quiet,
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=10,
        accelerator=args.accelerator,
        devices=1,
    )
    train = DataLoader(data.train, batch_size=args.batch_size, shuffle=True, drop_last=True)
    trainer.fit(model, train, DataLoader(data.test, batch_size=256))
    return trainer


# ----------------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Report:
    """All that the program prints: of ``images`` test images, ``reloaded`` are right in a fresh process.

    ``predicted`` are the MACs and parameters that ``ComplexityMonitor`` announced while the network was still masked.
    ``difference`` is the largest one between the outputs of masked and compacted, in float32 on the test images. The
    certificate says the same of random inputs and of each channel inside, in float64.
    """

    rows: tuple[Row, Row, Row]
    images: int
    predicted: tuple[int, int]
    difference: float
    certificate: engine.Certificate
    logs: Path
    checkpoint: Path
    reloaded: int


def evaluate(checkpoint: Path, test: TensorDataset) -> int:
    """Load a compacted checkpoint and count what it classifies correctly."""
    return count_correct(load_compacted(str(checkpoint), Classifier).net, test)


def evaluate_elsewhere(args: argparse.Namespace, checkpoint: Path) -> int:
    """Do the same in a process of its own, which knows nothing but the checkpoint and this file."""
    # As many threads as here: their number decides the order of sums, and with it the last bits.
    options = {"--evaluate": checkpoint, "--data": args.data, "--data-dir": args.data_dir, "--threads": args.threads}
    options |= {} if args.limit is None else {"--limit": args.limit}
    command = [sys.executable, __file__, *(str(part) for option in options.items() for part in option)]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


# ------------------------------------------------------------------------------------------------------------- program


def run(args: argparse.Namespace) -> Report:
    """Train dense, prune, compact, measure, reload."""
    torch.set_num_threads(args.threads)
    pl.seed_everything(args.seed, verbose=False)
    data = load(args.data, args.data_dir, args.download, args.limit)
    model = Classifier(channels=data.image_shape[0], size=data.image_shape[1], width=args.width)

    fit(args, data, model, "dense", [])
    dense = copy.deepcopy(model.net)

    # Pruned in the first half of the fit, while the learning rate is high enough to recover from it.
    pruning = ChannelPruning("l1", amount=args.amount, end=args.prune_epochs // 2)
    monitor = ComplexityMonitor()
    masked = KeepMasked()
    compaction = ModelCompaction(on_failure="raise")
    trainer = fit(args, data, model, "pruned", [pruning, MaskConflictRepair(), monitor, masked, compaction])
    if compaction.checkpoint_path is None:
        raise SystemExit(f"An --amount of {args.amount} masks no channel of a net this narrow: nothing to compact.")

    rows = measure({"dense": dense, "masked": masked.net, "compacted": model.net}, data.test, args.rounds)
    before = monitor.history[-2]  # the last entry is the compacted network
    checkpoint = Path(compaction.checkpoint_path)
    return Report(
        rows=rows,
        images=len(data.test),
        predicted=(before["complexity/macs_compacted"], before["complexity/params_compacted"]),
        difference=relative_difference(masked.net, model.net, data.test.tensors[0][:1000]),
        certificate=compaction.certificate,
        logs=Path(trainer.log_dir),
        checkpoint=checkpoint,
        reloaded=evaluate_elsewhere(args, checkpoint),
    )


def broken_promises(report: Report, targets: bool) -> list[str]:
    """Return a sentence for each promise that does not hold; size, speed and accuracy count only with ``targets``."""
    dense, masked, compacted = report.rows
    lost = 100 * (dense.correct - compacted.correct) / report.images
    measured = compacted.macs, compacted.params
    exact = report.certificate.verified and report.certificate.max_error <= 1e-4
    promises = [
        (f"compacted gets {compacted.correct} right, masked {masked.correct}", compacted.correct == masked.correct),
        (f"reloaded gets {report.reloaded} right, compacted {compacted.correct}", report.reloaded == compacted.correct),
        (f"(MACs, parameters) are {measured}, predicted were {report.predicted}", measured == report.predicted),
        (
            f"outputs of masked and compacted differ by {report.difference:.1e}, more than 1e-4",
            report.difference <= 1e-4,
        ),
        (f"the certificate should be verified to 1e-4, it says: {report.certificate}", exact),
    ]
    latency = f"64 images take {compacted.latency[64]:.2f} ms, dense {dense.latency[64]:.2f} ms"
    promises += targets * [
        (f"accuracy fell by {lost:.2f} points, more than 1", lost <= 1),
        (f"{compacted.params:,} parameters are over 40 % of {dense.params:,}", compacted.params <= 0.4 * dense.params),
        (f"{compacted.macs:,} MACs are over 50 % of {dense.macs:,}", compacted.macs <= 0.5 * dense.macs),
        (latency, compacted.latency[64] < dense.latency[64]),
    ]
    return [sentence for sentence, holds in promises if not holds]


def table(report: Report) -> Table:
    """Lay the three networks side by side."""
    result = Table("", *(row.name for row in report.rows), title="What became of the network (measured on the CPU)")
    dense = report.rows[0]

    def share_of(part: int, whole: int) -> str:
        return f"{part:,}" if part == whole else f"{part:,} ({100 * part / whole:.0f} %)"

    lines = {
        "accuracy": lambda row: f"{100 * row.correct / report.images:.2f} %",
        "test images right": lambda row: f"{row.correct} of {report.images}",
        "MACs per image": lambda row: share_of(row.macs, dense.macs),
        "parameters": lambda row: share_of(row.params, dense.params),
        "size on disk": lambda row: f"{row.size / 1024:,.0f} KiB",
        "latency, batch 1": lambda row: f"{row.latency[1]:.2f} ms",
        "latency, batch 64": lambda row: f"{row.latency[64]:.2f} ms",
    }
    for name, cell in lines.items():
        result.add_row(name, *(cell(row) for row in report.rows))
    return result


def show(report: Report, console: Console) -> None:
    """Print the table, the certificate and where things are."""
    console.print(table(report))
    console.print(f"certificate error  {report.certificate.max_error:.1e} (random inputs, each channel inside too)")
    console.print(f"output difference  {report.difference:.1e} between masked and compacted (float32, test images)")
    console.print(f"reloaded           {report.reloaded} of {report.images} right in a fresh process")
    console.print(f"TensorBoard        tensorboard --logdir {report.logs.parent.parent}", soft_wrap=True)
    console.print(f"checkpoint         {report.checkpoint}", soft_wrap=True)


def share(text: str) -> float:
    """Parse a number above 0 and below 1."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and below 1")
    return value


def parser() -> argparse.ArgumentParser:
    """Command line; its help is the manual."""
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = result.add_argument
    add("--data", choices=list(SETS), default="digits", help="images to learn; digits need no files (default)")
    add("--data-dir", type=Path, default=Path("data"), help="folder of mnist's or cifar10's files, or of cifar10.npz")
    add("--download", action="store_true", help="let torchvision download what is missing in --data-dir")
    add("--limit", type=int, metavar="N", help="use only the first N training and N test images, for a quick look")
    add("--epochs", type=int, default=10, help="epochs of dense training (default %(default)s)")
    add("--prune-epochs", type=int, default=14, help="epochs of pruning and fine-tuning (default %(default)s)")
    add("--amount", type=share, default=0.5, help="share of channels to remove, 0 to 1 (default %(default)s)")
    add("--width", type=int, default=32, help="channels of the first stage (default %(default)s)")
    add("--batch-size", type=int, default=64, help="images per training step (default %(default)s)")
    add("--seed", type=int, default=0, help="seed of weights and order of images (default %(default)s)")
    add("--threads", type=int, default=1, help="CPU threads; few keep latencies steady (default %(default)s)")
    add("--accelerator", default="auto", help="where to train, as in Lightning: auto, cpu, gpu (default %(default)s)")
    add("--log-dir", type=Path, default=Path("runs"), help="folder of logs and checkpoint (default %(default)s)")
    add("--rounds", type=int, default=50, help="forward passes behind each latency (default %(default)s)")
    add("--quiet", action="store_true", help="no progress bar")
    add(
        "--evaluate",
        type=Path,
        metavar="CKPT",
        help="only load this checkpoint and print how many test images are right",
    )
    return result


def main() -> None:
    """Run, show, and end with status 1 where a promise does not hold."""
    args = parser().parse_args()
    quieten()
    if args.evaluate:
        torch.set_num_threads(args.threads)
        print(evaluate(args.evaluate, load(args.data, args.data_dir, args.download, args.limit).test))
        return
    report = run(args)
    show(report, Console())
    # Size, speed and accuracy are promised for the settings that the example comes with, exactness for all.
    settings = ("data", "limit", "epochs", "prune_epochs", "amount", "width", "batch_size")
    defaults = all(getattr(args, name) == parser().get_default(name) for name in settings)
    broken = broken_promises(report, targets=defaults)
    if broken:
        raise SystemExit("\n".join(f"Promise not kept: {sentence}." for sentence in broken))


if __name__ == "__main__":
    main()

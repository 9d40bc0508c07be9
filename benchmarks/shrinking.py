"""The picture of channels that go over a fit: the network of `make demo` in one fit, dense, pruned, compacted.

python benchmarks/shrinking.py --out docs/images/channels.svg
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import pytorch_lightning as pl  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import engine  # noqa: E402
from digits import Classifier  # noqa: E402
from image_data import load  # noqa: E402
from lightning_compress import ChannelPruning, ComplexityMonitor, MaskConflictRepair, ModelCompaction  # noqa: E402

PREFIX = "sparsity/"


class Accuracies(pl.Callback):
    """Keeps the accuracy of each epoch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep it."""
        if not trainer.sanity_checking:
            self.values.append(100 * float(trainer.callback_metrics["test/accuracy"]))


def fit(epochs: int, width: int, limit: int | None) -> tuple[dict[str, list[float]], list[float]]:
    """Fit once: dense for a quarter of the epochs, pruned over the next half, then recovering.

    Args:
        epochs: number of epochs.
        width: of the network.
        limit: number of images; None: all.

    Returns:
        Channels of each group that are left before each epoch and at the end, and the accuracy after each epoch in %.
    """
    pl.seed_everything(0, verbose=False)
    data = load("digits", Path("data"), limit=limit)
    model = Classifier(channels=data.image_shape[0], size=data.image_shape[1], width=width)
    sizes = {
        group.name: group.size
        for group in engine.dependency_groups(model.net, model.example_input_array)
        if group.reason is None
    }
    monitor, accuracies = ComplexityMonitor(model="net", latency_runs=0), Accuracies()
    pruning = ChannelPruning("l1", amount=0.5, start=epochs // 4, end=3 * epochs // 4)
    compaction = ModelCompaction(on_failure="raise", save=False)
    trainer = pl.Trainer(
        max_epochs=epochs,
        callbacks=[pruning, MaskConflictRepair(), monitor, compaction, accuracies],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data.train, 64, shuffle=True), DataLoader(data.test, 256))
    return left(sizes, monitor.history[: epochs + 1]), accuracies.values


def left(sizes: Mapping[str, int], history: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Channels of each group that are left, at each entry of the monitor's history.

    Example:
        >>> left({"a": 8}, [{"sparsity/a": 0.0}, {"sparsity/a": 0.25}])
        {'a': [8.0, 6.0]}
    """
    return {name: [size * (1 - entry[PREFIX + name]) for entry in history] for name, size in sizes.items()}


def draw(channels: Mapping[str, Sequence[float]], accuracies: Sequence[float], path: Path) -> None:
    """Draw the channels of all groups on top of each other, and the accuracy, over the epochs."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "lightning-compress"  # the same picture is the same file
    axes = plt.figure(figsize=(7.0, 3.2), layout="constrained").add_subplot()
    epochs = range(len(next(iter(channels.values()))))
    shades = [plt.get_cmap("Blues")(0.3 + 0.5 * number / len(channels)) for number in range(len(channels))]
    axes.stackplot(epochs, list(channels.values()), colors=shades, step="post", edgecolor="white", linewidth=0.4)
    most = 1.15 * sum(own[0] for own in channels.values())
    axes.set(xlabel="epoch", ylabel=f"channels in {len(channels)} groups", xlim=(0, epochs[-1]), ylim=(0, most))
    axes.set_title("channels that are left (one shade per group), and test accuracy, over one fit", fontsize=10)
    right = axes.twinx()
    right.plot(range(1, len(accuracies) + 1), accuracies, "o-", color="#d62728", markersize=4)
    right.set_ylabel("test accuracy, %", color="#d62728")
    right.set_ylim(0, 105)
    path.parent.mkdir(parents=True, exist_ok=True)
    axes.figure.savefig(path, metadata={"Date": None})  # type: ignore[union-attr]
    plt.close()


def main() -> int:
    """Fit and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--limit", type=int, help="number of images")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "channels.svg")
    args = parser.parse_args()
    channels, accuracies = fit(args.epochs, args.width, args.limit)
    draw(channels, accuracies, args.out)
    first, last = (sum(own[n] for own in channels.values()) for n in (0, -1))
    sys.stdout.write(f"{args.out}: {first:.0f} to {last:.0f} channels, accuracy {accuracies[-1]:.2f} %\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

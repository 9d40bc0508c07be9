"""How accurate networks are right after pruning, without any training: one-shot tables for CIFAR-10.

    python benchmarks/accuracy.py --data data/cifar10.npz --weights FOLDER [--images 2000] [--out docs/results.md]

Magnitude alone, with batch norms re-estimated, and with least squares, for several criteria; beside Torch-Pruning's
pruners on the same weights, images and multiply-accumulates, where it is installed. Each network is compacted and
counted before it is tested. Calibration images are training images without labels. Finished rows are kept in a file, so
a run that was stopped goes on where it was. With ``--device cuda``, pruning stays on the CPU and the tests run there.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import engine
from benchmarks.cifar_resnets import normalised, pretrained
from lightning_compress import prune

ROOT = Path(__file__).resolve().parents[1]
START, END = "<!-- accuracy.py -->", "<!-- /accuracy.py -->"
CRITERIA = ("l2", "bn_scale", "fisher", "reconstruction")
RECOVERIES = ("none", "norms", "least squares")
PEERS = ("magnitude", "bn_scale", "taylor", "hessian")
NEED_DATA = ("fisher", "reconstruction")

Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Images:
    """Normalised images.

    Attributes:
        test, labels: to test on.
        train, train_labels: to calibrate on; the labels are for Torch-Pruning's gradients alone.
    """

    test: Tensor
    labels: Tensor
    train: Tensor
    train_labels: Tensor

    @classmethod
    def load(cls, path: Path, count: int, most: int = 20_000, device: str = "cpu") -> Images:
        """Read an archive with ``x_train``, ``y_train``, ``x_test`` and ``y_test``; those to test on go to a device."""
        with np.load(path) as arrays:
            test, train = arrays["x_test"][:count], arrays["x_train"][:most]
            labels, train_labels = arrays["y_test"][:count], arrays["y_train"][:most]
        kinds = (torch.from_numpy(part.astype(np.int64)).reshape(-1) for part in (labels, train_labels))
        return cls(normalised(test).to(device), next(kinds).to(device), normalised(train), next(kinds))

    def sample(self, seed: int, samples: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return batches of training images, and their labels."""
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(seed))[:samples]
        return list(self.train[order].split(128)), list(self.train_labels[order].split(128))


def accuracy(model: nn.Module, images: Images) -> float:
    """Return the percentage of test images that are classified correctly, in full precision on the images' device."""
    if next(model.parameters()).device != images.test.device:
        model = copy.deepcopy(model).to(images.test.device)
    with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        pairs = zip(images.test.split(250), images.labels.split(250), strict=True)
        hits = sum(int((model(x).argmax(1) == y).sum()) for x, y in pairs)
    return 100 * hits / len(images.test)


def macs(model: nn.Module, x: Tensor) -> float:
    """Return multiply-accumulates of an image."""
    return engine.count_flops_params(model, x, verbose=False)[0]


def ours(
    model: nn.Module, images: Images, criterion: str, amount: float, seed: int, samples: int, recovery: str
) -> Iterator[Row]:
    """Yield a row; the seconds are those of all that `prune` does, the verification too."""
    batches, _ = images.sample(seed, samples)
    x, fits = batches[0][:2], recovery == "least squares"
    data = batches if fits or criterion in NEED_DATA else None
    start = time.process_time()
    small = prune(model, x, amount, criterion=criterion, scope="global", data=data, compensate=fits, samples=samples)
    if recovery == "norms":
        engine.recalibrate_norms(small, batches)
    seconds = time.process_time() - start
    yield {
        "by": "lightning-compress", "criterion": criterion, "recovery": recovery, "seconds": seconds,
        "accuracy": accuracy(small, images), "left": macs(small, x) / macs(model, x),
    }  # fmt: skip


def peers(
    model: nn.Module, images: Images, criterion: str, amount: float, seed: int, samples: int, recovery: str
) -> Iterator[Row]:
    """Yield Torch-Pruning's rows, with and without the residual stream in its groups, before and after recovery."""
    batches, labels = images.sample(seed, samples)
    x = batches[0][:2]
    for stream in (True, False):
        start = time.process_time()
        small = peer(model, criterion, amount, stream, list(zip(batches, labels, strict=True)))
        if small is None:
            continue
        seconds = time.process_time() - start
        row = {"by": f"Torch-Pruning{'' if stream else ', stream kept'}", "criterion": criterion, "seconds": seconds,
               "left": macs(small, x) / macs(model, x)}  # fmt: skip
        yield {**row, "recovery": "none", "accuracy": accuracy(small, images)}
        engine.recalibrate_norms(small, batches)
        yield {**row, "recovery": recovery, "accuracy": accuracy(small, images)}


def peer(
    model: nn.Module, criterion: str, amount: float, stream: bool, pairs: list[tuple[Tensor, Tensor]]
) -> nn.Module | None:
    """Return what Torch-Pruning leaves at the highest ratio of channels that costs no less; None where none does."""
    x, dense = pairs[0][0][:2], macs(model, pairs[0][0][:2])
    low, high, best = 0.0, 1.0, None
    for _ in range(7):
        ratio = (low + high) / 2
        small = _peer_pruned(model, criterion, ratio, stream, pairs)
        left = macs(small, x) / dense
        if left <= 1 - amount:
            high, best = ratio, small
        else:
            low = ratio
    return best


def _peer_pruned(
    model: nn.Module, criterion: str, ratio: float, stream: bool, pairs: list[tuple[Tensor, Tensor]]
) -> nn.Module:
    import torch_pruning as tp

    small = copy.deepcopy(model)
    importance: Any = {
        "magnitude": lambda: tp.importance.GroupMagnitudeImportance(p=2),
        "bn_scale": tp.importance.BNScaleImportance,
        "taylor": tp.importance.GroupTaylorImportance,
        "hessian": tp.importance.GroupHessianImportance,
    }[criterion]()
    kept = [m for n, m in small.named_modules() if isinstance(m, nn.Linear) or (not stream and writes_stream(n, m))]
    pruner = tp.pruner.BasePruner(
        small, pairs[0][0][:2], importance, global_pruning=True, pruning_ratio=ratio, max_pruning_ratio=0.9,
        ignored_layers=kept,
    )  # fmt: skip
    if criterion in ("taylor", "hessian"):
        for x, y in pairs[: 8 if criterion == "taylor" else 1]:
            _accumulate(small, importance, x, y)
    pruner.step()
    small.zero_grad()
    return small


def writes_stream(name: str, module: nn.Module) -> bool:
    """Return whether a layer of a CIFAR ResNet adds to its residual stream.

    Args:
        name: of the layer.
        module: the layer.
    """
    return isinstance(module, nn.Conv2d) and (name == "conv1" or name.endswith("conv2"))


def _accumulate(model: nn.Module, importance: Any, x: Tensor, y: Tensor) -> None:
    if not hasattr(importance, "accumulate_grad"):
        F.cross_entropy(model(x), y).backward()
        return
    importance.zero_grad()
    for image, label in zip(x.split(1), y.split(1), strict=True):  # the gradient of each sample is squared
        model.zero_grad()
        F.cross_entropy(model(image), label).backward()
        importance.accumulate_grad(model)


def rows(
    networks: dict[str, nn.Module],
    images: Images,
    amounts: Iterable[float],
    seeds: int,
    samples: int,
    criteria: Iterable[str],
    keep: Path,
    rivals: Iterable[str] = (),
    recoveries: Iterable[str] = RECOVERIES,
    measure: bool = True,
) -> list[Row]:
    """Return all rows, measuring those that are not in a file yet.

    Args:
        networks: dense networks by name.
        images: to calibrate and to test on.
        amounts: fractions of the multiply-accumulates to remove.
        seeds: number of sets of calibration images.
        samples: images in a set.
        criteria: of ours.
        keep: file of finished rows.
        rivals: Torch-Pruning's criteria.
        recoveries: of ours.
        measure: whether to measure what is missing, and not to leave it out.
    """
    keep.parent.mkdir(parents=True, exist_ok=True)
    lines = keep.read_text().splitlines() if keep.exists() else []
    done = {tuple(entry["job"]): entry["rows"] for entry in map(json.loads, lines)}
    jobs: list[tuple[tuple[Any, ...], Callable[..., Iterator[Row]]]] = [
        ((kind, name, criterion, amount, seed, samples, len(images.test), recovery), function)
        for seed in range(seeds)
        for name in networks
        for amount in amounts
        for kind, function, chosen, ways in (
            ("ours", ours, criteria, recoveries),
            ("peers", peers, rivals, ("norms",)),
        )
        for criterion in chosen
        for recovery in ways
    ]
    table: list[Row] = []
    for job, function in jobs:
        _, name, criterion, amount, seed, _, _, recovery = job
        if job not in done and measure:
            about = {"network": name, "amount": amount, "seed": seed}
            results = function(networks[name], images, criterion, amount, seed, samples, recovery)
            done[job] = [{**about, **row} for row in results]
            with keep.open("a") as file:
                file.write(json.dumps({"job": job, "rows": done[job]}) + "\n")
            print(*job, *(f"{row['accuracy']:.2f} ({row['seconds']:.0f} s)" for row in done[job]), flush=True)
        table += done.get(job, [])
    return table


def page(table: list[Row], dense: dict[str, float], images: int, samples: int) -> str:
    """Return the section of the page that the rows make."""
    amounts = sorted({row["amount"] for row in table})
    lines = [
        START, "", f"One-shot, no training: accuracy in % on {images:,} test images, {samples:,} unlabelled training "
        "images to calibrate on, mean over the seeds (± half the range). Columns: fewer multiply-accumulates.", "",
    ]  # fmt: skip
    for name in dict.fromkeys(row["network"] for row in table):
        own = [row for row in table if row["network"] == name]
        seconds = max((row["seconds"] for row in own if row["by"] == "lightning-compress"), default=0.0)
        lines += [f"### {name}, dense {dense[name]:.2f} %", ""]
        lines += ["| by | criterion | recovery | " + " | ".join(f"{amount:.0%}" for amount in amounts) + " |"]
        lines += ["|---|---|---|" + "---:|" * len(amounts)]
        keys = dict.fromkeys((row["by"], row["criterion"], row["recovery"]) for row in own)
        for key in keys:
            cells = [_cell([r for r in own if (r["by"], r["criterion"], r["recovery"], r["amount"]) == (*key, amount)])
                     for amount in amounts]  # fmt: skip
            lines.append(f"| {' | '.join(key)} | {' | '.join(cells)} |")
        lines += ["", f"The slowest of ours took {seconds:.0f} CPU seconds, verification included.", ""]
    return "\n".join([*lines, END])


def _cell(table: list[Row]) -> str:
    values = [row["accuracy"] for row in table]
    if not values:
        return ""
    spread = f" ± {(max(values) - min(values)) / 2:.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def curves(table: list[Row], network: str) -> dict[str, list[tuple[float, float]]]:
    """Return name -> points (percentage of multiply-accumulates removed, accuracy), from the smallest cut on.

    Torch-Pruning's curve takes the best of its rows at each budget, whatever their importance, recovery and groups.
    """
    own = [row for row in table if row["network"] == network]
    peers = [row for row in own if row["by"] != "lightning-compress"]
    names = {
        "least squares, reconstruction": ("reconstruction", "least squares"),
        "batch norms re-estimated, l2": ("l2", "norms"),
        "masks alone, l2": ("l2", "none"),
    }
    drawn = {
        name: [row for row in own if row not in peers and (row["criterion"], row["recovery"]) == key]
        for name, key in names.items()
    }
    drawn["Torch-Pruning, its best at each budget"] = [
        max((row for row in peers if row["amount"] == amount), key=lambda row: row["accuracy"])
        for amount in {row["amount"] for row in peers}
    ]
    return {name: sorted(_means(points)) for name, points in drawn.items() if points}


def _means(table: list[Row]) -> Iterator[tuple[float, float]]:
    """Yield the mean over the seeds at each budget."""
    for amount in {row["amount"] for row in table}:
        own = [row for row in table if row["amount"] == amount]
        yield 100 * (1 - statistics.mean(r["left"] for r in own)), statistics.mean(r["accuracy"] for r in own)


def figure(table: list[Row], network: str, dense: float, path: Path) -> None:
    """Draw accuracy over the multiply-accumulates removed."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "lightning-compress"  # the same picture is the same file
    axes = plt.figure(figsize=(7.0, 3.8), layout="constrained").add_subplot()
    for (name, points), style in zip(curves(table, network).items(), ("o-", "s--", "v:", "D-."), strict=False):
        xs, ys = zip((0.0, dense), *points, strict=True)
        axes.plot(xs, ys, style, label=name)
    axes.set(xlabel="multiply-accumulates removed, %", ylabel="test accuracy, %", ylim=(0, 100))
    axes.set_title(f"{network} on CIFAR-10, right after pruning, no training", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    axes.figure.savefig(path, metadata={"Date": None})  # type: ignore[union-attr]
    plt.close()


def write(section: str, path: Path, heading: str = "CIFAR-10, right after pruning") -> None:
    """Put the section in place of the one between the same marks, or at the end of the page, under the heading."""
    text = path.read_text() if path.exists() else "# Results\n"
    start, *_, end = section.strip().splitlines()
    if start in text:
        before, _, rest = text.partition(start)
        text = before + section + rest.partition(end)[2]
    else:
        text = f"{text.rstrip()}\n\n## {heading}\n\n{section}\n"
    path.write_text(text)


def main() -> int:
    """Measure what is missing and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="cifar10.npz: x_train, y_train, x_test, y_test")
    parser.add_argument("--weights", type=Path, required=True, help="folder with resnet20-*.th and resnet56-*.th")
    parser.add_argument("--networks", nargs="+", default=["resnet20", "resnet56"])
    parser.add_argument("--amounts", nargs="+", type=float, default=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    parser.add_argument("--criteria", nargs="*", default=list(CRITERIA), help="of ours")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), help="Torch-Pruning's importances")
    parser.add_argument("--recoveries", nargs="+", default=list(RECOVERIES), help="of ours")
    parser.add_argument("--finished", action="store_true", help="measure nothing, write what is finished")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--images", type=int, default=10_000, help="test images")
    parser.add_argument("--device", default="cpu", help="to test on")
    parser.add_argument("--keep", type=Path, default=ROOT / "build" / "accuracy.jsonl", help="finished rows")
    parser.add_argument("--figure", type=Path, help="SVG file to draw the first network's curves into")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results.md", help="the page to write into")
    args = parser.parse_args()
    images = Images.load(args.data, args.images, device=args.device)
    networks = {name: pretrained(name, args.weights) for name in args.networks}
    rivals = args.peers if importlib.util.find_spec("torch_pruning") else []
    table = rows(
        networks, images, args.amounts, args.seeds, args.samples, args.criteria, args.keep, rivals, args.recoveries,
        not args.finished,
    )  # fmt: skip
    dense = {name: accuracy(network, images) for name, network in networks.items()}
    write(page(table, dense, args.images, args.samples), args.out)
    if args.figure:
        figure(table, args.networks[0], dense[args.networks[0]], args.figure)
    print(f"Written: {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

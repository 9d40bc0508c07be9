"""How accurate a compacted network becomes when it is trained on: CIFAR-10, a fixed number of epochs.

    python benchmarks/finetuning.py --data data/cifar10.npz --weights FOLDER [--times 2.1] [--seed 0]

The network is pruned in one call without training, compacted, saved, and loaded again into a fresh dense one; only then
it trains, with the dense network as its teacher. With ``--peers``, the best of Torch-Pruning's networks at the same
multiply-accumulates trains in its place, in the same way. Networks are pruned on the CPU and train on ``--device``. A
run writes a checkpoint after each epoch and goes on where it was stopped; finished runs are kept in a file, of which
the page's section is made.
"""

from __future__ import annotations

import argparse
import copy
import fnmatch
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pytorch_lightning import LightningModule, Trainer, seed_everything
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import engine
from benchmarks.accuracy import PEERS, Images, accuracy, macs, peer, write, writes_stream
from benchmarks.cifar_resnets import normalised, pretrained
from lightning_compress import Distillation, prune

ROOT = Path(__file__).resolve().parents[1]
START, END = "<!-- finetuning.py -->", "<!-- /finetuning.py -->"

PRUNING = ("network", "times", "seed", "peers", "samples", "scope", "stream", "criterion")
KEYS = (*PRUNING, "epochs", "lr", "weight", "layers", "batch", "precision", "device", "images")
OPTIONS = (
    "lr",
    "weight",
    "layers",
    "batch",
    "precision",
    "samples",
    "device",
    "images",
)  # rows of a kind have the same
SHOWN = ("lr", "weight")  # in the table, even where they are the same for all

Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Epoch:
    """Shuffled training images in batches, each shifted by up to four pixels and every other one mirrored.

    Attributes:
        images: (N, 40, 40, 3) bytes: images with a border of four pixels.
        labels: (N,) classes.
        seed: of the order, the shifts and the mirroring.
        batch: images in a batch; those that are left over are not used.
    """

    images: Tensor
    labels: Tensor
    seed: int
    batch: int

    def __len__(self) -> int:
        return len(self.labels) // self.batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen, rows, columns in zip(*(part.to(self.images.device) for part in self._places()), strict=True):
            pixels = self.images[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]
            yield normalised(pixels), self.labels[chosen]

    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return which images each batch has, and which of their rows and columns: all at once, to move them once."""
        draw, steps = np.random.default_rng(self.seed), len(self)
        chosen = draw.permutation(len(self.labels))[: steps * self.batch].reshape(steps, self.batch)
        rows, columns = draw.integers(0, 9, (2, steps, self.batch, 1)) + np.arange(32)
        mirrored = draw.integers(0, 2, (steps, self.batch), bool)
        columns[mirrored] = columns[mirrored, ::-1]
        return torch.from_numpy(chosen), torch.from_numpy(rows), torch.from_numpy(columns)


class Replayed(nn.Module):
    """A network without gradients whose ops a CUDA graph replays: small networks wait for Python otherwise.

    Args:
        net: the network; all of its inputs have one shape.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self._graph: torch.cuda.CUDAGraph | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return what the network does, in memory that the next call writes to."""
        if self._graph is None:
            self._x = x.clone()
            self.net(self._x)  # chooses algorithms, which the recording must not
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._out = self.net(self._x)
        self._x.copy_(x)
        self._graph.replay()
        return self._out


def replayed(net: nn.Module, layers: str) -> list[str]:
    """Return the paths of the modules that CUDA graphs replay: the layers that are compared, or the whole network.

    A graph replays what is inside of a module, so that only its own outputs can be compared.
    """
    return fnmatch.filter((path for path, _ in net.named_modules()), layers)


def with_graphs(net: nn.Module, layers: str) -> nn.Module:
    """Return a network without gradients whose parts are replayed."""
    if not layers:
        return Replayed(net)
    for path in replayed(net, layers):
        net.set_submodule(path, Replayed(net.get_submodule(path)))
    return net


def inputs_of(parts: Sequence[nn.Module], net: nn.Module, x: Tensor) -> list[Tensor]:
    """Return a tensor like the one that each part of a network is called with, with gradients where that has them."""
    inputs: dict[nn.Module, Tensor] = {}
    hooks = [part.register_forward_pre_hook(lambda part, args: inputs.update({part: args[0]})) for part in parts]
    net(x)
    for hook in hooks:
        hook.remove()
    return [inputs[part].detach().clone().requires_grad_(inputs[part].requires_grad) for part in parts]


class Classifier(LightningModule):
    """A network that trains at one cycle of the learning rate, and is tested after each epoch.

    Args:
        net: the network.
        images: to test on.
        train: training images with their border, and their labels.
        options: of the command.
    """

    def __init__(
        self,
        net: nn.Module,
        images: Images,
        train: tuple[Tensor, Tensor],
        options: argparse.Namespace,
    ) -> None:
        super().__init__()
        self.net, self.images, self.train_images, self.options = net, images, train, options
        self.curve: list[float] = []
        self.seconds, self._start = 0.0, 0.0

    def train_dataloader(self) -> Epoch:
        """Return the batches of this epoch, the same whenever the run goes on."""
        seed = 1000 * self.options.seed + self.trainer.current_epoch
        return Epoch(*self.train_images, seed, self.options.batch)

    def configure_optimizers(self) -> Any:
        """Return SGD with Nesterov's momentum, and one cycle."""
        optimizer = torch.optim.SGD(self.parameters(), self.options.lr, 0.9, weight_decay=5e-4, nesterov=True)
        steps = int(self.trainer.estimated_stepping_batches)
        cycle = OneCycleLR(optimizer, self.options.lr, steps, pct_start=0.1, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.net(x.contiguous(memory_format=torch.channels_last))

    def training_step(self, batch: tuple[Tensor, Tensor], _index: int) -> Tensor:
        """Return the cross entropy."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def _clock(self) -> float:
        """Return the seconds of this process on the CPU; of the wall's clock where the model is on another device."""
        return time.process_time() if self.device.type == "cpu" else time.perf_counter()

    def on_train_start(self) -> None:
        """Record graphs of the forward and the backward pass, which leaves the norms' statistics as they are."""
        if self.options.graphs:
            x = torch.randn(self.options.batch, 3, 32, 32, device=self.device)
            state = copy.deepcopy(self.net.state_dict())
            parts = tuple(self.net.get_submodule(name) for name in replayed(self.net, self.options.layers))
            inputs = inputs_of(parts, self.net, x.contiguous(memory_format=torch.channels_last))
            torch.cuda.make_graphed_callables(parts, tuple((x,) for x in inputs))
            self.net.load_state_dict(state)

    def on_train_epoch_start(self) -> None:
        """Start the clock."""
        self._start = self._clock()

    def on_train_epoch_end(self) -> None:
        """Test, outside of the time that counts."""
        self.seconds += self._clock() - self._start
        self.net.eval()
        self.curve.append(accuracy(self.net, self.images))
        self.net.train()
        print(f"epoch {len(self.curve)}: {self.curve[-1]:.2f} % after {self.seconds / 60:.1f} minutes", flush=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what was measured."""
        checkpoint["measured"] = {"curve": self.curve, "seconds": self.seconds}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on measuring."""
        self.curve, self.seconds = checkpoint["measured"]["curve"], checkpoint["measured"]["seconds"]


def compacted(dense: nn.Module, images: Images, options: argparse.Namespace) -> tuple[str, nn.Module]:
    """Return who pruned the network, and the network, read from a file that is written once."""
    path = options.folder / f"{_name(options, PRUNING)}.pt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(_pruned(dense, images, options), path)
    by, saved = torch.load(path, weights_only=not options.peers)
    if options.peers:
        return by, saved
    fresh = engine.compactable(pretrained(options.network, options.weights))
    fresh.load_state_dict(saved)
    return by, fresh


def _pruned(dense: nn.Module, images: Images, options: argparse.Namespace) -> tuple[str, Any]:
    """Return who pruned the network, and its state; of Torch-Pruning's networks, which no class builds, the module."""
    amount, (batches, labels) = 1 - 1 / options.times, images.sample(options.seed, options.samples)
    if options.peers:
        pairs = list(zip(batches, labels, strict=True))
        return max(_rivals(dense, images, options.peers, amount, pairs), key=lambda rival: accuracy(rival[1], images))
    kept = [] if options.stream == "pruned" else [n for n, m in dense.named_modules() if writes_stream(n, m)]
    chosen: dict[str, Any] = {"criterion": options.criterion, "scope": options.scope, "samples": options.samples}
    small = prune(dense, batches[0][:2], amount, data=batches, exclude=kept, **chosen)
    by = "lightning-compress" + ("" if options.criterion == "reconstruction" else f", {options.criterion}")
    by += ", within groups" if options.scope == "group" else ""
    return by + (", stream kept" if kept else ""), small.state_dict()


def _rivals(
    dense: nn.Module, images: Images, importances: Sequence[str], amount: float, pairs: list[tuple[Tensor, Tensor]]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield Torch-Pruning's networks, with and without the residual stream in its groups, with batch norms anew."""
    for importance in importances:
        for stream in (True, False):
            small = peer(dense, importance, amount, stream, pairs)
            if small is not None:
                engine.recalibrate_norms(small, [x for x, _ in pairs])
                yield f"Torch-Pruning, {importance}{'' if stream else ', stream kept'}", small


def trained(options: argparse.Namespace) -> Row:
    """Train one network on, from where an earlier run of the same options was stopped.

    Returns:
        Who pruned it, what is left of the multiply-accumulates, the accuracies before training and after each epoch,
        and the seconds that training took: of the CPU, or of the wall's clock on another device.
    """
    seed_everything(options.seed)
    images = Images.load(options.data, options.images, device=options.device)
    dense = pretrained(options.network, options.weights)
    folder = options.folder / _name(options, KEYS)
    by, small = compacted(dense, images, options)
    x = images.train[:2]
    row = {"by": by, "left": macs(small, x) / macs(dense, x), "before": accuracy(small, images)}
    print(f"{by}: {row['left']:.3f} of the multiply-accumulates, {row['before']:.2f} %", flush=True)
    with np.load(options.data) as arrays:
        labels = torch.from_numpy(arrays["y_train"].astype(np.int64).reshape(-1)).to(options.device)
        bordered = F.pad(torch.from_numpy(arrays["x_train"]).to(options.device), (0, 0, 4, 4, 4, 4))
    module = Classifier(small.train().to(memory_format=torch.channels_last), images, (bordered, labels), options)
    teacher = dense.to(memory_format=torch.channels_last)
    teacher = with_graphs(teacher, options.layers) if options.graphs else teacher
    trainer = Trainer(
        accelerator=options.device, devices=1, precision=options.precision,
        max_epochs=options.epochs, logger=False,
        enable_progress_bar=False, enable_model_summary=False, reload_dataloaders_every_n_epochs=1,
        callbacks=[Distillation(teacher, weight=options.weight, layers=options.layers or None, model="net"),
                   ModelCheckpoint(folder, save_last=True, save_top_k=0, save_on_train_epoch_end=True)],
    )  # fmt: skip
    last = folder / "last.ckpt"
    trainer.fit(module, ckpt_path=last if last.exists() else None, weights_only=False)
    about = {key: getattr(options, key) for key in KEYS}
    return {**about, **row, "curve": module.curve, "seconds": module.seconds}


def _name(options: argparse.Namespace, keys: Sequence[str]) -> str:
    """Return options as the name of a file."""
    values = [getattr(options, key) for key in keys]
    return "-".join("+".join(value) or "ours" if isinstance(value, list) else str(value) for value in values)


def _kind(row: Row) -> tuple[Any, ...]:
    """Return what rows have in common that differ in their seeds alone."""
    return tuple(row[key] for key in ("network", "times", "by", "epochs", *OPTIONS))


def _about(row: Row, options: Sequence[str]) -> list[str]:
    """Return what a row is of, with these options."""
    return [row["network"], f"{row['times']:g}", row["by"], str(row["epochs"]), *(_plain(row[key]) for key in options)]


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"


def _line(own: Sequence[Row], options: Sequence[str]) -> str:
    """Return the line of the table for rows that differ in their seeds alone."""
    last, before = [row["curve"][-1] for row in own], statistics.mean(row["before"] for row in own)
    spread = f" ± {statistics.stdev(last):.2f}" if len(last) > 1 else ""
    minutes, seeds = statistics.mean(row["seconds"] for row in own) / 60, ", ".join(f"{value:.2f}" for value in last)
    cells = [f"{before:.2f}", seeds, f"{statistics.mean(last):.2f}{spread}", f"{minutes:.1f}"]
    return "| " + " | ".join(_about(own[0], options) + cells) + " |"


def page(table: list[Row]) -> str:
    """Return the section of the page that the rows make: a line for each set of options that was tried."""
    kinds = dict.fromkeys(map(_kind, table))
    groups = [sorted((row for row in table if _kind(row) == kind), key=lambda row: row["seed"]) for kind in kinds]
    options = [key for key in OPTIONS if key in SHOWN or len({row[key] for row in table}) > 1]
    same = ", ".join(f"{key} {_plain(table[0][key])}" for key in OPTIONS if key not in options)
    lines = [
        START, "", "Trained on with the dense network as the teacher (the weight of its term is in the table; with 0 "
        "there is none) and one cycle of the learning rate up to lr. Accuracy in % on the test images, of the last "
        "epoch, by seed. Minutes are those of one core, or of the wall's clock on a GPU. Every finished run is in the "
        f"table. Options that are the same for all: {same}.", "",
        f"| network | times fewer MACs | by | epochs | {' | '.join(options)} | before | by seed | mean | minutes |",
        f"|---|---:|---|---:|{'---:|' * len(options)}---:|---|---:|---:|",
    ]  # fmt: skip
    lines += [_line(own, options) for own in groups]
    lines += ["", "After each epoch:", ""]
    names = ("{}", "{} times fewer", "{}", "epochs {}", *(f"{key} {{}}" for key in options))
    for row in itertools.chain.from_iterable(groups):
        curve = ", ".join(f"{value:.2f}" for value in row["curve"])
        about = [name.format(value) for name, value in zip(names, _about(row, options), strict=True)]
        lines.append(f"- {', '.join(about)}, seed {row['seed']}: {curve}")
    return "\n".join([*lines, "", END])


def main() -> int:
    """Train what the options say, and write the section of all finished rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="cifar10.npz: x_train, y_train, x_test, y_test")
    parser.add_argument("--weights", type=Path, required=True, help="folder with resnet20-*.th and resnet56-*.th")
    parser.add_argument("--network", default="resnet56")
    parser.add_argument("--times", type=float, default=2.1, help="fewer multiply-accumulates")
    parser.add_argument("--seed", type=int, default=0, help="of the calibration images and of the training")
    parser.add_argument("--peers", nargs="*", default=[], choices=PEERS, help="the best of these, instead of ours")
    parser.add_argument("--scope", default="global", choices=("global", "group"), help="where ours ranks channels")
    parser.add_argument("--stream", default="pruned", choices=("pruned", "kept"), help="the residual stream, in ours")
    parser.add_argument("--criterion", default="reconstruction", choices=("reconstruction", "l2"), help="of ours")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--weight", type=float, default=1.0, help="of the teacher's term")
    parser.add_argument("--layers", default="", help="pattern of layers whose outputs follow the teacher's: layer?.?")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="to train and to test on")
    parser.add_argument("--samples", type=int, default=1024, help="images to calibrate on")
    parser.add_argument("--graphs", action="store_true", help="with --device cuda: replay CUDA graphs, which is faster")
    parser.add_argument("--images", type=int, default=10_000, help="test images")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "finetuning", help="checkpoints of the runs")
    parser.add_argument("--keep", type=Path, default=ROOT / "build" / "finetuning.jsonl", help="finished rows")
    parser.add_argument("--finished", action="store_true", help="train nothing, write what is finished")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results.md", help="the page to write into")
    options = parser.parse_args()
    if options.graphs and options.device != "cuda":
        parser.error("--graphs replays CUDA graphs: add --device cuda, or leave it out.")
    lines = options.keep.read_text().splitlines() if options.keep.exists() else []
    table = [{"criterion": "reconstruction", "layers": ""} | json.loads(line) for line in lines]
    if options.finished and not table:
        parser.error(f"No run is finished in {options.keep}.")
    job = [getattr(options, key) for key in KEYS]
    if not options.finished and job not in [[row[key] for key in KEYS] for row in table]:
        table.append(trained(options))
        options.keep.parent.mkdir(parents=True, exist_ok=True)
        with options.keep.open("a") as file:
            file.write(json.dumps(table[-1]) + "\n")
    write(page(table), options.out, "CIFAR-10, trained on")
    print(f"Written: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The images that the examples learn from, held in memory: digits (in scikit-learn, no files), MNIST and CIFAR-10."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torchvision
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn import functional as F
from torch.utils.data import TensorDataset

ARRAYS = ("x_train", "y_train", "x_test", "y_test")


class Data(NamedTuple):
    """Images as floats in [-0.5, 0.5], (N, channels, size, size), with their labels (N,)."""

    train: TensorDataset
    test: TensorDataset

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Shape of one image, (channels, size, size)."""
        return tuple(self.test.tensors[0].shape[1:])


def digits(folder: Path, download: bool) -> Data:
    """1 797 real 8x8 digits that come with scikit-learn, doubled in size; a third of them is the test set."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16 - 0.5
    pixels = F.interpolate(pixels, size=(16, 16), mode="bilinear", align_corners=False)
    targets = torch.tensor(labels, dtype=torch.long)
    train, test = train_test_split(np.arange(len(targets)), test_size=1 / 3, stratify=labels, random_state=0)
    return Data(TensorDataset(pixels[train], targets[train]), TensorDataset(pixels[test], targets[test]))


def mnist(folder: Path, download: bool) -> Data:
    """MNIST in torchvision's own files, FOLDER/MNIST/raw."""
    parts = [torchvision.datasets.MNIST(str(folder), train=train, download=download) for train in (True, False)]
    return Data(*(TensorDataset(part.data[:, None] / 255 - 0.5, part.targets) for part in parts))


def cifar10(folder: Path, download: bool) -> Data:
    """CIFAR-10 from FOLDER/cifar10.npz (x_train, y_train, x_test, y_test) or its parts, else in torchvision's files."""
    archives = sorted(folder.glob("cifar10*.npz"))
    if archives:
        pieces_by_name: dict[str, list[np.ndarray]] = {name: [] for name in ARRAYS}
        for archive in archives:
            with np.load(archive) as arrays:
                for name in arrays:
                    pieces_by_name[name].append(arrays[name])
        whole = {name: np.concatenate(pieces) for name, pieces in pieces_by_name.items() if pieces}
        if set(whole) != set(ARRAYS) or len(whole["x_train"]) != len(whole["y_train"]):
            raise SystemExit(f"The files {folder}/cifar10*.npz are not all there, or hold something twice.")
        return Data(*(colour(whole[f"x_{name}"], whole[f"y_{name}"]) for name in ("train", "test")))
    parts = [torchvision.datasets.CIFAR10(str(folder), train=train, download=download) for train in (True, False)]
    return Data(*(colour(part.data, np.asarray(part.targets)) for part in parts))


def split(folder: Path, images: int = 18_000) -> list[Path]:
    """Write FOLDER/cifar10.npz as parts of at most ``images`` images, 3 KB each, into FOLDER/parts."""
    target, written = folder / "parts", []
    target.mkdir(exist_ok=True)
    with np.load(folder / "cifar10.npz") as arrays:
        for name in ("train", "test"):
            x, y = arrays[f"x_{name}"], arrays[f"y_{name}"]
            for start in range(0, len(y), images):
                written.append(target / f"cifar10-{name}-{start // images}.npz")
                part = slice(start, start + images)
                np.savez(written[-1], **{f"x_{name}": x[part], f"y_{name}": y[part]})
    return written


def colour(images: np.ndarray, labels: np.ndarray) -> TensorDataset:
    """Bytes (N, height, width, 3) become floats (N, 3, height, width)."""
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous() / 255 - 0.5
    return TensorDataset(pixels, torch.from_numpy(labels.astype(np.int64)))


SETS: dict[str, Callable[[Path, bool], Data]] = {"digits": digits, "mnist": mnist, "cifar10": cifar10}


def load(name: str, folder: Path, download: bool = False, limit: int | None = None) -> Data:
    """Load a data set by name.

    Args:
        name: a key of ``SETS``.
        folder: where the files of mnist and cifar10 are; digits need none.
        download: let torchvision fetch what is missing there.
        limit: number of training images, and of test images, to keep; None keeps all.

    Raises:
        SystemExit: the files are not there, with a sentence that says what to do.
    """
    try:
        data = SETS[name](folder, download)
    except RuntimeError as error:  # what torchvision raises where a file is missing or broken
        raise SystemExit(
            f"No usable {name} files in {folder}: name their folder by --data-dir, or --download."
        ) from error
    return Data(*(TensorDataset(*(tensor[:limit] for tensor in part.tensors)) for part in data))


if __name__ == "__main__":
    for path in split(Path(sys.argv[1] if len(sys.argv) > 1 else "data")):
        print(path, f"{path.stat().st_size / 1e6:.0f} MB")

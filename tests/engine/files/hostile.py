"""Hostile files, built from the grammar of the format: ``python -m tests.engine.files.hostile SEED COUNT``.

Each file is read in the ways in which files are read. What has to hold: it takes at most 64 MB and four times the
file, and two seconds of a core; nothing in it is executed; what loads is what was sealed, with nothing set that no
compaction sets; and where it does not load, the module is as it was.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import os
import pickle
import random
import struct
import sys
import tempfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import engine
from engine.errors import EngineError
from engine.files.archive import read_bytes
from engine.files.checkpoint import (
    KEY,
    content_of,
    is_compacted_content,
    is_compacted_file,
    load_compacted_state,
    read_any,
    seal,
)
from engine.files.portable import to_json
from engine.numbers.integers import integers, is_settable
from engine.surgery.kinds import KINDS
from tests.engine.attentions import Attention, without_heads
from tests.engine.exactness import randomised

MEMORY, SECONDS = 64 * 2**20, 2.0
REMAINING = {("mixing", "heads"): 2}  # what is left of it, which the plan says by pins: the same function either way
RUNS_CODE = ("os.system", "os.mkdir", "os.remove", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect")


class Target(nn.Module):
    """A small network whose plan has every kind of entry."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.mixing = nn.Linear(5, 8), nn.LayerNorm(8), Attention()
        self.attention = nn.MultiheadAttention(8, 4, batch_first=True)
        self.up, self.down = nn.Linear(8, 512), nn.Linear(512, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores per token."""
        x = self.mixing(self.norm(self.embed(x)))
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.down(torch.relu(self.up(x)))


def compacted() -> Target:
    """The network, with attention heads, neurons and channels under a norm removed."""
    model = randomised(Target())
    heads = without_heads(nn.Linear(8, 24), [1, 2])
    rows = (torch.arange(512) % 3 > 0).double()
    dead = (torch.arange(8) > 1).double()
    masks = {
        "embed": {"weight": dead.view(8, 1).expand(8, 5), "bias": dead},
        "norm": {"weight": dead, "bias": dead},
        "mixing.qkv": heads,
        "attention": {"in_proj_weight": heads["weight"], "in_proj_bias": heads["bias"]},
        "up": {"weight": rows.view(512, 1).expand(512, 8), "bias": rows},
    }
    engine.ModelSpeedup(model, torch.randn(2, 4, 5).double(), masks).speedup_model()
    return model


# ---------------------------------------------------------------- archives


def records(data: bytes) -> dict[str, bytes]:
    """The records of an archive, by name."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def archive(content: dict[str, bytes], chance: random.Random | None = None, front: bytes = b"") -> bytes:
    """An archive, behind what is in front; with ``chance``, one whose directory and headers disagree somewhere."""
    body, directory = front, b""
    odd = chance.choice(list(content)) if chance else None
    for name, data in content.items():
        raw, size, offset = name.encode(), len(data), len(body)
        sizes, listed, method, flags = [size, size], [size, size], [0, 0], [0, 0]
        if name == odd and chance:
            kind = chance.randrange(7)
            for values in (sizes, listed) if kind == 0 else (sizes,) if kind == 1 else (listed,) if kind == 2 else ():
                values[:] = [chance.choice((0, size - 1, size + 1, 2**31, 2**32 - 1)) % 2**32] * 2
            method[chance.randrange(2)] = 8 if kind == 3 else 0
            flags[chance.randrange(2)] = chance.choice((1, 8, 2048)) if kind == 4 else 0
            offset = chance.randrange(2**32) if kind == 5 else offset
            raw = chance.choice((b"other/data.pkl", raw.upper(), b"", b"../" + raw)) if kind == 6 else raw
        crc = zlib.crc32(data)
        body += struct.pack("<4s5H3L2H", b"PK\3\4", 20, flags[0], method[0], 0, 0, crc, *sizes, len(name), 0)
        body += name.encode() + data
        head = (b"PK\1\2", 20, 20, flags[1], method[1], 0, 0, crc, *listed, len(raw), 0, 0, 0, 0, 0, offset)
        directory += struct.pack("<4s6H3L5H2L", *head) + raw
    count = len(content)
    return body + directory + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(directory), len(body), 0)


class Code:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


def old_file() -> bytes:
    """A file as torch wrote them before there were archives, which runs code."""
    file = io.BytesIO()
    torch.save({"state_dict": {}, "code": Code()}, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


def with_other_formats(content: dict[str, bytes], chance: random.Random) -> bytes:
    """An archive that is in order, and in it what another reader takes for a file of its own."""
    if chance.random() < 0.5:
        return archive(content, front=old_file() + bytes(chance.choice((0, 1, 64))))
    folder = next(iter(content)).partition("/")[0]
    names = ("constants.pkl", "code/__torch__.py", "data.pkl.py", ".data/extern_modules", "model.json")
    return archive({**content, f"{folder}/{chance.choice(names)}": pickle.dumps(Code(), 2)})


def damaged_archive(good: bytes, chance: random.Random) -> bytes:
    """A good archive with something wrong about its directories, records, or length."""
    content, kind = records(good), chance.randrange(9)
    if kind == 8:
        return with_other_formats(content, chance)
    if kind == 0:
        return archive(content, chance)
    if kind == 1:  # two directories
        other = {**content, "archive/data.pkl": pickle.dumps({"state_dict": {}}, 2)}
        return archive(other) + (archive(content) if chance.random() < 0.5 else good)
    if kind == 2:
        file = io.BytesIO()
        with warnings.catch_warnings(), zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
            warnings.simplefilter("ignore")
            for name, data in content.items():
                packed.writestr(name, data if chance.random() < 0.5 else bytes(chance.choice((10**6, 5 * 10**7))))
        return file.getvalue()
    if kind == 3:
        file = io.BytesIO()
        with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as twice:
            warnings.simplefilter("ignore")
            for name, data in [*content.items(), *chance.sample(list(content.items()), 2)]:
                twice.writestr(name, data)
        return file.getvalue()
    if kind == 4:
        return good[: chance.randrange(len(good))]
    if kind == 5:
        return good + bytes(chance.randrange(1, 200))
    if kind == 6:  # any of the fields at the end
        place = len(good) - chance.randrange(1, 98)
        return good[:place] + bytes([chance.randrange(256)]) + good[place + 1 :]
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as many:
        for number in range(chance.choice((1000, 20_000))):
            many.writestr(f"archive/data/{number}", b"")
        many.writestr("archive/data.pkl", pickle.dumps({}, 2))
    return file.getvalue()


# ---------------------------------------------------------------- pickles


class Raw:
    """Instructions of a pickle, put together by hand."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def number(self) -> bytes:
        """An integer of any size."""
        pick = self.chance.choice((0, 1, 3, 255, 65535, 2**31 - 1, -1, 2**40, 2**62, 10**400))
        if 0 <= pick < 256:
            return b"K" + bytes([pick])
        if -(2**31) <= pick < 2**31:
            return b"J" + struct.pack("<i", pick)
        raw = pick.to_bytes(pick.bit_length() // 8 + 1, "little", signed=True)
        return (b"\x8a" + bytes([len(raw)]) if len(raw) < 256 else b"\x8b" + struct.pack("<i", len(raw))) + raw

    def text(self, value: str) -> bytes:
        """A string."""
        raw = value.encode()
        return b"X" + struct.pack("<I", len(raw)) + raw

    def tuple(self, *items: bytes) -> bytes:
        """Items as a tuple."""
        return b"(" + b"".join(items) + b"t"

    def name(self, name: str) -> bytes:
        """A global."""
        module, _, own = name.rpartition(".")
        return b"c" + module.encode() + b"\n" + own.encode() + b"\n"

    def call(self, name: str, *items: bytes) -> bytes:
        """A global that is called."""
        return self.name(name) + self.tuple(*items) + b"R"

    def storage(self, count: bytes | None = None, kind: str = "torch.FloatStorage") -> bytes:
        """A reference to a storage of four numbers, or of as many as is claimed."""
        key, where = self.text(self.chance.choice("000012")), self.text("cpu")
        return self.tuple(self.text("storage"), self.name(kind), key, where, count or b"K\x04") + b"Q"

    def tensor(self) -> bytes:
        """A tensor with any shape and strides over a storage."""
        numbers = [[self.number() for _ in range(self.chance.randrange(3))] for _ in range(2)]
        if self.chance.random() < 0.5:
            numbers = [[b"J" + struct.pack("<i", 10**9)], [b"K\x00"]]
        kind = self.chance.choice(("torch.FloatStorage", "torch.LongStorage", "torch.storage.UntypedStorage"))
        storage = self.storage(self.chance.choice((None, self.number())), kind)
        parts = storage, self.number(), self.tuple(*numbers[0]), self.tuple(*numbers[1]), b"\x89"
        return self.call("torch._utils._rebuild_tensor_v2", *parts, self.call("collections.OrderedDict"))

    def bomb(self) -> bytes:
        """A few bytes that stand for many."""
        size = self.chance.choice((1000, 60_000))
        long = self.text("x" * size)
        again = self.call("_codecs.encode", b"h\x01", self.text("latin1"))
        chunks = [
            lambda: long + b"q\x010]" + b"(" + again * size + b"e",
            lambda: b"]q\x01" + b"(" + b"h\x01" * size + b"e",  # a list in itself
            lambda: b"]" * size + b"a" * (size - 1),
            lambda: b"]q\x01" + b"".join(b"]q%c(h%ch%ce" % (n + 1, n, n) for n in range(1, 200)),
            lambda: b"Nr" + struct.pack("<I", 2**31),
            lambda: b"(" * size,
            lambda: b"](" + b"}" * size + b"e",
            lambda: b"](" + b"N\x85" * size + b"e",
            lambda: b"B" + struct.pack("<I", 2**31) + b"x",
            lambda: b"X" + struct.pack("<I", 2**32 - 1) + b"x",
            lambda: b"\x8e" + struct.pack("<Q", 2**40) + b"x",
            lambda: b"\x95" + struct.pack("<Q", 2**40) + b"N",
            lambda: b"}(" + b"".join(self.colliding(n) + b"N" for n in range(size // 20)) + b"u",
            lambda: self.call("builtins.bytearray", self.number()),
            lambda: self.call("builtins.set", b"](" + b"".join(map(self.colliding, range(size // 20))) + b"e"),
            lambda: b"](" + b"".join(self.tensor() for _ in range(size // 200)) + b"e",
            lambda: self.tensor() + b"q\x01](" + self.call("torch.tensor", b"h\x01") * 50 + b"e",
            lambda: self.call("torch.Size", self.tuple(*[self.number() for _ in range(9)])),
        ]
        return self.chance.choice(chunks)()

    def colliding(self, number: int) -> bytes:
        """One of many keys with one hash."""
        raw = (number * (2**61 - 1)).to_bytes(12, "little")
        return b"\x8a" + bytes([len(raw)]) + raw

    def called(self) -> bytes:
        """Any global that torch's own reader lets pass, or that runs code, with arguments of all kinds."""
        allowed = sorted(torch._weights_only_unpickler._get_allowed_globals())  # type: ignore[attr-defined]
        code = ["os.system", "os.mkdir", "builtins.eval", "builtins.exec", "subprocess.Popen", "builtins.getattr"]
        chosen = self.chance.choice(allowed if self.chance.random() < 0.8 else code)
        pool = (self.number, self.tensor, lambda: self.text("mkdir ran"), lambda: b"N", lambda: b"}", self.storage)
        extra = (lambda: self.name(self.chance.choice(allowed)), lambda: self.tuple(self.number()), self.bomb)
        items = [self.chance.choice((*pool, *extra))() for _ in range(self.chance.randrange(7))]
        end = self.chance.choice((b"", b"}b", self.tuple(b"}", b"}") + b"b"))
        return self.name(chosen) + self.tuple(*items) + self.chance.choice((b"R", b"\x81", b"")) + end

    def pickle(self) -> bytes:
        """A checkpoint with something of these in it."""
        part = self.chance.choice((self.bomb, self.called, self.tensor))()
        where = self.chance.choice(("state_dict", KEY, "hyper_parameters"))
        return b"\x80\x02}(" + self.text(where) + part + b"u."


def hostile_pickle(good: bytes, chance: random.Random) -> bytes:
    """An archive that is in order, with a pickle that is not."""
    content = records(good)
    names = {name for name in content if name.rpartition("/")[2] == "data.pkl"}
    return archive({name: Raw(chance).pickle() if name in names else data for name, data in content.items()})


# ---------------------------------------------------------------- plans


def values(chance: random.Random) -> Any:
    """Anything that may stand where something else belongs."""
    far = torch.zeros(1, dtype=torch.int64).expand(chance.choice((10**6, 10**9)))
    tensors = [
        far,
        torch.zeros(1).double().expand(far.shape),
        torch.ones(3),
        torch.tensor([5, -1]),
        torch.zeros(0),
        torch.ones(2, 2).bool(),
        None,
    ]
    if chance.random() < 0.2:
        tensors += [torch.full((2**17,), 255, dtype=torch.uint8), torch.full((2**21,), 255, dtype=torch.uint8)]
    plain = [
        0,
        -1,
        1,
        2,
        10**9,
        2**62,
        10**30,
        0.5,
        float("nan"),
        float("inf"),
        True,
        "",
        "embed",
        "0",
        "automatic_optimization",
    ]
    nested = [[], {}, [[]] * 1000, {"a": {}}, [1, 2], (3,), ["x"] * 1000]
    return chance.choice([chance.choice(tensors[:-1]), chance.choice(plain), chance.choice(nested), None])


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All places in nested containers."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def hostile_exchange(chance: random.Random) -> dict[str, Any]:
    """An exchange of any kind, of which each field is what belongs there, or anything."""
    names = ["embed", "norm", "mixing", "mixing.qkv", "attention", "attention.out_proj", "up", "down", "gone", ""]
    pin = {"function": "forward", "method": "forward", "source": "0" * 16, "line": 3, "column": 9, "operator": ""}
    pin |= {"position": chance.choice((0, 1, -1, 10**6)), "value": chance.choice((1, 2, 0.5, 2**31 - 1))}
    if chance.random() < 0.5:
        pin[chance.choice(list(pin))] = values(chance)
    kind, size = chance.choice(KINDS), chance.choice((8, 512))
    kept, side = chance.choice((1, size // 2, size)), [torch.ones(1, size, dtype=torch.bool), [2, size]]
    fields = {
        "pins": [pin] * chance.choice((1, 2, 300)),
        "size": size,
        "kept": kept,
        "groups": chance.choice((1, 2, size)),
        "plain": chance.random() < 0.5,
        "dim": chance.choice((-1, 1, 2)),
        "table": torch.arange(size) % kept,
        "fill": chance.choice((None, torch.zeros(size - kept).double(), torch.ones(1).double())),
        "class_name": "Linear",
        "inputs": [side],
        "outputs": [side] * chance.choice((1, 1000)),
        "weights": {"weight": torch.ones(size, 1).bool()},
        "stored": {"weight": [size, 8], "bias": [size]},
    }
    own = {field.name for field in dataclasses.fields(kind)}
    state = {"kind": kind.kind, "module": chance.choice(names), **{key: fields[key] for key in fields if key in own}}
    if chance.random() < 0.5:
        state[chance.choice(list(state))] = values(chance)
    return state


def hostile_plan(good: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A checkpoint with other plans, sealed again."""
    tensors = {id(v): v for holder, key in places(good) if isinstance(v := holder[key], Tensor)}
    made: dict[str, Any] = copy.deepcopy(good, dict(tensors))
    entry = made[KEY]["compacted"][""]
    plan, kind = entry["plans"][0], chance.randrange(11)
    names = ["embed", "norm", "mixing", "mixing.qkv", "attention", "up", "gone", ""]
    if kind < 3:
        for holder, key in chance.sample(list(places(entry)), chance.randrange(1, 4)):
            if chance.random() < 0.8:
                holder[key] = values(chance)
            else:
                holder.pop(key) if chance.random() < 0.5 and isinstance(holder, dict) else None
    elif kind == 3:  # counts
        count, what = (
            chance.choice((900, 2000, 20_000)),
            chance.choice(("plans", "notes", "exchanges", "slices", "entries")),
        )
        empty = {**{name: type(part)() for name, part in plan.items() if name != "format"}, "format": plan["format"]}
        if what == "plans":
            entry["plans"], entry["certificates"] = [empty] * count, [None] * count
        elif what == "entries":
            made[KEY]["compacted"] |= {f"m{number}": entry for number in range(count)}
        elif what == "slices":
            cut = plan["slices"]["up.weight"]["cuts"]
            plan["slices"]["up.weight"]["cuts"] = cut * count
        else:
            plan[what] = (plan[what] or ["note"]) * count
    elif kind == 4:
        table = torch.randint(0, 6, (chance.choice((8, 10**5)),))
        fill = chance.choice((torch.zeros(1).double(), torch.zeros(1).double().expand(10**8)))
        layer = {"module": chance.choice(names), "dim": chance.choice((-1, 2, 99)), "kept": 6, "table": table}
        plan["exchanges"] = [{**layer, "kind": "spread", "fill": fill}] * chance.randrange(1, 4)
    elif kind == 5:
        name = chance.choice(names)
        keys = ("out_features", "heads", "automatic_optimization", "training", "eps", "_version", "in_features")
        key = chance.choice(keys)
        plan["attributes"] = {**plan["attributes"], name: {key: chance.choice((0, 1, 4, -1, 10**9, 2**70, "x", None))}}
    elif kind == 6:
        good_pins = [pin for exchange in plan["exchanges"] if exchange["kind"] == "pins" for pin in exchange["pins"]]
        for pin in good_pins:  # none before Python 3.11, which does not say where in a line a call is
            pin[chance.choice(("value", "position", "line", "column", "function"))] = values(chance)
        plan["exchanges"] += [] if good_pins else [hostile_exchange(chance)]
    elif kind == 7:
        plan["exchanges"] = [hostile_exchange(chance) for _ in range(chance.choice((1, 2, 9)))]
    elif kind == 8:  # fewer of something over the same weights, or a number that counts nothing
        modules = {name: module for name, module in Target().named_modules() if integers(module)}
        for name in chance.sample(list(modules), chance.randrange(1, 4)):
            numbers = integers(modules[name])
            key = chance.choice(list(numbers))
            plan["attributes"].setdefault(name, {})[key] = max(numbers[key] // chance.choice((1, 2, 3, 4)), 0)
    elif kind == 9:  # what older versions wrote, and what newer ones may
        made[KEY]["version"], plan["format"] = (
            chance.choice((0, 1, 2, 3, 4, "3", None)),
            chance.choice((0, 1, 2, 3, 2.0)),
        )
        lists = ("pins", "widened", "headwise", "spread", "replaced")
        plan |= {name: [hostile_exchange(chance) for _ in range(chance.randrange(3))] for name in lists}
        made[KEY] |= {"plan": plan, "certificate": None, "target": chance.choice(names)}
    else:
        plan["exchanges"] += [chance.choice(plan["exchanges"])]
        bits = torch.full((chance.choice((64, 2**21)),), 255, dtype=torch.uint8)
        plan["slices"]["up.weight"] = {
            "before": [512, 8],
            "cuts": [{"dims": [0], "bits": bits, "sizes": [bits.numel() * 8]}],
        }
    try:
        return seal(made)
    except (RecursionError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return {**made, KEY: {**made[KEY], "sha256": None}}


def saved(checkpoint: Any) -> bytes:
    """What `torch.save` writes."""
    file = io.BytesIO()
    torch.save(checkpoint, file)
    return file.getvalue()


def hostile_text(chance: random.Random) -> str:
    """JSON with tensors that are not what they say, and numbers of any size."""
    shapes = ([10**9], [-1], [2**63], [0, 10**12], [1] * 1000, "3", None, [1.0])
    data = chance.choice(("", "AAAA", "A" * 10**6, "====", "\u1234", None, 3))
    tensor = {"__tensor__": [chance.choice(("int64", "float64", "bool", "object", None)), chance.choice(shapes), data]}
    plan = {"format": 2, "slices": {"up.weight": {"before": [512, 8], "cuts": [tensor] * chance.choice((1, 1000))}}}
    plan |= {"masks": tensor, "folds": [], "attributes": {}, "exchanges": [tensor], "notes": []}
    version = chance.choice(("3", "1e400", "NaN", "9" * 4000, "9" * 5000, "true"))
    content = json.dumps({"compacted": {"": {"plans": [plan], "certificates": [None]}}, "sha256": None})
    return f'{{"version": {version}, {content[1:]}'


def hostile_tensors(good: dict[str, Any], chance: random.Random) -> bytes:
    """A file of safetensors with something wrong in its header."""
    weights, header, data = good["state_dict"], {}, b""
    for name, value in weights.items():
        raw = value.contiguous().numpy().tobytes()
        header[name] = {"dtype": "F64", "shape": list(value.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    plans = hostile_plan(good, chance)[KEY]
    large = [t for holder, key in places(plans) if isinstance(t := holder[key], Tensor) and t.numel() > 10**6]
    text = chance.choice(("" if large else to_json(plans), "[" * 10**5, "[[],[]," * 10**5))
    header["__metadata__"] = {KEY: text or "{}"}
    if chance.random() < 0.2:
        lies = ({KEY: ["x"]}, {KEY: None}, {"format": 1}, [], "x", {KEY: hostile_text(chance)}, {"x" * 10**6: "y"})
        header["__metadata__"] = chance.choice(lies)
    if chance.random() < 0.7:
        name = chance.choice(list(weights))
        key = chance.choice(("dtype", "shape", "data_offsets"))
        header[name] = {**header[name], key: chance.choice(("F32", [10**9], [0, 10**12], [-1], [], None, [2**63]))}
    if chance.random() < 0.1:
        header |= {f"a{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(50_000)}
    raw = json.dumps(header).encode()
    length = len(raw) if chance.random() < 0.9 else chance.choice((0, 2**40, len(raw) + 1))
    return struct.pack("<Q", length) + raw + data


# ---------------------------------------------------------------- reading


def hostile_file(seed: int, good: dict[str, Any]) -> tuple[str, bytes]:
    """The file of a seed, and its ending."""
    chance = random.Random(seed)
    kind = chance.randrange(10)
    if kind < 2:
        return "zip.ckpt", damaged_archive(saved(good), chance)
    if kind < 5:
        return "pickle.ckpt", hostile_pickle(saved(good), chance)
    if kind < 9:
        return "plan.ckpt", saved(hostile_plan(good, chance))
    return "header.safetensors", hostile_tensors(good, chance)


def state_of(model: nn.Module) -> dict[str, Any]:
    """Classes, numbers and weights of a module."""
    found: dict[str, Any] = {name: t.clone() for name, t in model.state_dict().items()}
    for name, module in model.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str, tuple, type(None)))}
        found[f"{name}:"] = (type(module), plain, sorted(module._buffers))
    return found


def wrong(model: nn.Module, before: dict[str, Any], loaded: bool, path: Path, right: nn.Module) -> str | None:
    """What is wrong with a module after a file was loaded into it, or refused.

    ``right``: the network that the weights in the file are of. A number that is neither as in it, nor as before, nor
    what remains of it, is wrong.
    """
    after = state_of(model)
    if not loaded:
        same = before.keys() == after.keys() and all(
            torch.equal(v, after[k]) if isinstance(v, Tensor) else v == after[k] for k, v in before.items()
        )
        return None if same else "refused, and the module is not as it was"
    weights = read_any(path)
    weights = weights.get("state_dict", weights)
    if any(not torch.equal(value, weights[name]) for name, value in model.state_dict().items()):
        return "loaded other weights than the file holds"
    for name, module in model.named_modules():
        if f"{name}:" not in before or not issubclass(type(module), before[f"{name}:"][0].__mro__[0]):
            if type(module).__name__ != "HeadwiseAttention":
                return f"{name!r} has become a {type(module).__name__}"
        for key, value in before[f"{name}:"][1].items():
            now = vars(module).get(key, value)
            own = type(module).__name__ == "HeadwiseAttention"  # a form of its own
            if type(now) is int and now != value and not own and not (is_settable(module, key) and 0 < now < value):
                return f"{name}.{key} was set from {value} to {now}"
            wanted = (value, vars(right.get_submodule(name)).get(key), REMAINING.get((name, key)))
            if type(now) is int and now not in wanted:
                return f"{name}.{key} was set from {value} to {now}, which is not what the weights are of"
    return None


def peak() -> int:
    """The most memory that the process has had since it was last asked, in bytes."""
    text = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(text.split("VmHWM:")[1].split()[0])


def resident() -> int:
    """The memory that the process has now, in bytes."""
    return 1024 * int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])


def read_twice(path: Path) -> None:
    """Read a file as Lightning does that takes what was checked, and unpickles it freely."""
    if path.suffix == ".safetensors":
        is_compacted_file(path)
        return
    content, file = read_bytes(path)
    is_compacted_content(content, str(path), path.stat().st_size)
    with contextlib.suppress(Exception):  # it may refuse what we take: it must run nothing
        torch.load(file, weights_only=False)


def failures(seeds: range, folder: Path, report: Callable[[str], None] = print) -> list[str]:
    """Read the files of some seeds; what did not hold."""
    ran: list[str] = []
    reading = [False]
    sys.addaudithook(lambda event, _: ran.append(event) if reading[0] and event in RUNS_CODE else None)
    small = compacted()
    good = {"state_dict": small.state_dict(), KEY: content_of(small), "hyper_parameters": {"width": 8}}
    found, worst, slowest, loads = [], 0, 0.0, 0
    for number, seed in enumerate(seeds):
        if number % 500 == 499:
            report(f"{number + 1} files read")
        ending, data = hostile_file(seed, good)
        path = folder / f"{seed}.{ending}"
        path.write_bytes(data)
        limit, own = MEMORY + 4 * len(data), []
        del data
        for read in (load_compacted_state, None):
            model = Target().double()
            before, loaded = state_of(model), False
            peak()
            start, clock = resident(), time.process_time()
            reading[0] = True
            try:
                load_compacted_state(model, path) if read else read_twice(path)
                loaded = bool(read)
            except EngineError:
                pass
            except Exception as error:
                own.append(f"{type(error).__name__} {str(error)[:200]}")
            reading[0] = False
            seconds, taken = time.process_time() - clock, peak() - start
            worst, slowest, loads = max(worst, taken), max(slowest, seconds), loads + loaded
            own += [f"{taken / 2**20:.0f} MB"] if taken > limit else []
            own += [f"{seconds:.1f} s"] if seconds > SECONDS else []
            if read and (what := wrong(model, before, loaded, path, small)):
                own.append(what)
        found += [f"{path.name} ({path.stat().st_size} bytes): {text}" for text in own]
        for text in own:
            report(found[-1] if len(own) == 1 else f"{path.name}: {text}")
        path.unlink()
    found += [f"ran {event}" for event in ran]
    report(
        f"{len(seeds)} files, {loads} loaded, at most {worst / 2**20:.0f} MB and {slowest:.2f} s; {len(found)} failures"
    )
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    first, count = int(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(1 if failures(range(first, first + count), Path(scratch)) else 0)

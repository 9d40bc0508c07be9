"""What a pickle may build."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.files.builder import CALLS, Builder, Name

FLOATS = Name("torch.FloatStorage")


def builder(memory: int = 2**20, claims: int = 2**10) -> Builder:
    """With storages of zeros."""
    return Builder(lambda key, size, location: torch.UntypedStorage(size), memory, claims)


def reference(count: int, key: str = "0") -> tuple[Any, ...]:
    """To a storage of floats."""
    return "storage", FLOATS, key, "cpu", count


def test_a_storage_is_read_once() -> None:
    """Two references give one storage, unless they say different things of it."""
    build = builder()
    assert build.storage(reference(4)) is build.storage(reference(4))
    with pytest.raises(ValueError, match="in two ways"):
        build.storage(reference(5))


def test_equal_views_are_one_tensor_and_claim_once() -> None:
    """A thousand references to a tensor that repeats an entry cost as much as one; another one is refused."""
    build = builder()
    storage, make = build.storage(reference(1)), CALLS["torch._utils._rebuild_tensor_v2"]
    tensors = [make(build, storage, 0, (200,), (0,), False, {}) for _ in range(1000)]
    assert all(tensor is tensors[0] for tensor in tensors) and tensors[0].shape == (200,)
    with pytest.raises(ValueError, match="claim much more memory"):
        make(build, storage, 0, (100,), (0,), False, {})


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("collections.Counter", ([1],)),
        ("builtins.set", ("ab",)),
        ("builtins.bytes", (10**9,)),
        ("_codecs.encode", ("a", "utf-7")),
        ("torch.Size", ((-1,),)),
        ("torch._utils._rebuild_parameter", (1, False, {})),
        ("torch._utils._rebuild_tensor_v2", (None, 0, (1,), (1,), False, {})),
        ("torch._tensor._rebuild_from_type_v2", (Name("os.system"), Name("torch.Tensor"), (), {})),
    ],
)
def test_arguments_that_are_not_plain(name: str, arguments: tuple[Any, ...]) -> None:
    """Each function takes what `torch.save` writes, and nothing else."""
    with pytest.raises(ValueError):
        CALLS[name](builder(), *arguments)


def test_memory_is_counted() -> None:
    """Of sets and sizes too."""
    with pytest.raises(ValueError, match="more memory"):
        CALLS["builtins.set"](builder(1000), list(range(100)))

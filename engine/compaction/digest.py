"""Checksum of a checkpoint's content, which detects a flipped bit anywhere in it."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

__all__ = ["digest"]


def digest(value: Any) -> str:
    """Return the SHA-256 of nested containers of primitives and tensors, in hexadecimal.

    Equal content has equal digests, whatever file, device, process or order of keys it comes from. A container is
    hashed from the digests of its items, once however often it is referenced, so that a small file that describes a
    huge tree is still fast. Of any other object only the type is hashed.

    Args:
        value: anything that ``torch.load(..., weights_only=True)`` may return.

    Example:
        >>> digest({"a": torch.ones(2), "b": [1]}) == digest({"b": [1], "a": torch.ones(2)})
        True
        >>> digest(torch.ones(2)) == digest(torch.ones(2, 1))
        False
    """
    return _digest(value, {}).hex()


def _digest(value: Any, digests: dict[int, bytes]) -> bytes:
    if not isinstance(value, (Tensor, Mapping, set, frozenset, list, tuple)):
        return sha256(_plain(value)).digest()
    value_digest = digests.get(id(value))
    if value_digest is None:
        value_digest = digests[id(value)] = _of_container(value, digests)
    return value_digest


def _of_container(value: Any, digests: dict[int, bytes]) -> bytes:
    if isinstance(value, Tensor):
        return sha256(b"tensor" + _tensor(value)).digest()
    if isinstance(value, Mapping):
        return sha256(
            b"mapping" + b"".join(sorted(_digest(k, digests) + _digest(v, digests) for k, v in value.items()))
        ).digest()
    if isinstance(value, (set, frozenset)):
        return sha256(b"set" + b"".join(sorted(_digest(v, digests) for v in value))).digest()
    hasher = sha256(b"sequence")
    for item in value:
        hasher.update(_digest(item, digests))
    return hasher.digest()


def _plain(value: Any) -> bytes:
    plain = value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device))
    return f"{type(value).__name__} {value!r}".encode() if plain else type(value).__name__.encode()


def _tensor(value: Tensor) -> bytes:
    hasher = sha256(f"{value.dtype} {tuple(value.shape)}".encode())
    if value.layout is torch.strided and not value.is_meta:
        for dim in [d for d in reversed(range(value.ndim)) if value.stride(d) == 0 and value.shape[d] > 0]:
            value = value.select(dim, 0)  # expanded dimensions are read once
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError(f"A tensor claims {value.numel()} elements, but holds fewer.")
        flat = value.detach().cpu().contiguous().reshape(-1)
        flat = flat.as_strided(flat.shape, (1,))  # a single entry counts as contiguous with any stride
        hasher.update(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]
    return hasher.digest()

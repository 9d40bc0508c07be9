"""Weights in the safetensors format, with the plans in the header; such a file contains no pickle.

The format: https://github.com/huggingface/safetensors. Neither reading nor writing takes that package.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.compaction.format import KEY
from engine.errors import CheckpointError, InputError
from engine.files.atomic import replacing, unwritable
from engine.files.tensors import bytes_of, check_text, header_of, opened_tensors
from engine.program.defaults import own_defaults

__all__ = ["from_json", "read_safetensors", "to_json", "write_safetensors", "write_tensors"]

_TENSOR = "__tensor__"
_PLAIN = torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _PLAIN}  # allowed in plans


def write_safetensors(checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the weights and the plans of a checkpoint atomically.

    Raises:
        CheckpointError: if the file cannot be written.
        InputError: if the state dict contains something other than tensors, or a dtype that the format does not have.
    """
    weights = checkpoint["state_dict"]
    others = [name for name, value in weights.items() if not isinstance(value, Tensor)]
    if others:
        raise InputError(f"safetensors only stores tensors, but {others[0]!r} of the state dict is not a tensor.")
    header = {"format": "pt", KEY: to_json(checkpoint[KEY])}
    write_tensors(weights, path, header)


def write_tensors(tensors: Mapping[str, Tensor], path: str | os.PathLike[str], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file atomically.

    Raises:
        CheckpointError: if it cannot be written; an existing file is then unchanged.
        InputError: for a dtype that the format does not have.
    """
    head, order = header_of(tensors, metadata)
    try:
        # The package would put another file in the place of the temporary one, which nobody has locked.
        with replacing(path) as temporary, open(temporary, "r+b") as file:
            file.write(head)
            for name in order:
                file.write(bytes_of(tensors[name]))
    except OSError as error:
        raise unwritable(path, error) from error


@own_defaults()
def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file of `write_safetensors` as a checkpoint.

    Raises:
        CheckpointError: if there is no such file, or it is damaged.
    """
    name = os.fspath(path)
    if not Path(path).is_file():
        raise CheckpointError(f"There is no checkpoint {name}.")
    try:
        with opened_tensors(path) as file:
            checkpoint: dict[str, Any] = {"state_dict": {key: file.read(key) for key in file.places}}
            if KEY in file.metadata:
                check_text(file.metadata[KEY], os.path.getsize(name))
                checkpoint[KEY] = from_json(file.metadata[KEY])
    except (OSError, RuntimeError, ArithmeticError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{name} cannot be read: it is damaged ({error}).") from error
    return checkpoint


def to_json(content: Any) -> str:
    """Encode primitives and tensors as JSON.

    Example:
        >>> from_json(to_json({"index": torch.tensor([1, 2]), "name": "a"}))
        {'index': tensor([1, 2]), 'name': 'a'}
    """
    return json.dumps(content, default=_encoded)


def from_json(text: str) -> Any:
    """Decode the output of `to_json`.

    Raises:
        KeyError, RuntimeError, TypeError, ValueError: if it is damaged.
    """
    return json.loads(text, object_hook=_decoded)


def _encoded(value: Any) -> Any:
    if not isinstance(value, Tensor):
        raise TypeError(f"a {type(value).__name__} in a plan")
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in _DTYPES:  # do not write what could not be read
        raise TypeError(f"a tensor of {dtype} in a plan")
    data = bytes(bytes_of(value))
    return {_TENSOR: [dtype, list(value.shape), base64.b64encode(data).decode()]}


def _decoded(value: Mapping[str, Any]) -> Any:
    if _TENSOR not in value:
        return dict(value)
    dtype, shape, data = value[_TENSOR]
    raw = bytearray(base64.b64decode(data))
    flat = torch.frombuffer(raw, dtype=_DTYPES[dtype]) if raw else torch.empty(0, dtype=_DTYPES[dtype])
    return flat.view(shape)

"""Weights in the safetensors format, with the plans in the header; such a file contains no pickle.

The format: https://github.com/huggingface/safetensors. The package is optional (``pip install safetensors``).
"""

from __future__ import annotations

import base64
import importlib
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
from engine.files.tensors import check_text, opened_tensors

__all__ = ["from_json", "read_safetensors", "tensors_package", "to_json", "write_safetensors", "write_tensors"]

_TENSOR = "__tensor__"
_PLAIN = torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _PLAIN}  # allowed in plans


def write_safetensors(checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the weights and the plans of a checkpoint atomically.

    Raises:
        CheckpointError: if the file cannot be written.
        InputError: if the package is missing, or the state dict contains something other than tensors.
    """
    weights = checkpoint["state_dict"]
    others = [name for name, value in weights.items() if not isinstance(value, Tensor)]
    if others:
        raise InputError(f"safetensors only stores tensors, but {others[0]!r} of the state dict is not a tensor.")
    header = {"format": "pt", KEY: to_json(checkpoint[KEY])}
    # Tensors that share memory are copied, because the format does not support sharing.
    plain = {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in weights.items()}
    write_tensors(plain, path, header)


def write_tensors(tensors: Mapping[str, Tensor], path: str | os.PathLike[str], metadata: dict[str, str]) -> None:
    """Write a safetensors file atomically.

    Raises:
        CheckpointError: if it cannot be written; an existing file is then unchanged.
        InputError: if the package is missing.
    """
    package = tensors_package("torch")
    try:
        with replacing(path) as temporary:
            try:
                package.save_file(tensors, temporary, metadata)
            except tensors_package().SafetensorError as error:  # contains the disk error as text
                raise OSError(str(error)) from error
    except OSError as error:
        raise unwritable(path, error) from error


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file of `write_safetensors` as a checkpoint, without the package.

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


def tensors_package(part: str = "") -> Any:
    """Import the package safetensors, or a module of it.

    Raises:
        InputError: if it is not installed.
    """
    try:
        return importlib.import_module(f"safetensors.{part}".rstrip("."))
    except ImportError as error:
        raise InputError("The package safetensors is required: pip install safetensors.") from error


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
    data = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {_TENSOR: [dtype, list(value.shape), base64.b64encode(data).decode()]}


def _decoded(value: Mapping[str, Any]) -> Any:
    if _TENSOR not in value:
        return dict(value)
    dtype, shape, data = value[_TENSOR]
    raw = bytearray(base64.b64decode(data))
    flat = torch.frombuffer(raw, dtype=_DTYPES[dtype]) if raw else torch.empty(0, dtype=_DTYPES[dtype])
    return flat.view(shape)

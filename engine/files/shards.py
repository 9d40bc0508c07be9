"""Compaction and loading of checkpoints in several files, with one of them in memory at a time.

Large models come as a folder with an index, ``model.safetensors.index.json`` or ``pytorch_model.bin.index.json``, of
the form ``{"metadata": {...}, "weight_map": {name: file}}``. The compaction is planned on the meta device, without
data, so it follows from the masks alone.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.bounds import check_kinds
from engine.compaction.compact import compacted
from engine.compaction.digest import digest
from engine.compaction.folds import Fold
from engine.compaction.follow import compactable, entries, reshape
from engine.compaction.format import KEY
from engine.compaction.plan import Plan
from engine.compaction.reading import check_plans
from engine.errors import CheckpointError, EngineError, InputError
from engine.files.archive import read_archive
from engine.files.atomic import replacing, save, unwritable
from engine.files.checkpoint import UNREADABLE, content_of
from engine.files.portable import from_json, to_json, write_tensors
from engine.files.tensors import check_text, opened_tensors
from engine.program.defaults import own_defaults
from engine.program.stored import stored_tensors
from engine.speedup import ModelSpeedup
from engine.surgery.spans import weights_of

__all__ = ["compact_shards", "load_shards"]

Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class _Index:
    """The index: the file of each tensor, and metadata."""

    path: Path
    files: Mapping[str, list[str]]
    metadata: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        return [name for names in self.files.values() for name in names]


@own_defaults()
def compact_shards(
    model: nn.Module,
    path_in: str | os.PathLike[str],
    path_out: str | os.PathLike[str],
    example_inputs: Any,
    masks: Any,
) -> Plan:
    """Remove masked channels from a checkpoint in several files, with one file in memory at a time.

    The compaction is planned without data and the model cannot run. Therefore nothing is verified numerically and no
    constants are folded: masked channels that are not zero (behind a norm that is not masked) are kept.

    Args:
        model: the network on the meta device (``with torch.device("meta"): ...``), with the names of the checkpoint;
            it is compacted in place.
        path_in: the folder with the index and its files, ``*.safetensors`` or of ``torch.save``.
        path_out: a folder for the small files, under the same names; it must not contain an index. Each file is
            written atomically, the index last.
        example_inputs: example inputs of the model on the meta device.
        masks: ``{module: {parameter: 0/1 tensor}}``, or a file of these.

    Returns:
        The plan.

    Raises:
        CheckpointError: if files are damaged, or belong to another model.
        InputError: if the model holds data, or nothing can be removed.

    Example:
        >>> with torch.device("meta"):
        ...     net = Net()                                                   # doctest: +SKIP
        >>> engine.compact_shards(net, "llm", "small", inputs, masks)         # doctest: +SKIP
    """
    check_kinds(compact_shards, locals())
    index, target = _read_index(path_in), Path(path_out)
    real = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    if real:
        raise InputError(
            f"{real[0]!r} holds data: build the model on the meta device, because its weights come from the files."
        )
    if target.exists() and any(target.glob("*.index.json")):
        raise InputError(f"{target} already contains a checkpoint. Choose a separate folder for the small one.")
    names = _names(model, index)
    speedup = ModelSpeedup(model, example_inputs, masks, confidence=0)
    speedup.speedup_model()
    plan = speedup.plan
    if plan.is_empty:
        raise InputError("No masked channels can be removed without reading the weights.")
    digests, size = {}, 0
    for file, content in _small_files(index, plan, names):
        _write(target / file, content)
        digests[file] = digest(content)
        size += sum(tensor.numel() * tensor.element_size() for tensor in content.values())
    own = {**content_of(model), "sha256": digests}
    own["sha256"]["compacted"] = digest(own["compacted"])
    metadata = {**index.metadata, "total_size": size, KEY: json.loads(to_json(own))}
    with replacing(target / index.path.name) as temporary:
        weight_map = {name: file for file, tensor_names in index.files.items() for name in tensor_names}
        temporary.write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    return plan


@own_defaults()
def load_shards(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Reshape a model to a checkpoint of `compact_shards`, and load it with one file in memory at a time.

    Args:
        model: an instance of the network that was compacted. On the meta device, it adopts the tensors of the files;
            on other devices, their values are copied.
        path: the folder, or its index.

    Returns:
        The compacted model.

    Raises:
        CheckpointError: if a file is damaged, missing, or of another model; the model is then unchanged.

    Example:
        >>> net = engine.load_shards(Net(), "small")  # doctest: +SKIP
    """
    check_kinds(load_shards, locals())
    index = _read_index(path)
    try:
        content = from_json(json.dumps(index.metadata[KEY]))
        wanted, digests = entries(content), content["sha256"]
        size = sum(path.stat().st_size for path in (index.path, *map(index.path.with_name, index.files)))
        check_plans([plan for entry in wanted.values() for plan in entry["plans"]], size)
        if digest(content["compacted"]) != digests["compacted"]:
            raise CheckpointError("Its plan was modified (its SHA-256 differs).")
        names = _names(model, index)
        undo = reshape(compactable(model), _shapes(index, digests), wanted)
    except (EngineError, *UNREADABLE) as error:
        raise CheckpointError(f"{index.path} does not fit {type(model).__name__}, or is damaged: {error}") from error
    try:
        for file in index.files:
            _fill(model, _checked(index, file, digests), names)
    except BaseException:
        undo()
        raise
    return model


# ---------------------------------------------------------------- the index


def _read_index(path: str | os.PathLike[str]) -> _Index:
    location = Path(path)
    indices = sorted(location.glob("*.index.json")) if location.is_dir() else [location]
    if len(indices) != 1 or not indices[0].is_file():
        raise CheckpointError(f"{location} contains {len(indices)} indices `*.index.json`, instead of one.")
    try:
        text = indices[0].read_text()
        check_text(text, len(text))
        content = json.loads(text)
        files: dict[str, list[str]] = defaultdict(list)
        for name, file in content["weight_map"].items():
            if Path(file).name != file or not indices[0].with_name(file).is_file():
                raise CheckpointError(f"The file {file!r} is missing beside it.")
            files[file].append(str(name))
        return _Index(indices[0], dict(files), dict(content.get("metadata") or {}))
    except (EngineError, OSError, *UNREADABLE) as error:
        raise CheckpointError(f"{indices[0]} cannot be used: {error}") from error


def _names(model: nn.Module, index: _Index) -> dict[str, list[str]]:
    """Return all names of each tensor in the files, where tied tensors are stored once."""
    stored, model_names = stored_tensors(model), set(weights_of(model))
    same: dict[int, list[str]] = defaultdict(list)
    for name, tensor in stored.items():
        same[id(tensor)].append(name)
    unexpected = sorted(set(index.names) - model_names)
    covered_names = {other for name in index.names if name in stored for other in same[id(stored[name])]}
    missing = sorted(model_names - covered_names)
    if unexpected or missing:
        raise CheckpointError(
            f"{index.path} does not belong to {type(model).__name__}: "
            + (f"the model has no {unexpected[0]!r}." if unexpected else f"{missing[0]!r} is in none of its files.")
        )
    return {name: same[id(stored[name])] for name in index.names}


# ---------------------------------------------------------------- the files


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Read]:
    """Yield a function that reads a tensor of a file by its name."""
    if path.suffix != ".safetensors":
        content = read_archive(path)
        yield lambda name: content[name]
        return
    try:
        with opened_tensors(path) as file:
            yield file.read
    except (OSError, RuntimeError, ArithmeticError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: it is damaged ({error}).") from error


def _small_files(index: _Index, plan: Plan, names: Mapping[str, list[str]]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    folds: dict[str, list[Fold]] = defaultdict(list)
    for fold in plan.folds:
        folds[fold.name].append(fold)
    for file, tensor_names in index.files.items():
        with _opened(index.path.with_name(file)) as read:
            small = {}
            for name in tensor_names:
                key = next((n for n in names[name] if n in plan.slices or n in plan.masks or n in folds), name)
                new = compacted(name, read(name), plan.slices.get(key), plan.masks.get(key), folds[key])
                small[name] = new.clone(memory_format=torch.contiguous_format)  # so that the large tensor is freed
        yield file, small


def _write(path: Path, content: dict[str, Tensor]) -> None:
    if path.suffix == ".safetensors":
        write_tensors(content, path, {"format": "pt"})
        return
    try:
        with replacing(path) as temporary:
            save(content, temporary)
    except OSError as error:
        raise unwritable(path, error) from error


def _shapes(index: _Index, digests: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes in all files, after checking each file."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in index.files:
        shapes |= {name: tuple(tensor.shape) for name, tensor in _checked(index, file, digests).items()}
    return shapes


def _checked(index: _Index, file: str, digests: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the content of a file, checked in memory so that later changes of the file do not matter."""
    with _opened(index.path.with_name(file)) as read:
        content = {name: read(name) for name in index.files[file]}
    if digest(content) != digests[file]:
        raise CheckpointError(f"{file} was modified (its SHA-256 differs).")
    return content


def _fill(model: nn.Module, content: Mapping[str, Tensor], names: Mapping[str, list[str]]) -> None:
    stored = stored_tensors(model)
    taken = {name: tensor for name, tensor in content.items() if stored[name].is_meta}
    for name, tensor in taken.items():
        old = stored[name]
        own = tensor.clone().to(old.dtype)  # the file will be closed
        new = nn.Parameter(own, old.requires_grad) if isinstance(old, nn.Parameter) else own
        for alias in names[name]:
            owner, _, key = alias.rpartition(".")
            table: dict[str, Any] = vars(model.get_submodule(owner))
            table["_parameters" if isinstance(old, nn.Parameter) else "_buffers"][key] = new
    with torch.no_grad():
        for name in content.keys() - taken.keys():
            stored[name].copy_(content[name])

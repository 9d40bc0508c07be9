"""Checkpoints in several files, compacted and loaded with one of them in memory at a time.

A folder with an index, as large models come: ``model.safetensors.index.json`` or ``pytorch_model.bin.index.json`` with
``{"metadata": {...}, "weight_map": {name: file}}``. The model is planned on the meta device, without data, so that what
goes follows from the masks alone.
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
from engine.program.stored import stored_tensors
from engine.speedup import ModelSpeedup
from engine.surgery.spans import weights_of

__all__ = ["compact_shards", "load_shards"]

Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class _Index:
    """Which tensor is in which file, and what else the index says."""

    path: Path
    files: Mapping[str, list[str]]
    metadata: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        return [name for names in self.files.values() for name in names]


def compact_shards(
    model: nn.Module,
    path_in: str | os.PathLike[str],
    path_out: str | os.PathLike[str],
    example_inputs: Any,
    masks: Any,
) -> Plan:
    """Remove what is masked from a checkpoint in several files, with one file in memory at a time.

    The model is planned without data and cannot be run: nothing is verified by running it, and no constants are folded,
    so whatever a mask leaves at a value other than zero (behind a norm that is not masked) stays.

    Args:
        model: the network on the meta device (``with torch.device("meta"): ...``), under the names of the checkpoint;
            it is made small, in place.
        path_in: the folder with the index and its files, ``*.safetensors`` or of ``torch.save``.
        path_out: a folder for the small files, under the same names; it must not hold an index yet. Each file is
            written as a whole or not at all, the index last.
        example_inputs: what the model takes, on the meta device.
        masks: ``{module: {parameter: 0/1 tensor}}``, or a file of these.

    Returns:
        The plan.

    Raises:
        CheckpointError: where the files are damaged, or belong to another model.
        InputError: where the model holds data, or nothing is masked that could go.

    Example:
        >>> with torch.device("meta"):
        ...     net = Net()                                                   # doctest: +SKIP
        >>> engine.compact_shards(net, "llm", "small", inputs, masks)         # doctest: +SKIP
    """
    index, target = _read_index(path_in), Path(path_out)
    real = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    if real:
        raise InputError(
            f"{real[0]!r} holds data: build the model on the meta device, the weights come from the files."
        )
    if target.exists() and any(target.glob("*.index.json")):
        raise InputError(f"{target} holds a checkpoint already. Name a folder of its own for the small one.")
    names = _names(model, index)
    speedup = ModelSpeedup(model, example_inputs, masks, confidence=0)
    speedup.speedup_model()
    plan = speedup.plan
    if plan.is_empty:
        raise InputError("Nothing is masked that could be removed without looking at the weights.")
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


def load_shards(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Bring a model to the shapes of what `compact_shards` wrote, and load it, with one file in memory at a time.

    Args:
        model: an instance of the network that was compacted. On the meta device, it takes the tensors of the files;
            else their values, where it is.
        path: the folder, or its index.

    Returns:
        The model, small.

    Raises:
        CheckpointError: where a file is damaged, missing, or of another model; the model is then as it was.

    Example:
        >>> net = engine.load_shards(Net(), "small")  # doctest: +SKIP
    """
    index = _read_index(path)
    try:
        content = from_json(json.dumps(index.metadata[KEY]))
        wanted, digests = entries(content), content["sha256"]
        size = sum(path.stat().st_size for path in (index.path, *map(index.path.with_name, index.files)))
        check_plans([plan for entry in wanted.values() for plan in entry["plans"]], size)
        if digest(content["compacted"]) != digests["compacted"]:
            raise CheckpointError("Its plan is not what was written (its SHA-256 differs).")
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
        raise CheckpointError(
            f"{location} holds {len(indices)} indices `*.index.json`; one says which tensor is where."
        )
    try:
        text = indices[0].read_text()
        check_text(text, len(text))
        content = json.loads(text)
        files: dict[str, list[str]] = defaultdict(list)
        for name, file in content["weight_map"].items():
            if Path(file).name != file or not indices[0].with_name(file).is_file():
                raise CheckpointError(f"There is no file {file!r} beside it.")
            files[file].append(str(name))
        return _Index(indices[0], dict(files), dict(content.get("metadata") or {}))
    except (EngineError, OSError, *UNREADABLE) as error:
        raise CheckpointError(f"{indices[0]} cannot be used: {error}") from error


def _names(model: nn.Module, index: _Index) -> dict[str, list[str]]:
    """Return all names of the tensor that goes by a name in the files; ties are in a file once."""
    stored, model_names = stored_tensors(model), set(weights_of(model))
    same: dict[int, list[str]] = defaultdict(list)
    for name, tensor in stored.items():
        same[id(tensor)].append(name)
    odd = sorted(set(index.names) - model_names)
    covered_names = {other for name in index.names if name in stored for other in same[id(stored[name])]}
    missing = sorted(model_names - covered_names)
    if odd or missing:
        raise CheckpointError(
            f"{index.path} is not of {type(model).__name__}: "
            + (f"the model has no {odd[0]!r}." if odd else f"{missing[0]!r} is in none of its files.")
        )
    return {name: same[id(stored[name])] for name in index.names}


# ---------------------------------------------------------------- the files


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Read]:
    """Give what reads a tensor of a file by its name."""
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
                small[name] = new.clone(memory_format=torch.contiguous_format)  # nothing of the large file stays
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
    """Return the shapes in all files; each file is checked."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in index.files:
        shapes |= {name: tuple(tensor.shape) for name, tensor in _checked(index, file, digests).items()}
    return shapes


def _checked(index: _Index, file: str, digests: Mapping[str, str]) -> dict[str, Tensor]:
    """Return what is in a file, checked in memory: what happens to the file from then on does not matter."""
    with _opened(index.path.with_name(file)) as read:
        content = {name: read(name) for name in index.files[file]}
    if digest(content) != digests[file]:
        raise CheckpointError(f"{file} is not what was written (its SHA-256 differs).")
    return content


def _fill(model: nn.Module, content: Mapping[str, Tensor], names: Mapping[str, list[str]]) -> None:
    stored = stored_tensors(model)
    taken = {name: tensor for name, tensor in content.items() if stored[name].is_meta}
    for name, tensor in taken.items():
        old = stored[name]
        own = tensor.clone().to(old.dtype)  # the file is closed in a moment
        new = nn.Parameter(own, old.requires_grad) if isinstance(old, nn.Parameter) else own
        for alias in names[name]:
            owner, _, key = alias.rpartition(".")
            table: dict[str, Any] = vars(model.get_submodule(owner))
            table["_parameters" if isinstance(old, nn.Parameter) else "_buffers"][key] = new
    with torch.no_grad():
        for name in content.keys() - taken.keys():
            stored[name].copy_(content[name])

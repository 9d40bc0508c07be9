"""Compacted checkpoints: weights, and under a separate key the plans that a fresh model needs to load them.

::

    {"state_dict": {...},                                          and whatever else a Lightning checkpoint holds
     "lightning_compress": {"version": 3,
                            "compacted": {path: {"plans": [...], "certificates": [...]}},
                            "sha256": {"compacted": ..., "state_dict": ..., ...}}}

Version 1 had one plan of one module and no digests: ``{"version", "target", "plan", "certificate"}``.
"""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from engine.bounds import check_kinds
from engine.compaction.digest import digest
from engine.compaction.follow import compactable, entries, joined_entries, reshape, shapes_in
from engine.compaction.format import KEY, VERSION
from engine.compaction.history import Entry, entries_of
from engine.compaction.parts import part_entry
from engine.compaction.plan import Plan
from engine.compaction.reading import check_plans
from engine.errors import CheckpointError, EngineError, InputError
from engine.files.archive import read_archive
from engine.files.portable import read_safetensors, write_safetensors
from engine.program.defaults import own_defaults
from engine.surgery.spans import check_spans, is_span

__all__ = [
    "KEY",
    "UNREADABLE",
    "VERSION",
    "checked",
    "content_of",
    "is_compacted_content",
    "is_compacted_file",
    "load_compacted_state",
    "load_state",
    "read_any",
    "read_checkpoint",
    "save_safetensors",
    "seal",
    "stored_content",
    "with_metadata",
]

# Exceptions of torch for weights that cannot be read or do not fit.
UNREADABLE = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)


def content_of(model: nn.Module) -> dict[str, Any]:
    """Return the content for the key of a checkpoint: the compactions of the modules in a model, without digests.

    Args:
        model: a model, such as a LightningModule.

    Example:
        >>> content_of(nn.Linear(1, 1))
        {'version': 3, 'compacted': {}, 'sha256': None}
    """
    entries_by_path = {path: dict(entry) for path, entry in entries_of(model).items()}
    share = part_entry(model)
    if share is not None:
        entries_by_path.setdefault("", dict(share))
    return {"version": VERSION, "compacted": entries_by_path, "sha256": None}


def seal(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Add the SHA-256 of each part to a checkpoint and to the metadata of its weights.

    Args:
        checkpoint: checkpoint with plans under the key.
    """
    parts = {name: digest(value) for name, value in checkpoint.items() if name != KEY}
    versions = _versions(checkpoint["state_dict"])
    if versions:
        parts["versions"] = digest(versions)
    content = {**checkpoint[KEY], "sha256": {**parts, "compacted": digest(checkpoint[KEY]["compacted"])}}
    return {**checkpoint, "state_dict": with_metadata(checkpoint["state_dict"], content), KEY: content}


def with_metadata(weights: Mapping[str, Any], content: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a state dict whose metadata contain the compactions, like that of a compacted model."""
    metadata = OrderedDict(_versions(weights))
    metadata[""] = {**metadata.get("", {}), KEY: content}
    state_dict = OrderedDict(weights)
    state_dict._metadata = metadata  # type: ignore[attr-defined]  # where torch keeps it
    return state_dict


def read_checkpoint(path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
    """Read a compacted checkpoint with ``weights_only=True``, check its form and its digests.

    Args:
        path: the file.
        map_location: as in ``torch.load``.

    Returns:
        The checkpoint, with its plans under ``lightning_compress``.

    Raises:
        CheckpointError: if there is no such file, or it is truncated, modified, not a compacted checkpoint, or of a
            newer format.
    """
    return checked(read_any(path, map_location), os.fspath(path), os.path.getsize(path))


def checked(content: Any, name: str, size: int) -> dict[str, Any]:
    """Check the form and the digests of the content of a compacted checkpoint.

    Args:
        content: content as returned by `read_any`.
        name: name of the file, for messages.
        size: size of the file in bytes.

    Returns:
        The checkpoint, as `read_checkpoint` returns it.

    Raises:
        CheckpointError: as for `read_checkpoint`.
    """
    checkpoint = _in_form(content)
    _check_metadata(checkpoint, name)
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise CheckpointError(
            f"{name} is neither a Lightning checkpoint, which has a `state_dict`, nor the state dict of a compacted "
            "model."
        )
    try:
        compactions = stored_content(checkpoint)
        if compactions is None:
            raise CheckpointError(
                "It contains no compaction plan: it was not written by `ModelCompaction`. Load it with "
                "`load_from_checkpoint` of its LightningModule, or as the state dict of a plain model."
            )
        stored = entries(compactions)
        check_plans([plan for entry in stored.values() for plan in entry["plans"]], size)
        if compactions["version"] > 1:
            _check_seal(checkpoint, compactions)
    except (EngineError, *UNREADABLE) as error:
        raise CheckpointError(f"{name} cannot be used. {error}") from error
    return {**checkpoint, "state_dict": with_metadata(checkpoint["state_dict"], compactions), KEY: compactions}


def _check_metadata(checkpoint: Any, name: str) -> None:
    """Check that the metadata of weights have torch's form, a mapping for each module."""
    weights = checkpoint.get("state_dict") if isinstance(checkpoint, Mapping) else None
    metadata = getattr(weights, "_metadata", None) or {}
    plain = isinstance(metadata, Mapping) and all(
        isinstance(module, str) and isinstance(own, Mapping) for module, own in metadata.items()
    )
    if not plain:
        raise CheckpointError(f"{name} is damaged: the metadata of its weights do not have torch's form.")


def _in_form(loaded: Any) -> Any:
    """Wrap a plain state dict in a checkpoint; return anything else unchanged."""
    return {"state_dict": loaded} if isinstance(getattr(loaded, "_metadata", None), Mapping) else loaded


def read_any(path: str | os.PathLike[str], map_location: Any = "cpu") -> Any:
    """Read an untrusted file of ``torch.save``, or of safetensors according to its name."""
    return read_safetensors(path) if os.fspath(path).endswith(".safetensors") else read_archive(path, map_location)


@own_defaults()
def save_safetensors(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model's weights in the safetensors format, with the plans that a fresh model needs in the header.

    ``load_compacted_state(fresh, path)`` reads them. Other readers of safetensors see plain weights.

    Args:
        model: the model, compacted or not.
        path: the file, ``*.safetensors``, which is written atomically.

    Raises:
        InputError: for another ending, or if the state dict contains something other than tensors.

    Example:
        >>> engine.save_safetensors(model, "small.safetensors")  # doctest: +SKIP
    """
    check_kinds(save_safetensors, locals())
    if not os.fspath(path).endswith(".safetensors"):
        raise InputError(f"`path` must end with '.safetensors', which names the format; got {os.fspath(path)!r}.")
    # As a plain dictionary, because the format cannot store the versions of modules.
    write_safetensors(seal({"state_dict": dict(model.state_dict()), KEY: content_of(model)}), path)


def is_compacted_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file contains plans; the file is checked as by `read_checkpoint`.

    Raises:
        CheckpointError: if it is damaged, with plans or without.
    """
    return is_compacted_content(read_any(path), os.fspath(path), os.path.getsize(path))


def is_compacted_content(content: Any, name: str, size: int) -> bool:
    """Whether the content of a file contains plans, which are checked; for the arguments see `checked`.

    Raises:
        CheckpointError: if it is damaged.
    """
    checkpoint = _in_form(content)
    _check_metadata(checkpoint, name)
    compacted = isinstance(checkpoint, Mapping) and stored_content(checkpoint) is not None
    if compacted:
        checked(content, name, size)
    return compacted


def stored_content(checkpoint: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the record of compactions in a checkpoint, under the key or in the metadata of its weights.

    Args:
        checkpoint: any checkpoint.

    Returns:
        The content in the form of the key; None if nothing was compacted.
    """
    if checkpoint.get(KEY) is not None:
        content: dict[str, Any] = checkpoint[KEY]
        return content
    metadata: Any = getattr(checkpoint.get("state_dict"), "_metadata", None)
    own = {name: meta[KEY] for name, meta in metadata.items() if KEY in meta} if isinstance(metadata, Mapping) else {}
    if "" in own or not own:
        return own.get("")
    return {"version": VERSION, "compacted": joined_entries(own), "sha256": None}


def _check_seal(checkpoint: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    seals = content.get("sha256", False)
    if seals is None:  # written by Lightning, without digests
        return
    if not isinstance(seals, Mapping) or not {"compacted", "state_dict"} <= seals.keys():
        raise CheckpointError("It is damaged: its digests are missing.")
    for part, expected in seals.items():
        if part == "versions" and part not in checkpoint:
            value: Any = _versions(checkpoint["state_dict"])
        else:
            value = content["compacted"] if part == "compacted" else checkpoint.get(part)
        if digest(value) != expected:
            raise CheckpointError(
                f"It is damaged: {part!r} was modified (its SHA-256 differs). Use another copy of it."
            )


@own_defaults()
def load_compacted_state(
    model: nn.Module, path: str | os.PathLike[str], map_location: Any = "cpu", strict: bool = True
) -> nn.Module:
    """Reshape a plain model to a compacted checkpoint and load its weights; all or nothing.

    Args:
        model: an instance of the network that was compacted, without the LightningModule around it.
        path: a checkpoint of `ModelCompaction`, a file of `save_safetensors`, or the compacted model's ``state_dict()``
            saved with ``torch.save``.
        map_location: as in ``torch.load``.
        strict: whether the names of the weights must match exactly.

    Returns:
        The compacted model.

    Raises:
        CheckpointError: if the file cannot be used, or belongs to another model; the model is then unchanged.

    Example:
        >>> torch.save(compacted.state_dict(), "small.pt")  # doctest: +SKIP
        >>> net = load_compacted_state(Net(), "small.pt")  # doctest: +SKIP
    """
    check_kinds(load_compacted_state, locals())
    checkpoint = read_checkpoint(path, map_location)
    states = {str(k): v for k, v in checkpoint["state_dict"].items() if isinstance(v, Tensor)}
    stored = entries(checkpoint[KEY])
    prefix = _prefix(set(states), _names(model.state_dict()), sorted(stored, key=len))
    if prefix is None:
        raise CheckpointError(
            f"{os.fspath(path)} belongs to another model: it contains no weights with the names of "
            f"{type(model).__name__}."
        )
    try:
        load_state(compactable(model), _part(checkpoint["state_dict"], prefix), _within(stored, prefix), strict)
    except (EngineError, *UNREADABLE) as error:
        raise CheckpointError(f"{os.fspath(path)} does not fit {type(model).__name__}: {error}") from error
    return model


def _prefix(names: set[str], wanted: set[str], targets: list[str]) -> str | None:
    """Return the prefix of the model's names in the checkpoint, preferably that of a compacted module."""
    first = min(wanted, default="")
    prefixes = {name.removesuffix(first) for name in names if name.endswith(first)}
    front = [f"{target}." for target in targets if target]
    for prefix in sorted(prefixes, key=lambda p: (not any(p.startswith(t) for t in front), len(p))):
        if all(prefix + name in names for name in wanted):
            return prefix
    return None


def _within(stored: Mapping[str, Entry], prefix: str) -> dict[str, Entry]:
    """Return the compactions of modules inside a part, and the share of the part in those of enclosing modules."""
    entries_by_path: dict[str, Entry] = {}
    for path, entry in stored.items():
        target = f"{path}." if path else ""
        if target.startswith(prefix):
            entries_by_path[target.removeprefix(prefix).removesuffix(".")] = entry
        elif prefix.startswith(target):
            plans = [Plan.from_state_dict(plan).within(prefix.removeprefix(target)) for plan in entry["plans"]]
            entries_by_path[""] = {**entry, "plans": [plan.structure().state_dict() for plan in plans]}
    return entries_by_path


def load_state(model: nn.Module, weights: Mapping[str, Any], wanted: Mapping[str, Entry], strict: bool = True) -> None:
    """Reshape a model for weights and load them; all or nothing.

    Args:
        model: the model, compacted or not.
        weights: weights by name.
        wanted: compactions that the weights went through, by path in the model.
        strict: whether the names must match exactly.

    Raises:
        CheckpointError: if names or shapes differ; the model is then unchanged.
    """
    differing = _names(weights) ^ _names(model.state_dict())
    if strict and differing:
        raise CheckpointError(f"The names of the weights differ: {', '.join(sorted(differing)[:4])}.")
    undo = reshape(model, shapes_in(weights), wanted)
    try:
        check_spans(model, weights, strict)
        model.load_state_dict(_versioned(weights, model), strict=strict)
    except BaseException:
        undo()
        raise


def _names(weights: Mapping[str, Any]) -> set[str]:
    """Return the names in a state dict except for extra state, which torch compares after reshaping."""
    return {name for name in weights if not is_span(name)}


def _part(weights: Mapping[str, Any], prefix: str) -> OrderedDict[str, Any]:
    """Return the tensors and extra states of a part of a model under relative names, with its modules' versions."""
    state_dict = OrderedDict(
        (str(name).removeprefix(prefix), value)
        for name, value in weights.items()
        if str(name).startswith(prefix) and (isinstance(value, Tensor) or is_span(str(name)))
    )
    metadata: Mapping[str, Any] = getattr(weights, "_metadata", None) or {}
    inside = [(f"{name}." if name else "", own) for name, own in metadata.items()]
    state_dict._metadata = {  # type: ignore[attr-defined]  # where torch keeps it
        name.removeprefix(prefix).removesuffix("."): own for name, own in inside if name.startswith(prefix)
    }
    return state_dict


def _versioned(weights: Mapping[str, Any], model: nn.Module) -> OrderedDict[str, Any]:
    """Return a state dict with the versions of modules, from which some modules convert older weights.

    Formats that do not store versions contain weights of the current ones.
    """
    state_dict = OrderedDict(weights)
    now, then = _versions(model.state_dict()), _versions(weights)
    versions = {name: {**now.get(name, {}), **then.get(name, {})} for name in {**now, **then}}
    state_dict._metadata = OrderedDict(versions)  # type: ignore[attr-defined]  # where torch keeps it
    return state_dict


def _versions(weights: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the metadata of a state dict without ours, which are the versions of modules."""
    metadata: Mapping[str, Any] = getattr(weights, "_metadata", None) or {}
    return {name: {key: value for key, value in own.items() if key != KEY} for name, own in metadata.items()}

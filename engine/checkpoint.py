"""Read a compacted checkpoint: weights, and under a key of its own the plan that a fresh model needs to take them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import CheckpointError, EngineError
from engine.plan import Plan

__all__ = ["KEY", "UNREADABLE", "VERSION", "load_compacted_state", "read_checkpoint"]

KEY = "lightning_compress"
VERSION = 1
# What torch.load raises on files that are cut off, are no checkpoints, or hold objects that it does not read.
UNREADABLE = (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, ValueError, TypeError, AttributeError)


def read_checkpoint(path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
    """Read a compacted checkpoint with ``weights_only=True`` and check its form.

    Args:
        path: the file.
        map_location: as in ``torch.load``.

    Returns:
        The checkpoint; the plan is under ``lightning_compress``.

    Raises:
        CheckpointError: if there is no such file, it is truncated or no compacted checkpoint, or its format is newer.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"There is no checkpoint {os.fspath(path)}.")
    try:
        checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    except (OSError, *UNREADABLE) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{os.fspath(path)} cannot be read: it is truncated, damaged or no checkpoint ({reason}). "
            "Take another copy of it, or compact again."
        ) from error
    _check_form(checkpoint, os.fspath(path))
    return dict(checkpoint)


def _check_form(checkpoint: Any, path: str) -> None:
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), dict):
        raise CheckpointError(f"{path} is no Lightning checkpoint: it has no `state_dict`.")
    content = checkpoint.get(KEY)
    if not isinstance(content, dict) or not isinstance(content.get("version"), int):
        raise CheckpointError(
            f"{path} holds no compaction plan: it was not written by `ModelCompaction`. "
            "Load it with `load_from_checkpoint` of its LightningModule."
        )
    if content["version"] > VERSION:
        raise CheckpointError(
            f"{path} has format {content['version']}, newer than format {VERSION}, the newest that this version of "
            "lightning_compress reads. Install a newer version."
        )
    missing = {"target", "plan", "certificate"} - content.keys()
    if missing:
        raise CheckpointError(f"{path} is damaged: its compaction plan lacks {', '.join(sorted(missing))}.")


def load_compacted_state(
    model: nn.Module, path: str | os.PathLike[str], map_location: Any = "cpu", strict: bool = True
) -> nn.Module:
    """Bring a plain model to the shapes of a compacted checkpoint and load its weights; all or nothing.

    Args:
        model: an un-compacted instance of the network that was compacted, without the LightningModule around it.
        path: the checkpoint that `ModelCompaction` wrote.
        map_location: as in ``torch.load``.
        strict: whether the names of the weights must agree exactly.

    Returns:
        The model, small.

    Raises:
        CheckpointError: if the file cannot be used, or is of another model; the model is then as it was.
    """
    checkpoint = read_checkpoint(path, map_location)
    content = checkpoint[KEY]
    states = {str(k): v for k, v in checkpoint["state_dict"].items() if isinstance(v, Tensor)}
    target = f"{content['target']}." if content["target"] else ""
    prefix = _prefix(set(states), set(model.state_dict()), target)
    if prefix is None:
        raise CheckpointError(
            f"{os.fspath(path)} holds no weights under the names of {type(model).__name__}: it is of another model."
        )
    weights = {name.removeprefix(prefix): value for name, value in states.items() if name.startswith(prefix)}
    try:
        plan = Plan() if content["plan"] is None else Plan.from_state_dict(content["plan"])
        _load(model, plan.within(prefix.removeprefix(target)), weights, strict)
    except (EngineError, *UNREADABLE) as error:
        raise CheckpointError(f"{os.fspath(path)} does not fit {type(model).__name__}: {error}") from error
    return model


def _prefix(names: set[str], wanted: set[str], target: str) -> str | None:
    """Return what stands in front of the model's names in the checkpoint: the compacted part, or a part of that."""
    first = min(wanted, default="")
    found = {name.removesuffix(first) for name in names if name.endswith(first) and name.startswith(target)}
    for prefix in sorted(found, key=len):
        if wanted <= {name.removeprefix(prefix) for name in names if name.startswith(prefix)}:
            return prefix
    return None


def _load(model: nn.Module, plan: Plan, weights: Mapping[str, Tensor], strict: bool) -> None:
    change = plan.prepare(model)
    change.commit()
    try:
        have = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        wrong = [name for name, value in weights.items() if have.get(name, tuple(value.shape)) != tuple(value.shape)]
        if wrong:
            name = wrong[0]
            raise CheckpointError(
                f"{name!r} has shape {tuple(weights[name].shape)} in it, and {have[name]} in the model."
            )
        if strict and set(weights) != set(have):
            odd = sorted(set(weights) ^ set(have))
            raise CheckpointError(f"The names of the weights differ: {', '.join(odd[:4])}.")
        model.load_state_dict(dict(weights), strict=strict)
    except BaseException:
        change.rollback()
        raise

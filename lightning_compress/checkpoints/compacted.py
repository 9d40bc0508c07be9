"""Compacted checkpoints: ordinary Lightning checkpoints that contain the plans under a versioned key."""

from __future__ import annotations

import inspect
import io
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from engine.bounds import check_kinds
from engine.compaction import KEY, check_plans, entries
from engine.errors import CheckpointError, EngineError
from engine.files import (
    UNREADABLE,
    content_of,
    load_state,
    next_version,
    read_checkpoint,
    replacing,
    save,
    seal,
    stored_content,
    unwritable,
)
from lightning_compress.checkpoints.folders import read_folder
from lightning_compress.trainer.packages import LIGHTNING_MODULES
from lightning_compress.trainer.strategy import parallel

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

    AnyModule = TypeVar("AnyModule", bound=LightningModule)


def dump(trainer: Trainer, weights_only: bool = True) -> dict[str, Any]:
    """Return Lightning's checkpoint with the plans added.

    Entries that ``torch.load(weights_only=True)`` cannot read are omitted, with a warning.

    Args:
        trainer: the Trainer, after a fit.
        weights_only: whether to omit the states of optimizers, schedulers and callbacks.
    """
    # `Trainer.save_checkpoint` would write directly, with a barrier that hangs if another rank was interrupted.
    checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=weights_only)
    # Averaging callbacks insert their weights, but those of the module were verified.
    strategy = parallel(trainer)
    checkpoint["state_dict"] = strategy.state_dict()
    return {**readable(strategy.whole_states(checkpoint)), KEY: content_of(trainer.lightning_module)}


def readable_hparams(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint without hyperparameters that cannot be read with ``weights_only=True``.

    Example:
        >>> readable_hparams({"hyper_parameters": {"width": 8}})
        {'hyper_parameters': {'width': 8}}
    """
    kept = {name: value for name, value in checkpoint.get("hyper_parameters", {}).items() if _is_readable(value)}
    lost = sorted(set(checkpoint.get("hyper_parameters", {})) - set(kept))
    if not lost:
        return checkpoint
    rank_zero_warn(
        f"The hyperparameters {', '.join(map(repr, lost))} are not plain values, so the compacted checkpoint omits "
        "them. Pass them to `load_compacted` by name, or use `self.save_hyperparameters(ignore=...)`."
    )
    return {**checkpoint, "hyper_parameters": kept}


def readable(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint without entries that cannot be read with ``weights_only=True``.

    Such entries are hyperparameters, or come from hooks. Mappings only lose the entries that cannot be read.

    Example:
        >>> readable({"state_dict": {}, "scaling": {"mean": 0.5}})
        {'state_dict': {}, 'scaling': {'mean': 0.5}}
    """
    plain, lost = dict(readable_hparams(checkpoint)), dict[str, str]()
    for name in [name for name in plain if name not in _OWN]:
        plain[name] = _readable(plain[name], name, lost)
        if name in lost:
            del plain[name]
    if lost:
        rank_zero_warn(
            f"The entries {', '.join(f'{name} ({kind})' for name, kind in lost.items())}, which a hook such as "
            "`on_save_checkpoint` adds, are not plain values, so the compacted checkpoint omits them. Set them on the "
            "module after `load_compacted`, or declare their types with `torch.serialization.add_safe_globals`."
        )
    return plain


_OWN = frozenset({"hyper_parameters", "optimizer_states", "state_dict", KEY})
"""Entries that are handled elsewhere or created by torch."""


def _readable(value: Any, name: str, lost: dict[str, str]) -> Any:
    """Return the part of an entry that can be read, and collect the names and types of the rest in ``lost``."""
    if _is_readable(value):
        return value
    if type(value) is not dict:
        lost[name] = type(value).__name__
        return None
    parts = {key: _readable(item, f"{name}.{key}", lost) for key, item in value.items()}
    return {key: item for key, item in parts.items() if f"{name}.{key}" not in lost}


def _is_readable(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (*UNREADABLE, pickle.PicklingError):
        return False
    return True


def write(checkpoint: Mapping[str, Any], path: Path, new: bool = False) -> None:
    """Write atomically: a temporary file with digests, fsync, read back and compare, rename.

    At any moment ``path`` is the old file or the new one.

    Args:
        checkpoint: the content, with plans under its own key.
        path: path of the file; its folder is created.
        new: whether it is an error if the file exists.

    Raises:
        CheckpointError: if it cannot be written or read back; ``path`` is then unchanged.
        FileExistsError: with ``new``, if the file exists.
    """
    try:
        with replacing(path, new) as temporary:
            save(seal(checkpoint), temporary)
            _check_written(temporary, path)
    except FileExistsError:
        raise
    except OSError as error:
        raise unwritable(path, error) from error


def write_new(checkpoint: Mapping[str, Any], path: Path) -> Path:
    """Write like `write`, but if the file exists, append ``-v1``, ``-v2``, … to its name.

    Args:
        checkpoint: the content, with plans under its own key.
        path: path of the file; its folder is created.

    Returns:
        The path of the new file. Files that other processes write at the same time are not overwritten.

    Raises:
        CheckpointError: as for `write`.
    """
    while True:
        target = next_version(path)
        try:
            write(checkpoint, target, new=True)
        except FileExistsError:  # another process took the name meanwhile
            continue
        return target


def _check_written(temporary: Path, path: Path) -> None:
    try:
        read_checkpoint(temporary)  # the digests in it are those of the content in memory
    except CheckpointError as error:
        raise CheckpointError(f"{path} could not be read back after writing. Is the disk damaged? {error}") from error


def load_compacted(
    path: str | os.PathLike[str],
    LightningModuleClass: type[AnyModule],
    map_location: Any = None,
    strict: bool | None = None,
    **init_kwargs: Any,
) -> AnyModule:
    """Load a checkpoint that ``ModelCompaction`` wrote.

    The class is instantiated from the saved hyperparameters, the stored plan narrows its model, and the weights are
    loaded. The file is read with ``weights_only=True``, so that no code in it runs.

    Args:
        path: the checkpoint (``ModelCompaction.checkpoint_path``), or a folder of shards that a Trainer wrote after the
            compaction.
        LightningModuleClass: the class that was trained.
        map_location: as in ``torch.load``.
        strict: whether the names of the weights must match exactly; by default as the module's ``strict_loading`` says,
            which is true unless it sets it.
        init_kwargs: arguments of the class that are missing in the checkpoint or override it.

    Returns:
        The LightningModule, on the device of the loaded weights.

    Raises:
        CheckpointError: if the file is truncated, belongs to another model, has a newer format, or holds no plan; or
            for an invalid path or class.

    Example:
        >>> module = load_compacted("runs/compacted.ckpt", MyLightningModule)  # doctest: +SKIP
    """
    _check_call(path, LightningModuleClass)
    check_kinds(load_compacted, locals())
    is_folder = Path(path).is_dir()
    checkpoint = _read_small_folder(Path(path), map_location) if is_folder else read_checkpoint(path, map_location)
    device = next((v.device for v in checkpoint["state_dict"].values() if isinstance(v, Tensor)), torch.device("cpu"))
    module = instantiate(LightningModuleClass, checkpoint, init_kwargs, os.fspath(path))
    try:
        module.on_load_checkpoint(checkpoint)
        exactly = module.strict_loading if strict is None else strict
        load_state(module, checkpoint["state_dict"], entries(checkpoint[KEY]), exactly)
    except (EngineError, *UNREADABLE) as error:
        raise does_not_fit(path, LightningModuleClass, error) from error
    return module.to(device)


def does_not_fit(path: str | os.PathLike[str], cls: type[LightningModule], error: Exception) -> CheckpointError:
    """Return the error for a checkpoint whose plan or weights do not fit the class that is to load it.

    Args:
        path: the checkpoint.
        cls: the class.
        error: what went wrong.
    """
    builds_later = all(cls.setup is not base.setup for base in LIGHTNING_MODULES)  # type: ignore[attr-defined]
    hint = (
        f" `{cls.__name__}.setup` does not run when a checkpoint is loaded: if it builds layers, build them in "
        "`configure_model`, which runs."
    )
    return CheckpointError(
        f"{os.fspath(path)} does not fit `{cls.__name__}`: it belongs to another model, or to one with other "
        f"arguments. {error}{hint if builds_later else ''}"
    )


def _read_small_folder(folder: Path, map_location: Any) -> dict[str, Any]:
    checkpoint = read_folder(folder, map_location)
    content = stored_content(checkpoint)
    if content is None:
        raise CheckpointError(f"{folder} holds no compaction plan: it was written before the compaction.")
    plans = [plan for entry in entries(content).values() for plan in entry["plans"]]
    check_plans(plans, sum(path.stat().st_size for path in folder.iterdir()))
    return {**checkpoint, KEY: content}


def _check_call(path: Any, cls: Any) -> None:
    """Check the arguments of `load_compacted` for likely mistakes."""
    if isinstance(path, type):
        raise CheckpointError(f"The path comes first: `load_compacted(path, {path.__name__})`.")
    if path is None:
        raise CheckpointError(
            "The path is None: `ModelCompaction.checkpoint_path` is None before the end of the fit, and if nothing was "
            "masked, so that nothing was compacted."
        )
    _check_class(cls)


def _check_class(cls: Any) -> None:
    if not isinstance(cls, type) or not issubclass(cls, LIGHTNING_MODULES):
        description = f"the class {cls.__name__}" if isinstance(cls, type) else f"a {type(cls).__name__}"
        raise CheckpointError(
            f"`LightningModuleClass` takes the class of the LightningModule that was trained, got {description}. For a "
            "plain model, use `engine.load_compacted_state(model, path)`."
        )


def instantiate(
    cls: type[AnyModule], checkpoint: Mapping[str, Any], init_kwargs: Mapping[str, Any], path: str
) -> AnyModule:
    """Build a LightningModule from the hyperparameters in a checkpoint, as Lightning does.

    Args:
        cls: its class.
        checkpoint: the content of a file.
        init_kwargs: arguments that are missing in the checkpoint or override it.
        path: the file, for messages.

    Raises:
        CheckpointError: if it is no LightningModule, or an argument is missing.
    """
    _check_class(cls)
    accepted = inspect.signature(cls.__init__).parameters
    hparams: dict[str, Any] = dict(checkpoint.get("hyper_parameters", {}))
    name = str(checkpoint.get("hparams_name"))
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    saved = {name: hparams} if name in accepted and name != "kwargs" else hparams
    arguments = {key: value for key, value in saved.items() if takes_any or key in accepted} | dict(init_kwargs)
    _check_arguments(cls, arguments, path)
    module = cls(**arguments)
    module.configure_model()
    return module


def _check_arguments(cls: Callable[..., Any], arguments: Mapping[str, Any], path: str) -> None:
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        raise CheckpointError(
            f"`{cls.__name__}` cannot be built from the hyperparameters in {path}: {error}. Pass missing arguments "
            "by name, or call `self.save_hyperparameters()` in its `__init__` before training."
        ) from error

"""Support for compacted checkpoints in Lightning's own loading: ``ckpt_path=...`` and ``load_from_checkpoint``."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from typing_extensions import override

from engine.compaction import KEY, adapt, is_compacted
from engine.errors import CheckpointError
from engine.files import (
    content_of,
    is_compacted_content,
    read_archive,
    read_bytes,
    read_checkpoint,
    stored_content,
    with_metadata,
)
from engine.surgery import is_span
from lightning_compress.trainer.folders import checked_folders
from lightning_compress.trainer.packages import LIGHTNING_MODULES, classes
from lightning_compress.trainer.strategy import parallel, shards

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule

    _Base = LightningModule
else:
    _Base = object

__all__ = ["Compactable", "follow_checkpoints"]

_READ = "lightning_compress_read"  # marks a checkpoint that our reader has already checked


class Compactable(_Base):
    """Mixin for LightningModules that load compacted checkpoints like any others.

    ``MyModule.load_from_checkpoint(path)`` and ``trainer.test(module, ckpt_path=path)`` accept compacted and
    uncompacted checkpoints. Checkpoints that Lightning writes of the compacted module load again, and so do the weights
    returned from the processes of ``ddp_spawn``, ``ddp_fork`` and notebooks.

    Example:
        >>> from pytorch_lightning import LightningModule
        >>> class MyModule(Compactable, LightningModule):
        ...     pass
        >>> module = MyModule.load_from_checkpoint("compacted.ckpt")  # doctest: +SKIP
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        follow_checkpoints(self)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if any(base in LIGHTNING_MODULES for base in cls.__mro__[: cls.__mro__.index(Compactable)]):
            raise TypeError(
                f"`Compactable` must be the first base class: `class {cls.__name__}(Compactable, LightningModule)`."
            )

    @classmethod
    @override
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint as Lightning does, after checking local files and their digests.

        With ``weights_only=False``, nothing is checked.

        Raises:
            CheckpointError: if the file is damaged.
        """
        if kwargs.get("weights_only") is not False and isinstance(checkpoint_path, (str, os.PathLike)):
            if Path(checkpoint_path).is_file():
                checkpoint_path = _checked_bytes(checkpoint_path)
        if "weights_only" not in inspect.signature(super().load_from_checkpoint).parameters:
            kwargs.pop("weights_only", None)  # Lightning before 2.6 would pass it to `__init__`
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Attach the plans to the state dict, for the hook that loads the weights."""
        super().on_load_checkpoint(checkpoint)
        if KEY in checkpoint:
            checkpoint["state_dict"] = with_metadata(checkpoint["state_dict"], checkpoint[KEY])

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the plans under their own key."""
        super().on_save_checkpoint(checkpoint)
        if is_compacted(self):
            checkpoint.setdefault(KEY, content_of(self))


def follow_checkpoints(pl_module: LightningModule) -> LightningModule:
    """Reshape a LightningModule to the checkpoints that a Trainer restores.

    ``ModelCompaction`` calls this in ``setup``, the mixin `Compactable` in ``__init__``. From then on, ``ckpt_path=``
    only loads local files of plain values and tensors, with every version of Lightning, so that no code in them runs.
    Allow further types with ``torch.serialization.add_safe_globals``, or, from Lightning 2.6 on, everything with
    ``weights_only=False``.

    Args:
        pl_module: the LightningModule.

    Returns:
        The LightningModule.
    """
    for connector in classes("tree.trainer.connectors.checkpoint_connector", "_CheckpointConnector"):
        _check_first(connector)
    if not _follows(pl_module):
        pl_module.register_load_state_dict_pre_hook(_restore)
    return pl_module


def _follows(pl_module: LightningModule) -> bool:
    return any(getattr(hook, "hook", None) is _restore for hook in pl_module._load_state_dict_pre_hooks.values())


def _checked_bytes(path: str | os.PathLike[str]) -> BinaryIO:
    """Return the checked content of a file, so that later writes by other processes do not matter."""
    content, file = read_bytes(path)
    is_compacted_content(content, os.fspath(path), os.path.getsize(path))
    return file


@functools.cache
def _check_first(connector: Any) -> None:
    """Make Lightning read files with our reader, because before 2.6 it unpickles arbitrary content."""
    start = connector.resume_start

    @functools.wraps(start)
    def resume_start(self: Any, checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        trusted = False in (*args[:1], kwargs.get("weights_only"))
        if checkpoint_path and shards(self.trainer) and _follows(self.trainer.lightning_module):
            rest = _rest_of(checkpoint_path, trusted)
            parallel(self.trainer).restore_shapes(stored_content(rest))  # type: ignore[attr-defined]
            checked = Path(checkpoint_path).is_dir() and not trusted
            with _loading_folder(self.trainer.strategy, rest) if checked else contextlib.nullcontext():
                start(self, checkpoint_path, *args, **kwargs)
            return
        if checkpoint_path and not trusted and _follows(self.trainer.lightning_module):
            if Path(checkpoint_path).is_file():
                with _loading(self.trainer.strategy, _checked(checkpoint_path)):
                    start(self, checkpoint_path, *args, **kwargs)
                self._loaded_checkpoint[_READ] = True
                return
        start(self, checkpoint_path, *args, **kwargs)

    connector.resume_start = resume_start


def _rest_of(path: str | os.PathLike[str], trusted: bool) -> Any:
    """Read what a checkpoint (a file or a folder of `torch.distributed.checkpoint`) holds beside weights."""
    if Path(path).is_dir():
        path = Path(path, "meta.pt")
        return torch.load(path, weights_only=False) if trusted else read_archive(path)
    return torch.load(path, weights_only=False, map_location="cpu") if trusted else _checked(path)


def _checked(path: str | os.PathLike[str]) -> Any:
    """Read a file, and check its plans against their digests."""
    content = read_archive(path)
    is_compacted_content(content, os.fspath(path), os.path.getsize(path))
    return content


@contextlib.contextmanager
def _loading(strategy: Any, content: Any) -> Iterator[None]:
    """Make a strategy return content that was already read, so that the file is read once."""
    strategy.load_checkpoint = lambda *args, **kwargs: content
    try:
        yield
    finally:
        del strategy.load_checkpoint


@contextlib.contextmanager
def _loading_folder(strategy: Any, rest: Any) -> Iterator[None]:
    """Make a strategy read the shards of a folder by `CheckedReader`; the rest was already read."""
    load_checkpoint = strategy.load_checkpoint

    def loaded(*args: Any, **kwargs: Any) -> dict[str, Any]:
        with checked_folders():
            load_checkpoint(*args, **kwargs)
        return dict(rest)

    strategy.load_checkpoint = loaded
    try:
        yield
    finally:
        del strategy.load_checkpoint


def _restore(
    module: LightningModule, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *rest: Any
) -> None:
    """Reshape a module to the state that it is about to load, as a hook of ``load_state_dict``."""
    restored = _restored(module)
    content = None if restored is None else restored.get(KEY)
    if content is not None:
        differing = sorted(name for name in set(state_dict) ^ set(module.state_dict()) if not is_span(name))
        if module.strict_loading and differing:
            raise CheckpointError(f"The names of the weights differ: {', '.join(differing[:4])}.")
        state_dict = with_metadata(state_dict, content)
        local_metadata = {KEY: content}
    adapt(module, state_dict, prefix, local_metadata, **_advice(module))


def _advice(module: LightningModule) -> dict[str, str]:
    """Return advice on testing the compacted model, for a module that a checkpoint restores to its old size."""
    trainer: Any = getattr(module, "_trainer", None)
    kind, path = type(module).__name__, None if trainer is None else trainer.ckpt_path
    if path is None or trainer.state.fn is None or trainer.state.fn.value == "fit":
        return {}
    run = trainer.state.fn.value
    compactions = [callback for callback in trainer.callbacks if hasattr(callback, "certificate")]  # `ModelCompaction`
    written = next((callback.checkpoint_path for callback in compactions if callback.checkpoint_path), None)
    now = f"trainer.{run}(module, ckpt_path={written!r})" if written else f"trainer.{run}(load_compacted(...))"
    return {
        "advice": f"{os.path.basename(path)} was written before the compaction, so this run uses the uncompacted "
        f"network. `{now}` runs the compacted checkpoint; `compact_checkpoint({os.fspath(path)!r}, {kind}, "
        "'small.ckpt')` compacts this file."
    }


def _restored(module: LightningModule) -> Mapping[str, Any] | None:
    """Return the checkpoint that the module's Trainer is restoring, checked if it is a local file."""
    trainer: Any = getattr(module, "_trainer", None)
    loaded: Mapping[str, Any] = {} if trainer is None else trainer._checkpoint_connector._loaded_checkpoint
    content = stored_content(loaded)
    if content is None:
        return None
    path = trainer.ckpt_path
    if _READ in loaded or path is None or not Path(path).is_file():
        return {**loaded, KEY: content}
    return read_checkpoint(path)  # the user trusts the rest of the file

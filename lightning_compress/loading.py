"""Compacted checkpoints in Lightning's own ways of loading: ``ckpt_path=...`` and ``load_from_checkpoint``."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from engine.compaction.follow import follow
from engine.compaction.history import KEY, is_compacted
from engine.errors import CheckpointError
from engine.files.archive import check_archive
from engine.files.checkpoint import content_of, is_compacted_file, read_checkpoint, told, with_metadata
from lightning_compress.packages import LIGHTNING_MODULES, classes

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule

    _Base = LightningModule
else:
    _Base = object

__all__ = ["Compactable", "follow_checkpoints"]


class Compactable(_Base):
    """Mixin of a LightningModule that loads compacted checkpoints like any others.

    ``MyModule.load_from_checkpoint(path)`` and ``trainer.test(module, ckpt_path=path)`` then take compacted and
    un-compacted checkpoints alike, every checkpoint that Lightning writes of the compacted module loads again, and so
    do the weights that come back from the processes of ``ddp_spawn``, ``ddp_fork`` and notebooks.

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
            raise TypeError(f"`Compactable` comes first: `class {cls.__name__}(Compactable, LightningModule)`.")

    @classmethod
    @override
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load as Lightning does. A local file is checked first, its digests too, unless ``weights_only=False``.

        Raises:
            CheckpointError: if it is damaged.
        """
        if kwargs.get("weights_only") is not False and isinstance(checkpoint_path, (str, os.PathLike)):
            if Path(checkpoint_path).is_file():
                is_compacted_file(checkpoint_path)
        if "weights_only" not in inspect.signature(super().load_from_checkpoint).parameters:
            kwargs.pop("weights_only", None)  # Lightning before 2.6 would hand it on to `__init__`
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Hand the plans on to where the weights are loaded."""
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
    """Let a LightningModule take the shapes of the checkpoints that a Trainer restores.

    ``ModelCompaction`` does this in ``setup``, the mixin `Compactable` when it is built. From then on, ``ckpt_path=``
    takes local files of plain values and tensors only, on every version of Lightning: no code in them runs. What else
    such a file is to hold is declared with ``torch.serialization.add_safe_globals``, or vouched for, in Lightning from
    2.6 on, with ``weights_only=False``.

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


@functools.cache
def _check_first(connector: Any) -> None:
    """Let Lightning check a file before it unpickles it, which versions before 2.6 do whatever it holds."""
    start = connector.resume_start

    @functools.wraps(start)
    def resume_start(self: Any, checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        vouched_for = False in (*args[:1], kwargs.get("weights_only"))
        if checkpoint_path and not vouched_for and _follows(self.trainer.lightning_module):
            if Path(checkpoint_path).is_file():
                check_archive(checkpoint_path)
        start(self, checkpoint_path, *args, **kwargs)

    connector.resume_start = resume_start


def _restore(
    module: LightningModule, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *rest: Any
) -> None:
    """Reshape a module for what it is about to load; a hook of ``load_state_dict``."""
    restored = _restored(module)
    content = None if restored is None else restored.get(KEY)
    if content is not None:
        if module.strict_loading and (odd := sorted(set(state_dict) ^ set(module.state_dict()))):
            raise CheckpointError(f"The names of the weights differ: {', '.join(odd[:4])}.")
        state_dict = with_metadata(state_dict, content)
        local_metadata = {KEY: content}
    follow(module, state_dict, prefix, local_metadata)


def _restored(module: LightningModule) -> Mapping[str, Any] | None:
    """The checkpoint that the module's Trainer is restoring just now, checked where it is a local file."""
    trainer: Any = getattr(module, "_trainer", None)
    loaded: Mapping[str, Any] = {} if trainer is None else trainer._checkpoint_connector._loaded_checkpoint
    if told(loaded) is None:
        return None
    path = trainer.ckpt_path
    return read_checkpoint(path) if path is not None and Path(path).is_file() else loaded

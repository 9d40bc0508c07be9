"""Offline compaction of checkpoints, also of fits under FSDP or without our callbacks."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import engine
from engine.bounds import check_kinds
from engine.compaction import KEY, entries
from engine.errors import CheckpointError, EngineError, InputError
from engine.files import UNREADABLE, checked, content_of, load_state, read_any, stored_content
from lightning_compress.checkpoints.compacted import does_not_fit, instantiate, readable, write
from lightning_compress.checkpoints.folders import read_folder
from lightning_compress.trainer.target import find_model, from_shape, to_device

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule

    AnyModule = TypeVar("AnyModule", bound=LightningModule)

__all__ = ["compact_checkpoint", "load_masked"]

# Entries that Lightning stores for resuming; they do not fit a model of other shapes.
_OF_TRAINING = ("optimizer_states", "lr_schedulers", "callbacks", "MixedPrecision", "MixedPrecisionPlugin")


def compact_checkpoint(
    path_in: str | os.PathLike[str],
    LightningModuleClass: type[AnyModule],
    path_out: str | os.PathLike[str],
    example_input: Any = None,
    *,
    masks: Any = None,
    model: str | None = None,
    confidence: int = 8,
    map_location: Any = "cpu",
    **init_kwargs: Any,
) -> AnyModule:
    """Remove masked and zero channels from a checkpoint, verify the result, and write the compacted checkpoint.

    Args:
        path_in: a Lightning checkpoint, masked by our callbacks, by `torch.nn.utils.prune` or `ModelPruning`, or with
            channels that are zero for any other reason; a compacted one, to remove more; or the folder of a sharded
            FSDP checkpoint.
        LightningModuleClass: the class that was trained.
        path_out: the compacted checkpoint, written atomically; may be ``path_in``. It does not contain states of
            optimizers, schedulers and callbacks.
        example_input: a tensor, a tuple of arguments, a mapping of keywords, or a shape; ``None``: the module's
            ``example_input_array``.
        masks: ``{module: {parameter: 0/1 tensor}}`` relative to the model, or a file of these; ``None`` reads zeros
            from the weights.
        model: path of the model inside the LightningModule, if it is ambiguous.
        confidence: number of random samples to verify with; 0 skips verification.
        map_location: where to compute, as in ``torch.load``.
        init_kwargs: arguments of the class that are missing in the checkpoint or override it.

    Returns:
        The compacted LightningModule in eval mode.

    Raises:
        CheckpointError: if ``path_in`` cannot be used, or nothing in it can be removed; nothing is written then.
        VerificationError: if the compacted model does not match the masked one; nothing is written then.

    Example:
        >>> module = compact_checkpoint("masked.ckpt", MyLightningModule, "small.ckpt")  # doctest: +SKIP
    """
    check_kinds(compact_checkpoint, locals())
    module, checkpoint = load_masked(path_in, LightningModuleClass, map_location, **init_kwargs)
    target = find_model(module, model)[1]
    example = to_device(example_of(module, example_input), module.device)
    speedup = engine.ModelSpeedup(target, example, masks, map_location, confidence=confidence)
    speedup.speedup_model()
    if speedup.plan.is_empty:
        is_small = stored_content(checkpoint) is not None
        raise CheckpointError(
            f"Nothing in {os.fspath(path_in)} can be removed: no whole channel is zero or masked. "
            + ("It is compacted: `load_compacted` loads it. To remove more, prune" if is_small else "Prune")
            + " whole channels, as `ChannelPruning` does, or pass `masks`."
        )
    kept = {name: value for name, value in checkpoint.items() if name not in _OF_TRAINING}
    write({**readable(kept), "state_dict": module.state_dict(), KEY: content_of(module)}, Path(path_out))
    return module


def load_masked(
    path: str | os.PathLike[str], LightningModuleClass: type[AnyModule], map_location: Any = "cpu", **init_kwargs: Any
) -> tuple[AnyModule, dict[str, Any]]:
    """Load a checkpoint, and make masks of `torch.nn.utils.prune` permanent.

    Args:
        path: a Lightning checkpoint, compacted or not, or a folder of shards.
        LightningModuleClass: the class that was trained.
        map_location: as in ``torch.load``.
        init_kwargs: arguments of the class that are missing in the checkpoint or override it.

    Returns:
        The LightningModule in eval mode, and the content of the checkpoint.

    Raises:
        CheckpointError: if the file cannot be used, or belongs to another class.
    """
    checkpoint = _read(path, map_location)
    module = instantiate(LightningModuleClass, checkpoint, init_kwargs, os.fspath(path))
    content = stored_content(checkpoint)
    try:
        module.on_load_checkpoint(checkpoint)
        weights = _without_masks(checkpoint["state_dict"])
        load_state(module, weights, {} if content is None else entries(content))
    except (EngineError, *UNREADABLE) as error:
        raise does_not_fit(path, LightningModuleClass, error) from error
    return module.to(next((v.device for v in weights.values()), module.device)).eval(), checkpoint


def _read(path: str | os.PathLike[str], map_location: Any) -> dict[str, Any]:
    if Path(path).is_dir():
        return read_folder(Path(path), map_location)
    checkpoint = read_any(path, map_location)
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), Mapping):
        raise CheckpointError(f"{os.fspath(path)} is not a Lightning checkpoint: it has no `state_dict`.")
    if stored_content(checkpoint) is None:
        return checkpoint
    return checked(checkpoint, os.fspath(path), os.path.getsize(path))


def _without_masks(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the originals and masks that `torch.nn.utils.prune` stores by masked weights under the plain names."""
    plain_weights = OrderedDict((name, value) for name, value in weights.items() if f"{name}_orig" not in weights)
    plain_weights._metadata = getattr(weights, "_metadata", {})  # type: ignore[attr-defined]  # the modules' versions
    for name in [
        name for name in weights if name.endswith("_orig") and f"{name.removesuffix('_orig')}_mask" in weights
    ]:
        plain = name.removesuffix("_orig")
        plain_weights[plain] = plain_weights.pop(name) * plain_weights.pop(f"{plain}_mask")
    return plain_weights


def example_of(module: LightningModule, example_input: Any) -> Any:
    """Return the example input of a LightningModule: the argument, or its ``example_input_array``.

    Raises:
        InputError: if there is neither.
    """
    example = module.example_input_array if example_input is None else from_shape(example_input)
    if example is None:
        raise InputError(
            f"There is no example input: `{type(module).__name__}` has no `example_input_array`. Pass one or its "
            "shape, as in `example_input=torch.ones(1, 3, 32, 32)`."
        )
    return example

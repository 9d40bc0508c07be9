"""The model and its example inputs: what is accepted, and how a call that fails is reported."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.nn.parameter import is_lazy

from engine.errors import InputError, TraceError
from engine.program.defaults import callers_defaults
from engine.program.entries import Entry
from engine.program.sharded import why_sharded
from engine.program.stored import distinct_modules, settled, stored_tensors
from engine.program.trees import map_tensors, tensors_in
from engine.running.evaluation import evaluating
from engine.running.process import seeded
from engine.source.sites import is_library

__all__ = [
    "NEEDS_DATA",
    "call_entry",
    "call_model",
    "check_model",
    "larger_inputs",
    "resolve_inputs",
    "recording_error",
]

NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException)
_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)


def resolve_inputs(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split example inputs into positional and keyword arguments.

    Args:
        example_inputs: a tensor is one argument; a tuple or list, positional arguments; a mapping, keywords.

    Raises:
        InputError: for None, or where there is no tensor anywhere, or none that has entries.
    """
    args: tuple[Any, ...] = () if isinstance(example_inputs, Mapping) else (example_inputs,)
    kwargs = dict(example_inputs) if isinstance(example_inputs, Mapping) else {}
    if isinstance(example_inputs, (tuple, list)):
        args = tuple(example_inputs)
    tensors = list(tensors_in((args, kwargs)))
    if not tensors:
        sizes = example_inputs if isinstance(example_inputs, (tuple, list)) else ()
        shape = sizes and all(type(n) is int for n in sizes)
        hint = f" For a shape, pass `torch.rand({', '.join(map(str, sizes))})`." if shape else ""
        raise InputError(
            f"The example input holds no tensor (got {type(example_inputs).__name__}); pass a tensor, a tuple of "
            f"positional arguments or a mapping of keyword arguments.{hint}"
        )
    if not any(tensor.numel() for tensor in tensors):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:3])
        raise InputError(f"The example input is empty: its shape is {shapes}. Pass at least one sample.")
    return args, kwargs


def check_model(model: Any) -> None:
    """Refuse what is not a module whose Python code runs.

    Raises:
        InputError: for a class in place of an instance, for TorchScript, for parameters that are spread over processes,
            and for anything else.

    Example:
        >>> check_model(nn.Linear(1, 1))
    """
    if isinstance(model, type):
        raise InputError(f"The model is the class {model.__name__}; pass an instance, `{model.__name__}(...)`.")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError("The model is TorchScript, which cannot lose channels; pass the module that it was made from.")
    if not isinstance(model, nn.Module):
        raise InputError(f"The model is a {type(model).__name__}, and not an `nn.Module`.")
    with settled(model):
        _check_parts(model)


def _check_parts(model: nn.Module) -> None:
    """Refuse sharded parameters, lazy or scripted layers, and layers without entries."""
    sharded = why_sharded(model)
    if sharded is not None:
        raise InputError(sharded)
    lazy = next((name for name, tensor in stored_tensors(model).items() if is_lazy(tensor)), None)
    if lazy is not None:
        raise InputError(f"{lazy!r} has no shape yet: run the model once, so that its lazy layers get their sizes.")
    for name, module in distinct_modules(model).items():
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{name!r} is TorchScript, which cannot lose channels; put the module there that it was made from."
            )
        weight = module._parameters.get("weight") if isinstance(module, _LAYERS) else None
        if weight is not None and not weight.numel():
            raise InputError(
                f"{name!r} is a layer without entries: its weight has the shape {tuple(weight.shape)}. Replace it with "
                "`nn.Identity()`, or with what the model computes without it."
            )


def call_model(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: bool = False) -> Any:
    """Run the model and turn whatever its forward raises into an error that names the inputs.

    Args:
        model: the model.
        args, kwargs: its arguments.
        batch: whether they are a batch of the user's, and not the example.
    """
    try:
        with callers_defaults():
            return model(*args, **kwargs)
    except (*NEEDS_DATA, TraceError):
        raise
    except Exception as error:
        shapes = ", ".join(
            f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors_in((args, kwargs))
        )
        what, inputs = ("a batch", "batches") if batch else ("the example input", "example inputs")
        raise TraceError(
            f"{type(model).__name__} rejected {what} ({shapes}): {type(error).__name__}: {error}. "
            f"Pass {inputs} that the model accepts."
        ) from error


def recording_error(error: TraceError, model: nn.Module, args: Any, kwargs: Any) -> TraceError:
    """Return the error of a recording; another one if the model accepts the inputs outside of a recording.

    Args:
        error: raised while the model was recorded.
        model, args, kwargs: the recorded call.
    """
    cause = error.__cause__
    if cause is None:
        return error
    try:
        with evaluating(model, arguments=(args, kwargs)), seeded(), torch.no_grad():
            model(*args, **kwargs)
    except Exception:  # of any kind: the model's own code rejects the inputs in either case
        return error
    frames = traceback.extract_tb(cause.__traceback__)
    own = [frame for frame in frames if not is_library(frame.filename)]
    place = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    return TraceError(
        f"{type(model).__name__} accepts the example input, but cannot be recorded: {type(cause).__name__}: "
        f"{str(cause).rstrip('.')}{place}. Try the module that runs this line in `opaque`, which records it as one "
        "node and keeps what it reads whole, and report this."
    )


def call_entry(entry: Entry, args: Any, kwargs: Any) -> Any:
    """Run an entry and turn whatever it raises into an error that names it."""
    try:
        return entry.run(args, kwargs)
    except (*NEEDS_DATA, TraceError):
        raise
    except Exception as error:
        raise TraceError(
            f"The entry {entry.name!r} cannot be recorded: {type(error).__name__}: {error}. Remove whatever needs more "
            "than its arguments, or omit the entry if what it reads does not matter."
        ) from error


def larger_inputs(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return inputs that are larger in the dimensions behind the channels: 64 and up by 32, less by a factor of two."""

    def grown(tensor: Tensor) -> Tensor:
        sizes = [n + 32 if n >= 64 else 2 * n for n in tensor.shape[2:]]
        return tensor.new_zeros([*tensor.shape[:2], *sizes]) if sizes and tensor.is_floating_point() else tensor

    return map_tensors(args, grown), map_tensors(kwargs, grown)

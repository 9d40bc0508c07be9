"""User-facing masks: ``{module name: {parameter name: 0/1 tensor}}``, a file of these, or pruning buffers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.bounds import check_kinds
from engine.errors import MaskError
from engine.program.stored import modules_of, stored_tensors

__all__ = ["Masks", "ZEROS", "canonical_masks", "load_masks", "narrowed", "parameter_name", "read_masks"]

Masks = Mapping[str, Mapping[str, Tensor]]
"""Module name -> parameter name -> 0/1 tensor in full parameter shape; ``""`` is the root module.

A buffer with several dimensions, such as a table of positions, may be masked like a parameter.
"""

ZEROS = "zeros"
"""Value of ``masks`` that stands for "whatever is zero in the weights"."""

_NUMPY = frozenset({torch.float16, torch.float32, torch.float64})  # floating dtypes that numpy has, too
_UNSIGNED = frozenset({torch.uint16, torch.uint32, torch.uint64})
_FORMS = ("{0}", "{0}_orig", "{0}_g", "parametrizations.{0}.original0", "parametrizations.{0}.original")


def load_masks(masks: Any, map_location: Any = None) -> Masks:
    """Return masks, loaded from a file if a path is given (with ``weights_only=True``).

    Raises:
        MaskError: if the file cannot be read or does not contain masks.
    """
    if isinstance(masks, (str, os.PathLike)):
        try:
            masks = torch.load(masks, map_location=map_location, weights_only=True)
        except Exception as error:  # damaged files may raise anything
            raise MaskError(f"The mask file {os.fspath(masks)!r} cannot be read: {_reason(error)}") from error
    if not isinstance(masks, Mapping) or not all(isinstance(m, Mapping) for m in masks.values()):
        raise MaskError(
            "Masks are a mapping {module name: {parameter name: tensor}}, or the path of a file that holds one; "
            f"{_what_it_is(masks)}."
        )
    return masks


def _reason(error: Exception) -> str:
    """Return what is wrong with a file, without torch's advice to read it in another way."""
    text = str(error)
    lines = text.rpartition("WeightsUnpickler error: ")[2].splitlines()
    return lines[0] if lines else type(error).__name__


def _what_it_is(masks: Any) -> str:
    """Describe an invalid ``masks`` argument, with a hint how to write it."""
    if not isinstance(masks, Mapping):
        return f"got {type(masks).__name__}"
    name, value = next((str(name), value) for name, value in masks.items() if not isinstance(value, Mapping))
    module, dot, parameter = name.rpartition(".")
    fits = dot and parameter in ("weight", "bias")
    hint = f"{{{module!r}: {{{parameter!r}: …}}}}" if fits else f"{{{name!r}: {{'weight': …}}}}"
    return f"got dict with a {type(value).__name__} under {name!r}: write {hint}"


def parameter_name(module: str, parameter: str, parameters: Mapping[str, Any]) -> str | None:
    """Return the full name of a parameter, pruned or parametrised or not; None if there is none."""
    prefix = f"{module}." if module else ""
    return next((n for form in _FORMS if (n := prefix + form.format(parameter)) in parameters), None)


def narrowed(mask: Tensor) -> Tensor:
    """Return a view of size 1 along dimensions that an expanded tensor only repeats; a sparse mask becomes dense."""
    if mask.layout is not torch.strided:
        return mask.to_dense()
    for dim, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if stride == 0 and size > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask


def canonical_masks(masks: Masks, model: nn.Module) -> dict[str, Tensor]:
    """Validate masks against a model and return them by canonical parameter name, compact, bool.

    Args:
        masks: masks by module and parameter name.
        model: model that has what they mask. The names of a tied parameter share the product of their masks.

    Raises:
        MaskError: for an unknown module or parameter, a wrong shape, missing data, or entries other than 0 and 1.
    """
    modules = dict(modules_of(model))
    parameters = _maskable(model)
    first: dict[int, str] = {}
    for name, tensor in parameters.items():
        first.setdefault(id(tensor), name)
    compact_masks: dict[str, Tensor] = {}
    for module, entries in masks.items():
        if not isinstance(module, str):
            raise MaskError(f"The masks name a module {module!r}; names must be text, such as {str(module)!r}.")
        if module not in modules:
            raise MaskError(f"The masks name a module {module!r} that the model does not have{_like(module, modules)}.")
        for key, mask in entries.items():
            full = parameter_name(module, key, parameters)
            if full is None:
                have = ", ".join(sorted(n for n, _ in modules[module].named_parameters(recurse=False))) or "none"
                raise MaskError(f"The masks name a parameter {key!r} of {module!r}, which has: {have}.")
            clean = _checked(f"{module}.{key}" if module else key, mask, tuple(parameters[full].shape))
            canonical = first[id(parameters[full])]
            compact_masks[canonical] = clean & compact_masks[canonical] if canonical in compact_masks else clean
    return compact_masks


def _maskable(model: nn.Module) -> dict[str, Tensor]:
    """Return what may be masked, by name: parameters, and tables of floating-point numbers in buffers."""
    return {
        name: tensor
        for name, tensor in stored_tensors(model).items()
        if isinstance(tensor, nn.Parameter) or (tensor.is_floating_point() and tensor.ndim > 1)
    }


def _like(name: str, modules: Mapping[str, nn.Module]) -> str:
    tail = name.rpartition(".")[2]
    near = [n for n in modules if n and n.rpartition(".")[2] == tail][:3] or [n for n in modules if n][:3]
    return f" (it has {', '.join(map(repr, near))} …)" if near else ""


def _checked(name: str, mask: Any, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(mask, Tensor):
        raise MaskError(f"The mask of {name!r} is a {type(mask).__name__}, not a tensor.")
    if tuple(mask.shape) != shape:
        raise MaskError(f"The mask of {name!r} has shape {tuple(mask.shape)}; the parameter has {shape}.")
    if mask.is_meta:
        raise MaskError(f"The mask of {name!r} is on the meta device and has no entries; make it on a real one.")
    try:
        numbers = _numbers(mask.detach())
    except (RuntimeError, TypeError) as error:  # quantised, or of a dtype that has no ops
        raise MaskError(f"The mask of {name!r} is of {mask.dtype}, which cannot be read; make it bool.") from error
    kept = np.asarray(numbers != 0)
    if mask.is_complex() or mask.dtype != torch.bool and not (kept == numbers).all():
        raise MaskError(f"The mask of {name!r} has entries other than 0 and 1 (NaN counts as one); masks are 0/1.")
    return torch.from_numpy(kept)


def _numbers(mask: Tensor) -> Any:
    """Return the entries of a mask as an array, of size 1 along dimensions that only repeat them."""
    mask = narrowed(mask)
    if mask.is_floating_point() and mask.dtype.itemsize == 1:  # few ops support such floats
        mask = mask.float()
    if mask.dtype in _UNSIGNED:  # nor such integers
        mask = mask.long()
    mask = next(_uniform(mask), mask).cpu()
    return (mask.float() if mask.is_floating_point() and mask.dtype not in _NUMPY else mask).numpy()


def _uniform(mask: Tensor) -> Iterator[Tensor]:
    """Yield a mask of whole rows, or of whole columns, with size 1 along all other dimensions.

    Minimum and maximum of each row take one pass over the mask; NaN equals nothing.
    """
    for dim in (0, 1) if mask.ndim > 1 and not mask.is_complex() else ():
        size = mask.size(dim)
        if 1 < size < mask.numel():
            low, high = mask.movedim(dim, 0).reshape(size, -1).aminmax(dim=1)
            if torch.equal(low, high):
                yield low.reshape([size if d == dim else 1 for d in range(mask.ndim)])


def read_masks(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the masks that `torch.nn.utils.prune` stores in a model's buffers; empty if there are none.

    Args:
        model: it is only read; any model is fine.

    Returns:
        ``{module name: {parameter name: mask}}``, copies in full parameter shape, 0 or 1 in the parameter's dtype.

    Example:
        >>> from torch.nn.utils import prune
        >>> net = nn.Sequential(nn.Linear(2, 2))
        >>> _ = prune.custom_from_mask(net[0], "weight", torch.tensor([[1, 1], [0, 0]]))
        >>> read_masks(net)["0"]["weight"].tolist()
        [[1.0, 1.0], [0.0, 0.0]]
    """
    check_kinds(read_masks, locals())
    masks_by_module: dict[str, dict[str, Tensor]] = {}
    for module_name, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            key = name.removesuffix("_mask")
            if key != name and f"{key}_orig" in module._parameters:
                masks_by_module.setdefault(module_name, {})[key] = buffer.detach().clone()
    return masks_by_module

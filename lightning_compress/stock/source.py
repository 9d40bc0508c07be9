"""Export of a compacted network as a Python file and its weights, for networks without a configuration.

If arguments of its class describe the small network, the file calls the constructor. Otherwise `torch.export` exports
the network, and its program is written as a module class whose parameters have the small sizes as literals and the same
names as in the model, and whose forward calls the same ATen ops with the same arguments. Outputs are therefore equal
bit for bit. The batch size is dynamic.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from engine.bounds import check_kinds
from engine.errors import EngineError, InputError, VerificationError
from engine.files import check_writable, write_tensors
from engine.program import tensors_in
from engine.running import call_model
from engine.verification import rescaled_norms
from lightning_compress.checkpoints.export import another_batch, arguments_of, exported_program
from lightning_compress.stock.agreement import TOLERANCE, evaluating
from lightning_compress.stock.constructors import constructor_of
from lightning_compress.stock.emit import source_of
from lightning_compress.stock.inputs import random_image, seeded_on
from lightning_compress.stock.pretrained import best_fit, search_for

__all__ = ["imported", "save_stock"]

SOURCE, WEIGHTS = "network.py", "network.safetensors"
_MOST = 600  # limit of builds in the search for arguments, which fails for most sizes


_CALL = '''"""{kind} of {package} with other arguments; the weights are in the safetensors file beside this file.

    from safetensors.torch import load_file

    network = Network()
    network.load_state_dict(load_file("network.safetensors"))
"""

{imports}


def Network():
    """Return the network that lightning-compress made smaller."""
    return {call}
'''


def save_stock(
    model: nn.Module, directory: str | os.PathLike[str], *, example_input: Any = None, constructor: bool = True
) -> Path:
    """Write a network as plain PyTorch source, and its weights in the safetensors format.

    The folder then holds ``network.py`` and ``network.safetensors``. ``Network()`` in the file builds the network,
    whose ``load_state_dict`` accepts the weights under the same names as in the model. If the class belongs to an
    installed package, such as timm or torchvision, and arguments of its constructor describe the small network, the
    file calls the constructor. Otherwise ``Network`` is a class with literal sizes that only needs torch.

    Args:
        model: the model, compacted or not, which is not changed.
        directory: directory to write to; created if missing.
        example_input: example input of the model, as for ``engine.trace``, batch first; by default an image of the
            size in timm's ``model.pretrained_cfg``, or Lightning's ``example_input_array``.
        constructor: whether the file may call the constructor of a package; if False, it only needs torch.

    Returns:
        The path of ``network.py``.

    Raises:
        InputError: if an example is missing, or `torch.export` fails.
        VerificationError: if the file computes a different function; nothing is written then.

    Example:
        >>> save_stock(model, "small", example_input=images)  # doctest: +SKIP
        PosixPath('small/network.py')
    """
    check_kinds(save_stock, locals())
    # A second sample, because export would specialise a batch size of 1.
    example = another_batch(_example(model) if example_input is None else example_input)
    target = Path(directory)
    if target.exists() and not target.is_dir():
        raise InputError(f"{target} is a file, not a directory.")
    check_writable(target)
    with evaluating(model):
        text, tensors, tolerance = (_called(model, example) if constructor else None) or _recorded(model, example)
        with tempfile.TemporaryDirectory(prefix=".", dir=target.parent) as folder:
            Path(folder, SOURCE).write_text(text)
            weights = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
            write_tensors(weights, Path(folder, WEIGHTS), {"format": "pt"})
            _check(model, Path(folder, SOURCE), tensors, [example, another_batch(example)], tolerance)
            target.mkdir(exist_ok=True)
            for file in (SOURCE, WEIGHTS):
                os.replace(Path(folder, file), target / file)
    return target / SOURCE


Written = tuple[str, Mapping[str, Tensor], float]
"""Source, weights, and tolerance of the outputs relative to the largest."""


def _recorded(model: nn.Module, example: Any) -> Written:
    args, kwargs = arguments_of(example)
    return *source_of(_program(model, args, kwargs), type(model).__name__), 0.0


def _called(model: nn.Module, example: Any) -> Written | None:
    """Return a file that calls the constructor of the model's class; None if no arguments describe the model."""
    form, norms = constructor_of(model), rescaled_norms(model)
    if form is None or not all(norm.is_plain for norm in norms.values()):
        return None
    search = replace(search_for(model, form, norms), most=_MOST)
    candidates = search.solve()
    if search.score(candidates[0])[0]:
        return None
    try:
        fit, values = best_fit(model, form, norms, search, candidates, example)
    except EngineError:  # it computes a different function, or the example does not cover it
        return None
    source = form.source(values)
    if source is None:
        return None
    kind, package = form.cls.__name__, form.cls.__module__.partition(".")[0]
    call = source[1].replace("\n", "\n    ")
    text = _CALL.format(kind=kind, package=package, imports="\n".join(source[0]), call=call)
    return text, fit.stock.state_dict(), max(TOLERANCE, 2 * fit.error)


def _example(model: nn.Module) -> Any:
    shape: Any = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
    example: Any = getattr(model, "example_input_array", None)
    if shape is None and example is None:
        raise InputError(f"What does {type(model).__name__} take? Pass `example_input=`.")
    return random_image(model, shape) if example is None else example


def _program(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.export.ExportedProgram:
    try:
        return exported_program(model, args, kwargs, ("batch",))
    except Exception as error:  # torch's exporter and the model's own code may raise anything
        raise InputError(f"torch.export cannot export the model: {str(error).strip()[:2000]}") from error


def imported(path: Path) -> ModuleType:
    """Import a written file as a module."""
    spec = importlib.util.spec_from_file_location("network", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check(model: nn.Module, path: Path, tensors: Mapping[str, Tensor], batches: list[Any], tolerance: float) -> None:
    """Run the file and compare it with the model, bit for bit if the tolerance is zero.

    Raises:
        VerificationError: if the outputs differ.
    """
    network = imported(path).Network()
    network.load_state_dict(dict(tensors))
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    network = network.to(device).eval()
    for batch in batches:
        args, kwargs = arguments_of(batch)
        with torch.no_grad():
            expected, actual = _outputs(model, args, kwargs), _outputs(network, args, kwargs)
        if len(expected) != len(actual) or not all(
            _same(*pair, tolerance) for pair in zip(expected, actual, strict=True)
        ):
            shapes = [list(tensor.shape) for tensor in tensors_in(batch)]
            raise VerificationError(
                f"The source of {type(model).__name__} computes a different function than the model on inputs of "
                f"{shapes}. Does its forward have data-dependent control flow, or draw random numbers?"
            )


def _outputs(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    with seeded_on(model):
        return list(tensors_in(call_model(model, args, kwargs)))


def _same(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not tolerance or not one.is_floating_point():
        return torch.equal(one, other)
    return not bool(((one - other).abs() > tolerance * one.abs().max()).any()) and bool(other.isfinite().all())

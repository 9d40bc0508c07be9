"""A compacted network as a Python file beside its weights, for networks without a configuration.

Where arguments of its class describe the small network, the file calls the constructor. Else the network is recorded by
`torch.export`, and its program is written out: a module class whose parameters have the small sizes as literal numbers
and the names that they have in the model, and whose forward calls the same ATen ops with the same arguments. Outputs
are therefore equal bit by bit. The batch size is free.
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

from engine.errors import EngineError, InputError, VerificationError
from engine.files import write_tensors
from engine.program import tensors_in
from engine.recording import call_model
from engine.verification import rescaled_norms
from lightning_compress.checkpoints.export import another_batch, arguments_of, exported_program
from lightning_compress.stock.agreement import TOLERANCE, evaluating
from lightning_compress.stock.constructors import constructor_of
from lightning_compress.stock.emit import source_of
from lightning_compress.stock.inputs import random_image, seeded_on
from lightning_compress.stock.pretrained import best_fit, search_for

__all__ = ["imported", "save_stock"]

SOURCE, WEIGHTS = "network.py", "network.safetensors"
_MOST = 600  # networks that are built in search of arguments: most sizes are described by none


_CALL = '''"""{kind} of {package} with other arguments; the weights are in the file of safetensors beside this one.

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

    The folder then holds ``network.py`` and ``network.safetensors``. ``Network()`` of the file is the network, and its
    ``load_state_dict`` takes the weights, under the names that they have in the model. Where the class is one of an
    installed package, as timm or torchvision, and its constructor takes arguments that describe the small network,
    the file calls it. Else ``Network`` is a class with the sizes as they are, which needs torch alone.

    Args:
        model: compacted or not; it is recorded in eval mode and left as it was.
        directory: where to write; made where it is missing.
        example_input: what the model takes, in the form that ``engine.trace`` takes, batch first; by default an image
            of the size that timm notes in ``model.pretrained_cfg``, or Lightning's ``example_input_array``.
        constructor: whether the file may call the constructor of a package; False: it needs torch alone.

    Returns:
        The path of ``network.py``.

    Raises:
        InputError: where the package safetensors or an example is missing, or `torch.export` does not take the model.
        VerificationError: where the file computes something else; nothing is written then.

    Example:
        >>> save_stock(model, "small", example_input=images)  # doctest: +SKIP
        PosixPath('small/network.py')
    """
    example = another_batch(_example(model) if example_input is None else example_input)  # one would become a literal
    target = Path(directory)
    if target.exists() and not target.is_dir():
        raise InputError(f"{target} is a file, not a directory.")
    with evaluating(model):
        text, tensors, tolerance = (_called(model, example) if constructor else None) or _recorded(model, example)
        target.parent.mkdir(parents=True, exist_ok=True)
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
"""Source, weights, and how far outputs may be from those of the model, relative to the largest."""


def _recorded(model: nn.Module, example: Any) -> Written:
    args, kwargs = arguments_of(example)
    return *source_of(_program(model, args, kwargs), type(model).__name__), 0.0


def _called(model: nn.Module, example: Any) -> Written | None:
    """Return a file that calls the constructor of the model's class; None where no arguments describe the model."""
    form, norms = constructor_of(model), rescaled_norms(model)
    if form is None or not all(norm.is_plain for norm in norms.values()):
        return None
    search = replace(search_for(model, form, norms), most=_MOST)
    candidates = search.solve()
    if search.score(candidates[0])[0]:
        return None
    try:
        fit, values = best_fit(model, form, norms, search, candidates, example)
    except EngineError:  # it computes something else, or the example does not run all of it
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
    except Exception as error:  # torch's exporter raises all kinds, deep inside of the model's own code
        raise InputError(f"torch.export does not take the model: {str(error).strip()[:2000]}") from error


def imported(path: Path) -> ModuleType:
    """Return the module of a written file."""
    spec = importlib.util.spec_from_file_location("network", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check(model: nn.Module, path: Path, tensors: Mapping[str, Tensor], batches: list[Any], tolerance: float) -> None:
    """Run the file, and compare it with the model, bit by bit where the tolerance is zero.

    Raises:
        VerificationError: where it differs.
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
                f"The source of {type(model).__name__} computes something other than the model on inputs of {shapes}. "
                "Does its forward decide on numbers, or draw random ones?"
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

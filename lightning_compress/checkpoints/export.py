"""Export of compacted networks to ONNX, exported programs and TorchScript, with a comparison of the outputs."""

from __future__ import annotations

import importlib
import inspect
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from engine.bounds import check_kinds
from engine.errors import EngineError, InputError, VerificationError
from engine.files import check_writable
from engine.program import tensors_in
from engine.running import call_model, evaluating

__all__ = [
    "another_batch",
    "arguments_of",
    "difference",
    "export_onnx",
    "export_program",
    "export_torchscript",
    "exported_program",
]

DYNAMIC = ("batch", "size")
TOLERANCE = 1e-5


def export_program(
    model: nn.Module, path: str | os.PathLike[str], example_input: Any, dynamic: Sequence[str] = ("batch",)
) -> float:
    """Write an exported program (`torch.export`), run it, and compare it with the model.

    Args:
        model: the model, compacted or not; it is exported in eval mode and not changed.
        path: the file, ``*.pt2``.
        example_input: a tensor, a tuple of arguments, or a mapping of keywords, batch first.
        dynamic: dynamic sizes: ``"batch"``, and ``"size"``, the dimensions from the third on.

    Returns:
        The largest difference of the outputs, relative to the largest output, at the example's batch size and another,
        and with ``"size"`` at twice the size.

    Raises:
        InputError: if torch cannot export the model, with its message.
        VerificationError: if the outputs differ by more than 1e-5; no file is written then.
    """
    check_kinds(export_program, locals())

    def write(where: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        program = exported_program(model, args, kwargs, dynamic)
        torch.export.save(program, where)
        return torch.export.load(where).module()

    return _exported("torch.export", model, path, example_input, dynamic, write)


def export_onnx(
    model: nn.Module, path: str | os.PathLike[str], example_input: Any, dynamic: Sequence[str] = ("batch",)
) -> float:
    """Write an ONNX file, run it with ONNX Runtime, and compare it with the model.

    Requires the packages of the extra ``export``: ``pip install 'lightning-compress[export]'``.

    Args:
        model: the model, compacted or not; it is exported in eval mode and not changed.
        path: the file, ``*.onnx``.
        example_input: a tensor, a tuple of arguments, or a mapping of keywords, batch first.
        dynamic: dynamic sizes: ``"batch"``, and ``"size"``, the dimensions from the third on.

    Returns:
        The largest difference of the outputs, relative to the largest output, at the example's batch size and another,
        and with ``"size"`` at twice the size.

    Raises:
        InputError: if a package is missing, or torch cannot export the model, with its message.
        VerificationError: if the outputs differ by more than 1e-5; no file is written then.
    """
    check_kinds(export_onnx, locals())
    runtime = [_package(name) for name in ("onnx", "onnxscript", "onnxruntime")][-1]

    def write(where: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        program = exported_program(model, args, kwargs, dynamic)
        torch.onnx.export(program, dynamo=True, verbose=False).save(os.fspath(where))  # type: ignore[union-attr]
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = runtime.InferenceSession(os.fspath(where), options, providers=["CPUExecutionProvider"])
        names = [model_input.name for model_input in session.get_inputs()]

        def run(*args: Any, **kwargs: Any) -> list[Tensor]:
            values = [tensor.cpu().numpy() for tensor in tensors_in((args, kwargs))]
            return [torch.from_numpy(out) for out in session.run(None, dict(zip(names, values, strict=True)))]

        return run

    return _exported("ONNX", model, path, example_input, dynamic, write)


def export_torchscript(model: nn.Module, path: str | os.PathLike[str], example_input: Any) -> float:
    """Write a TorchScript file, run it, and compare it with the model.

    Args:
        model: the model, compacted or not; it is exported in eval mode and not changed.
        path: the file, ``*.pt``.
        example_input: a tensor, a tuple of arguments, or a mapping of keywords, batch first.

    Returns:
        The largest difference of the outputs, relative to the largest output, at the example's batch size and another.

    Raises:
        InputError: if TorchScript cannot compile the model, with its message.
        VerificationError: if the outputs differ by more than 1e-5; no file is written then.
    """
    check_kinds(export_torchscript, locals())

    def write(where: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.jit.* is deprecated")  # the caller chose TorchScript
            warnings.filterwarnings("ignore", message=".*to_torchscript.* has been deprecated")
            # A LightningModule refuses to be compiled in any other way, as it has no Trainer.
            own: Any = getattr(model, "to_torchscript", None)
            compiled = torch.jit.script(model) if own is None else own()
            compiled.save(os.fspath(where))
            loaded: Callable[..., Any] = torch.jit.load(os.fspath(where))
        return loaded

    return _exported("TorchScript", model, path, example_input, ("batch",), write)


def difference(model: nn.Module, other: Callable[..., Any], batches: Iterable[Any]) -> float:
    """Return the largest difference between the outputs of two models, relative to the largest output of the first.

    Args:
        model: the reference, in its current mode.
        other: another model or callable.
        batches: inputs, as for ``engine.trace``.

    Raises:
        VerificationError: if numbers or shapes of the outputs differ.

    Example:
        >>> one, other = nn.Linear(1, 1), nn.Linear(1, 1)
        >>> _ = other.load_state_dict(one.state_dict())
        >>> difference(one, other, [torch.ones(2, 1)])
        0.0
    """
    worst = 0.0
    for batch in batches:
        args, kwargs = arguments_of(batch)
        with torch.no_grad():
            expected, actual = (
                list(tensors_in(call_model(model, args, kwargs))),
                list(tensors_in(other(*args, **kwargs))),
            )
        if [t.shape for t in expected] != [t.shape for t in actual]:
            raise VerificationError(
                f"The outputs have shapes {[list(t.shape) for t in actual]}, not {[list(t.shape) for t in expected]}."
            )
        for one, two in zip(expected, actual, strict=True):
            if one.numel():
                scale = float(one.double().abs().max()) or 1.0
                worst = max(worst, float((one.double().cpu() - two.double().cpu()).abs().max()) / scale)
    return worst


def another_batch(example_input: Any) -> Any:
    """Append the first sample of an example to it, for another batch size.

    Example:
        >>> another_batch((torch.ones(2, 3), "flag"))[0].shape
        torch.Size([3, 3])
    """
    sizes = {t.shape[0] for t in tensors_in(example_input) if t.ndim}
    first = next(iter(t.shape[0] for t in tensors_in(example_input) if t.ndim), 0)
    if not sizes:
        raise InputError("The example input has no tensor with a batch dimension.")
    return apply_to_collection(
        example_input, Tensor, lambda t: torch.cat([t, t[:1]]) if t.ndim and t.shape[0] == first else t
    )


def another_size(example_input: Any, times: int = 2) -> Any:
    """Repeat an example along each dimension from the third on, so that sizes stay multiples of the model's factors.

    Example:
        >>> another_size(torch.ones(2, 3, 4, 5)).shape
        torch.Size([2, 3, 8, 10])
    """

    def larger(tensor: Tensor) -> Tensor:
        for dim in range(2, tensor.ndim):
            tensor = torch.cat([tensor] * times, dim)
        return tensor

    return apply_to_collection(example_input, Tensor, larger)


def _elsewhere(example: Any, dynamic: Sequence[str]) -> Any:
    """Return the example at dynamic sizes that no comparison uses: one sample, three times as large.

    A batch of one leaves no guard in a program, because exporters assume that dynamic dimensions are larger.
    """
    first = next((t.shape[0] for t in tensors_in(example) if t.ndim), 0)
    if "batch" in dynamic:
        example = apply_to_collection(example, Tensor, lambda t: t[:1] if t.ndim and t.shape[0] == first else t)
    return another_size(example, 3) if "size" in dynamic else example


def _exported(
    what: str,
    model: nn.Module,
    path: str | os.PathLike[str],
    example_input: Any,
    dynamic: Sequence[str],
    write: Callable[[Path, tuple[Any, ...], dict[str, Any]], Callable[..., Any]],
) -> float:
    unknown = [name for name in dynamic if name not in DYNAMIC]
    if unknown:
        raise InputError(f"`dynamic` must contain 'batch' or 'size', got {unknown[0]!r}.")
    target = Path(path)
    if target.is_dir():
        raise InputError(f"{target} is a directory, not a file.")
    check_writable(target)
    # Exporters specialise a batch size of 1.
    example = another_batch(example_input) if "batch" in dynamic else example_input
    batches = [example, *([another_batch(example)] if "batch" in dynamic else [])]
    batches += [another_size(example)] if "size" in dynamic else []
    # The file name must be final, because a large ONNX file refers to a second file with the weights by name.
    with tempfile.TemporaryDirectory(prefix=".", dir=target.parent) as folder:
        with evaluating(model, arguments=example):
            # A model may cache values for the shape of its last input, as detectors cache a grid. A cache that fits the
            # example would become part of the program, and the exporter replaces it by tensors without data.
            _run(model, _elsewhere(example, dynamic))
            with evaluating(model, arguments=example):
                run = _written(what, write, Path(folder, target.name), *arguments_of(example))
            error = max(_compared(what, model, run, batch) for batch in batches)
        if not error <= TOLERANCE:
            raise VerificationError(f"The outputs of {what} differ from those of the model by {error:.1e}.")
        for file in sorted(Path(folder).iterdir(), key=lambda file: file.name == target.name):
            os.replace(file, target.with_name(file.name))
    return error


def _compared(what: str, model: nn.Module, run: Callable[..., Any], batch: Any) -> float:
    shapes = _run(model, batch)
    try:
        return difference(model, run, [batch])
    except EngineError:
        raise
    except Exception as error:  # each runtime has its own exceptions
        raise InputError(f"{what} runs at the size of the example, but not at {shapes}: {error}") from error


def _run(model: nn.Module, batch: Any) -> list[list[int]]:
    """Run the model on a batch, and return the shapes of the tensors in the batch."""
    shapes = [list(tensor.shape) for tensor in tensors_in(batch)]
    try:
        with torch.no_grad():
            call_model(model, *arguments_of(batch))
    except Exception as error:  # the model may raise anything
        raise InputError(
            f"The model itself rejects inputs of {shapes}: pass only supported sizes as `dynamic`. {error}"
        ) from error
    return shapes


def _written(
    what: str, write: Callable[..., Callable[..., Any]], path: Path, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    try:
        return write(path, args, kwargs)
    except EngineError:
        raise
    except Exception as error:  # torch's exporters and the model's own code may raise anything
        raise InputError(f"{what} cannot export the model: {str(error).strip()[:2000]}") from error


def exported_program(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: Sequence[str]
) -> torch.export.ExportedProgram:
    """Export a model with `torch.export`; ``dynamic`` as in `export_program`."""
    batch = next(t.shape[0] for t in tensors_in((args, kwargs)) if t.ndim)

    def dims(tensor: Tensor) -> dict[int, Any] | None:
        dynamic_dims: dict[int, Any] = {}
        if "batch" in dynamic and tensor.ndim and tensor.shape[0] == batch:
            dynamic_dims[0] = torch.export.Dim.DYNAMIC  # type: ignore[attr-defined]
        if "size" in dynamic:
            dynamic_dims |= dict.fromkeys(range(2, tensor.ndim), torch.export.Dim.DYNAMIC)  # type: ignore[attr-defined]
        return dynamic_dims or None

    torch.compiler.reset()  # older versions give up after eight recompilations
    arguments = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    return torch.export.export(model, args, kwargs, dynamic_shapes=_leaves(arguments, dims))


def _leaves(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Map a function over the tensors in containers; other leaves become None."""
    if isinstance(value, Mapping):
        return {name: _leaves(item, function) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_leaves(item, function) for item in value)
    return function(value) if isinstance(value, Tensor) else None


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert an example input to positional and keyword arguments."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(f"The package {name} is required: pip install 'lightning-compress[export]'.") from error

"""Save a compacted network of transformers or diffusers so that its own package loads it, without this one."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engine.errors import InputError, VerificationError
from engine.program import tensors_in
from engine.recording import call_model, resolve_inputs
from engine.verification import Rescaled, rescaled_norms
from lightning_compress.checkpoints.export import difference
from lightning_compress.stock import explain
from lightning_compress.stock.describe import Look, Search, look_at
from lightning_compress.stock.fields import Values, numbers, shown
from lightning_compress.stock.formats import Format, format_of
from lightning_compress.stock.inputs import random_like, seeded, sensible_inputs

__all__ = ["NOTE", "Saved", "evaluating", "save_pretrained"]

NOTE = "lightning_compress.json"
TOLERANCE = 1e-6
_TRIES = 12  # configurations with the right shapes that are run


@dataclass(frozen=True)
class Saved:
    """What `save_pretrained` wrote.

    Attributes:
        directory: where.
        config: the fields that changed, with their new values.
        error: the largest difference between the outputs of the saved network and of the one in memory on random
            inputs, relative to the largest output.
    """

    directory: str
    config: Mapping[str, int | float]
    error: float


def save_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    processor: Any = None,
    example_input: Any = None,
) -> Saved:
    """Save a compacted network of transformers or diffusers for ``from_pretrained``, under a plain configuration.

    The configuration that describes the small network is derived by building the network's class, not looked up. RMS
    norms become ordinary ones over the channels that are left, with another eps and weight, which compute the same.
    Nothing is written unless the class, built from the new configuration, loads every weight and computes what the
    model in memory does.

    Args:
        model: the network; it stays as it is. One that was not compacted is saved, too.
        directory: where to write ``config.json`` and the weights; made where it is missing.
        processor: a tokenizer or processor to save beside it.
        example_input: what the model takes, in the form that ``engine.trace`` takes; needed where random tokens,
            images or sounds do not run through it.

    Returns:
        The fields that changed, and the error.

    Raises:
        InputError: where a plain configuration cannot describe the network, naming the layer and what to change.
        VerificationError: where the class computes something else under every configuration with the right shapes.

    Example:
        >>> saved = save_pretrained(model, "small")  # doctest: +SKIP
        >>> saved.config, saved.error  # doctest: +SKIP
        ({'hidden_size': 32, 'num_attention_heads': 2, 'rms_norm_eps': 2e-06}, 1.2e-07)
    """
    form = format_of(model)
    norms = rescaled_norms(model)
    explain.check_norms(norms)
    with evaluating(model):
        example = sensible_inputs(model, form.config) if example_input is None else example_input
        stock, values, error = _described(model, form, norms, example)
        _write(model, stock, form, File(directory), processor, example, _note(values, error))
    return Saved(os.fspath(directory), {shown(path): value for path, value in values.items()}, error)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode inside the context."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        yield
    finally:
        for module in training:
            module.training = True


def _described(
    model: nn.Module, form: Format, norms: Mapping[str, Rescaled], example: Any
) -> tuple[nn.Module, Values, float]:
    """Return a new instance of the class that computes what the model does, its configuration, and the error."""
    eps = {(name, key): value for name, norm in norms.items() for key, value in norm.numbers.items()}
    target = look_at(model, eps)
    search = Search(form.build, numbers(form.config), target)
    candidates = search.solve()
    look = search.look(candidates[0])
    if look is None or search.score(candidates[0])[0]:
        explain.refuse(search, candidates[0], form)
    state, errors = _weights(model, norms), []
    for values in candidates[:_TRIES]:
        stock = _loaded(model, form, values, state)
        error = _error(model, stock, example)
        if error <= TOLERANCE:
            _check_reached(stock, search, values, example)
            return stock, values, error
        errors.append((error, values, stock))
    error, values, _ = min(errors, key=lambda entry: entry[0])
    explain.refuse_numbers(search, values, error, norms, form)


def _weights(model: nn.Module, norms: Mapping[str, Rescaled]) -> dict[str, Tensor]:
    state = dict(model.state_dict())
    for name, norm in norms.items():
        for key, value in norm.tensors.items():
            path = f"{name}.{key}" if name else key
            state[path] = value.to(state[path])
    return state


def _loaded(model: nn.Module, form: Format, values: Values, state: Mapping[str, Tensor]) -> nn.Module:
    stock = form.build(values, "cpu")
    parameter = next(model.parameters())
    stock = stock.to(device=parameter.device, dtype=parameter.dtype)
    stock.load_state_dict(dict(state))
    return stock.eval()


def _error(model: nn.Module, stock: nn.Module, example: Any) -> float:
    """Return the largest relative difference of the outputs, in the model's precision but at least in float32."""
    return difference(_Seeded(model), _Seeded(stock), [example, *_varied(model, example)])


def _varied(model: nn.Module, example: Any) -> Iterator[Any]:
    """Yield other inputs of the same shapes that the model accepts."""
    for integers in (True, False):
        batches = [random_like(example, seed, integers) for seed in (1, 2)]
        if all(_accepts(model, batch) for batch in batches):
            yield from batches
            return


def _accepts(model: nn.Module, batch: Any) -> bool:
    args, kwargs = resolve_inputs(batch)
    try:
        with torch.no_grad():
            call_model(model, args, kwargs)
    except Exception:  # of any kind: it is the model's own code, for which integers may be sizes
        return False
    return True


class _Seeded(nn.Module):
    """A model that draws the same random numbers each time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output."""
        with seeded():
            return self.inner(*args, **kwargs)


class _Reached(TorchFunctionMode):
    """Notes which tensors are passed to a function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.update(id(tensor) for tensor in tensors_in((args, kwargs)))
        return func(*args, **(kwargs or {}))


def _check_reached(stock: nn.Module, search: Search, values: Values, example: Any) -> None:
    """Refuse a comparison that did not run what was narrowed.

    Raises:
        InputError: naming a parameter.
    """
    args, kwargs = resolve_inputs(example)
    with torch.no_grad(), _Reached() as reached:
        call_model(stock, args, kwargs)
    base: Look | None = search.look({})
    assert base is not None
    for name, parameter in stock.named_parameters():
        if tuple(parameter.shape) != base.shapes[name] and id(parameter) not in reached.seen:
            raise InputError(
                f"The inputs do not reach {name!r}, which was narrowed, so nothing shows that it computes the same. "
                "Pass an `example_input` that runs it."
            )


def _note(values: Values, error: float) -> dict[str, Any]:
    return {"config": {shown(path): value for path, value in values.items()}, "error": error}


def _write(
    model: nn.Module,
    stock: nn.Module,
    form: Format,
    directory: File,
    processor: Any,
    example: Any,
    note: Mapping[str, Any],
) -> None:
    """Write everything beside the directory, load it as others do, compare once more, and only then move it there."""
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file, not a directory.")
    directory.parent.mkdir(parents=True, exist_ok=True)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        stock.generation_config = copy.deepcopy(generation)
    with tempfile.TemporaryDirectory(prefix=".", dir=directory.parent) as folder:
        stock.save_pretrained(folder)  # type: ignore[operator]
        parameter = next(stock.parameters())
        again = form.load(folder, parameter.dtype).to(parameter.device).eval()
        error = _error(model, again, example)
        if not error <= TOLERANCE:
            raise VerificationError(
                f"{form.cls.__name__}.from_pretrained loads another network than was saved: its outputs differ by "
                f"{error:.1e} of the largest. Does its own `save_pretrained` leave anything out?"
            )
        if processor is not None:
            processor.save_pretrained(folder)
        File(folder, NOTE).write_text(json.dumps(note, indent=2) + "\n")
        directory.mkdir(exist_ok=True)
        for file in sorted(File(folder).iterdir()):
            os.replace(file, directory / file.name)

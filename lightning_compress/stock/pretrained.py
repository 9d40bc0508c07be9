"""Save a compacted network of transformers or diffusers so that its own package loads it, without this one."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import Any

from torch import nn

from engine.errors import InputError, VerificationError
from engine.verification import Rescaled, rescaled_norms
from lightning_compress.stock import explain
from lightning_compress.stock.agreement import Fit, agree, check_reached, evaluating, fitted, measured
from lightning_compress.stock.describe import Search, differing, look_at
from lightning_compress.stock.fields import Values, shown
from lightning_compress.stock.formats import Form, Format, format_of
from lightning_compress.stock.inputs import sensible_inputs

__all__ = ["NOTE", "Saved", "best_fit", "save_pretrained", "search_for"]

NOTE = "lightning_compress.json"
_TRIES = 12  # configurations with the right shapes that are run


@dataclass(frozen=True)
class Saved:
    """What `save_pretrained` wrote.

    Attributes:
        directory: where.
        config: the fields that changed, with their new values.
        error: the largest difference between the outputs of the saved network and of the one in memory on random
            inputs, relative to the largest output. Where it is above 1e-6, the two agree to 1e-6 in float64, with
            weights that are not rounded, or norms share an eps.
        shared_eps: norms that the configuration gives another eps than they have in memory, with that number: one
            field is the eps of norms that lost channels and of norms that did not. The error is theirs.
    """

    directory: str
    config: Mapping[str, int | float]
    error: float
    shared_eps: Mapping[str, float] = field(default_factory=dict)


def save_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    processor: Any = None,
    example_input: Any = None,
    tolerance: float = 0.0,
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
        tolerance: error up to which norms may get another eps than they have, because one field of the configuration
            is the eps of norms that lost channels and of others that did not. By default that is refused; the message
            says how large the error is.

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
        fit, values = _described(model, form, norms, example, tolerance)
        changes = {shown(path): value for path, value in values.items()}
        saved = Saved(os.fspath(directory), changes, fit.error, fit.shared)
        _write(model, fit.stock, form, File(directory), processor, example, _note(saved))
    return saved


def search_for(model: nn.Module, form: Form, norms: Mapping[str, Rescaled], looks: Any = None) -> Search:
    """Return the search for the configuration that describes a model.

    Args:
        model: the narrowed network.
        form: how its class is built.
        norms: what ordinary norms need in place of the narrowed ones.
        looks: sizes by configuration that an earlier search of the same class has seen.
    """
    eps = {(name, key): value for name, norm in norms.items() for key, value in norm.numbers.items()}
    return Search(form.build, form.fields(), look_at(model, eps), looks={} if looks is None else looks)


def best_fit(
    model: nn.Module,
    form: Form,
    norms: Mapping[str, Rescaled],
    search: Search,
    candidates: Sequence[Values],
    example: Any,
    tolerance: float = 0.0,
) -> tuple[Fit, Values]:
    """Return a new instance of the class that computes what the model does, and its configuration.

    Args:
        model: the narrowed network.
        form: how its class is built.
        norms: what ordinary norms need in place of the narrowed ones.
        search: for the configuration.
        candidates: configurations under which all names and shapes agree, best first.
        example: what the model takes.
        tolerance: error up to which norms may share an eps.

    Raises:
        VerificationError: where it computes something else under all of them.
        InputError: where the example does not run what was narrowed.
    """

    def tried(several: Sequence[Values]) -> list[tuple[Fit, Values]]:
        fits: list[tuple[Fit, Values]] = []
        for values in several[:_TRIES]:
            look = search.look(values)
            assert look is not None
            fits.append((fitted(model, form, values, norms, differing(search.target, look), example), values))
            if fits[-1][0].exact and not fits[-1][0].shared:
                break
        return fits

    fits = tried(candidates)
    if not any(fit.exact for fit, _ in fits):
        fits += tried(search.others(candidates[0]))
    fit, chosen = min(fits, key=lambda pair: (not pair[0].exact, bool(pair[0].shared), pair[0].error))
    if not fit.exact:
        explain.refuse_numbers(search, chosen, fit, norms, form)
    if fit.shared and not fit.error <= tolerance:
        explain.refuse_shared(fit.shared, fit.error, norms, form)
    check_reached(fit.stock, search, chosen, example)
    return fit, chosen


def _described(
    model: nn.Module, form: Format, norms: Mapping[str, Rescaled], example: Any, tolerance: float
) -> tuple[Fit, Values]:
    search = search_for(model, form, norms)
    candidates = search.solve()
    if search.score(candidates[0])[0]:
        explain.refuse(search, candidates[0], form)
    return best_fit(model, form, norms, search, candidates, example, tolerance)


def _note(saved: Saved) -> dict[str, Any]:
    note = {"config": dict(saved.config), "error": saved.error}
    return note | ({"shared_eps": dict(saved.shared_eps)} if saved.shared_eps else {})


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
        error = measured(stock, again, example)
        if not agree(stock, again, error, example):
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

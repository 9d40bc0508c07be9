"""Saving of compacted networks of transformers or diffusers in a format that these packages load."""

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

from engine.bounds import check_kinds
from engine.errors import InputError, VerificationError
from engine.files import check_writable
from engine.verification import Rescaled, rescaled_norms
from lightning_compress.stock import explain
from lightning_compress.stock.agreement import Fit, agree, check_reached, evaluating, fitted, measured
from lightning_compress.stock.describe import Search, differing, look_at
from lightning_compress.stock.fields import Values, shown
from lightning_compress.stock.formats import Form, Format, format_of
from lightning_compress.stock.inputs import sensible_inputs

__all__ = ["NOTE", "Saved", "best_fit", "save_pretrained", "search_for"]

NOTE = "lightning_compress.json"
_TRIES = 12  # configurations with matching shapes to run


@dataclass(frozen=True)
class Saved:
    """Result of `save_pretrained`.

    Attributes:
        directory: the directory.
        config: the fields that changed, with their new values.
        error: the largest difference between the outputs of the saved network and of the one in memory on random
            inputs, relative to the largest output. If it exceeds 1e-6, the two agree to 1e-6 in float64 with unrounded
            weights, or norms share an eps.
        shared_eps: norms whose eps in the configuration differs from that in memory, with the configured value: one
            field is the eps of norms that lost channels and of norms that did not. They cause the error.
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
    """Save a compacted network of transformers or diffusers for ``from_pretrained``, with a plain configuration.

    The configuration is derived by building the network's class, not from a table. RMS norms become ordinary norms over
    the remaining channels, with a different eps and weight, which compute the same. Nothing is written unless the
    class, built from the new configuration, loads every weight and computes the same function as the model in memory.

    Args:
        model: the network, which is not changed; it need not be compacted.
        directory: directory for ``config.json`` and the weights; created if missing.
        processor: a tokenizer or processor to save with the network.
        example_input: example input of the model, as for ``engine.trace``; required if the model accepts no random
            tokens, images or audio.
        tolerance: maximum error that may result from norms sharing an eps, if one field of the configuration is the
            eps of norms that lost channels and of others that did not. By default this is an error, which says how
            large the difference is.

    Returns:
        The fields that changed, and the error.

    Raises:
        InputError: if no plain configuration describes the network, naming the layer and what to change.
        VerificationError: if the class computes a different function under every configuration with matching shapes.

    Example:
        >>> saved = save_pretrained(model, "small")  # doctest: +SKIP
        >>> saved.config, saved.error  # doctest: +SKIP
        ({'hidden_size': 32, 'num_attention_heads': 2, 'rms_norm_eps': 2e-06}, 1.2e-07)
    """
    check_kinds(save_pretrained, locals())
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
    """Create the search for the configuration that describes a model.

    Args:
        model: the narrowed network.
        form: how its class is built.
        norms: tensors and numbers of the ordinary norms that replace the narrowed ones.
        looks: cached sizes by configuration of an earlier search for the same class.
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
    """Return a new instance of the class that computes the same function as the model, and its configuration.

    Args:
        model: the narrowed network.
        form: how its class is built.
        norms: tensors and numbers of the ordinary norms that replace the narrowed ones.
        search: the search for the configuration.
        candidates: configurations under which all names and shapes match, best first.
        example: example input of the model.
        tolerance: maximum error that may result from norms sharing an eps.

    Raises:
        VerificationError: if it computes a different function under all of them.
        InputError: if the example does not use all narrowed parameters.
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
    check_reached(fit.stock, search, example)
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
    """Write everything to a temporary directory, load it as users do, compare again, and move it to ``directory``."""
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file, not a directory.")
    check_writable(directory)
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
                f"{form.cls.__name__}.from_pretrained loads a different network than was saved: its outputs differ by "
                f"{error:.1e} of the largest. Does the class's `save_pretrained` omit anything?"
            )
        if processor is not None:
            processor.save_pretrained(folder)
        File(folder, NOTE).write_text(json.dumps(note, indent=2) + "\n")
        directory.mkdir(exist_ok=True)
        for file in sorted(File(folder).iterdir()):
            os.replace(file, directory / file.name)

"""Errors that explain why no configuration describes a network, and what to change."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import NoReturn

from engine.errors import InputError, VerificationError
from engine.verification import Rescaled
from lightning_compress.stock.agreement import Fit
from lightning_compress.stock.describe import Search
from lightning_compress.stock.fields import Path, Shape, Values, changed_dims, generic, shown
from lightning_compress.stock.formats import Form

__all__ = ["check_norms", "refuse", "refuse_numbers", "refuse_shared"]


def check_norms(norms: Mapping[str, Rescaled]) -> None:
    """Check that ordinary norms can replace all narrowed norms.

    Raises:
        InputError: naming the first that cannot be replaced.
    """
    for name, norm in norms.items():
        if not norm.is_plain:
            raise InputError(
                f"{name!r} ({norm.kind}) keeps the statistics of {norm.size} channels {_lost(norm)}. Compact with "
                "`plain_norms=True`, which computes a different function than the masked model, or do not prune the "
                "channels that it normalizes: `exclude=` one of the layers that produce them."
            )


def _lost(norm: Rescaled) -> str:
    if not norm.kept:
        return "of which some were removed, and has no weight per channel that could be rescaled"
    return f"of which {norm.kept} remain, which no weights of an ordinary norm can express"


def refuse(search: Search, values: Values, form: Form) -> NoReturn:
    """Raise an error that names a parameter whose shape no configuration produces.

    Raises:
        InputError: always.
    """
    look, base = search.look(values), search.look({})
    assert look is not None and base is not None
    misfits = search.target.misfits(look)
    name, wanted, shape = misfits[0]
    layers = [
        layer for layer in dict.fromkeys(generic(parameter.rpartition(".")[0]) for parameter, _, _ in misfits) if layer
    ]
    whole = f"exclude the layers that do not fit (`exclude={layers}`)" if layers else "exclude the layers coupled to it"
    fields = _fields_of(search, name, wanted, shape)
    governed = f" They follow {_listed(fields)} of the configuration" if fields else " No field of it sets them"
    others = _others(search, name, fields)
    raise InputError(
        f"No {form.cls.__name__} configuration describes this network: {name!r} has shape {_shape(wanted)}, and "
        f"{_shape(shape)} under the nearest one ({_changes(values)}).{governed}{others}. Prune with equal amounts in "
        "the layers that share a field (`uniform=True`), to widths that fields can express (`round_to`), and whole "
        f"heads (`attention='heads'`); {whole}; or save `model.state_dict()`, which holds the plan."
    )


def refuse_numbers(search: Search, values: Values, fit: Fit, norms: Mapping[str, Rescaled], form: Form) -> NoReturn:
    """Raise an error with the distance of the class from the model under the nearest configuration.

    Raises:
        VerificationError: always.
    """
    shapes = f"{form.cls.__name__} has the shapes of this network under {_changes(values)}, and"
    if fit.failure:
        raise VerificationError(
            f"{shapes} does not run: {fit.failure.rstrip('.')}. Other numbers of the configuration depend on these "
            "sizes; exclude the layers that depend on them (`exclude=`), or save `model.state_dict()`, which holds "
            "the plan."
        )
    look = search.look(values)
    assert look is not None
    strays = [
        f"{module}.{key} is {value:g} there and {look.numbers[module, key]:g} under it"
        for (module, key), value in search.target.numbers.items()
        if (module, key) in look.numbers and look.numbers[module, key] != value and (module in norms or not norms)
    ]
    which = f" ({'; '.join(strays[:2])})" if strays else ""
    raise VerificationError(
        f"{shapes} computes a different function: outputs differ by {fit.error:.1e} of the largest{which}. No "
        "configuration describes pinned sizes or heads with pruned dimensions; save `model.state_dict()`, which holds "
        "the plan."
    )


def refuse_shared(shared: Mapping[str, float], error: float, norms: Mapping[str, Rescaled], form: Form) -> NoReturn:
    """Raise an error that names the norms that share an eps, with the resulting error.

    Raises:
        VerificationError: always.
    """
    names = ", ".join(repr(name) for name in list(shared)[:3]) + (" and others" if len(shared) > 3 else "")
    eps = next(iter(shared.values()))
    narrow = f", as {next(iter(norms))!r}" if norms else ""
    raise VerificationError(
        f"One field of {form.cls.__name__}'s configuration is the eps of norms that lost channels{narrow}, "
        f"and of norms that need a different one. With the best value, {names} get {eps:g}, and "
        f"outputs differ by {error:.1e} of the largest. Pass `tolerance={_above(error):g}` to accept this, do not "
        "prune the stream, or save `model.state_dict()`, which holds the plan."
    )


def _above(error: float) -> float:
    """Return the next power of ten.

    Example:
        >>> _above(3e-5)
        0.0001
    """
    return float(10.0 ** math.ceil(math.log10(error)))


def _fields_of(search: Search, name: str, wanted: Shape | None, shape: Shape | None) -> list[Path]:
    """Return the fields that determine a tensor's dimensions in which two shapes differ."""
    base = search.look({})
    assert base is not None
    own = base.shapes.get(name)
    singles = [key[0] for key in search.looks if len(key) == 1]
    changes = {
        path: changed_dims(own, look.shapes.get(name))
        for path, value in singles
        if (look := search.look({path: value})) is not None and look.shapes.get(name) != own
    }
    wrong = changed_dims(wanted, shape)
    return [path for path, dims in changes.items() if dims is None or wrong is None or dims & wrong] or [*changes]


def _others(search: Search, name: str, fields: list[Path]) -> str:
    """Describe the shapes of the same parameter in other layers, if they differ."""
    if not fields:
        return ""
    kind = generic(name)
    shapes = Counter(shape for other, shape in search.target.shapes.items() if generic(other) == kind)
    if len(shapes) < 2:
        return ""
    listed = ", ".join(f"{_shape(shape)} ({count}×)" for shape, count in shapes.most_common(4))
    return f", which has one value for all layers, while they have {listed}"


def _shape(shape: Shape | None) -> str:
    return "no place" if shape is None else str(list(shape))


def _changes(values: Values) -> str:
    return ", ".join(f"{shown(path)}={value:g}" for path, value in values.items()) or "the old one"


def _listed(paths: list[Path]) -> str:
    return ", ".join(f"`{shown(path)}`" for path in paths)

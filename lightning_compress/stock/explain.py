"""Why a plain configuration does not describe a network, and what to change."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import NoReturn

from engine.errors import InputError, VerificationError
from engine.verification import Rescaled
from lightning_compress.stock.agreement import Fit
from lightning_compress.stock.describe import Search
from lightning_compress.stock.fields import Path, Shape, Values, changed_dims, shown
from lightning_compress.stock.formats import Form

__all__ = ["check_norms", "refuse", "refuse_numbers", "refuse_shared"]


def check_norms(norms: Mapping[str, Rescaled]) -> None:
    """Refuse norms that an ordinary one does not replace.

    Raises:
        InputError: naming the first.
    """
    for name, norm in norms.items():
        if not norm.is_plain:
            raise InputError(
                f"{name!r} ({norm.kind}) keeps the statistics of {norm.size} channels {_lost(norm)}. Compact with "
                "`plain_norms=True`, which computes another function than the masked model, or leave the channels that "
                "it normalizes whole: `exclude=` one of the layers that produce them."
            )


def _lost(norm: Rescaled) -> str:
    if not norm.kept:
        return "of which some were removed, and has no weight per channel that could be rescaled"
    return f"while {norm.kept} are left, which no weights of an ordinary norm express"


def refuse(search: Search, values: Values, form: Form) -> NoReturn:
    """Say which parameter has a shape that no configuration gives it.

    Raises:
        InputError: always.
    """
    look, base = search.look(values), search.look({})
    assert look is not None and base is not None
    misfits = search.target.misfits(look)
    name, wanted, shape = misfits[0]
    layers = [
        layer for layer in dict.fromkeys(_generic(parameter.rpartition(".")[0]) for parameter, _, _ in misfits) if layer
    ]
    whole = f"leave the layers that do not fit whole (`exclude={layers}`)" if layers else "leave what it meets whole"
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
    """Say how far the class is from the model under the nearest configuration.

    Raises:
        VerificationError: always.
    """
    shapes = f"{form.cls.__name__} has the shapes of this network under {_changes(values)}, and"
    if fit.failure:
        raise VerificationError(
            f"{shapes} does not run: {fit.failure.rstrip('.')}. Other numbers of the configuration depend on these "
            "sizes; leave the layers that follow them whole (`exclude=`), or save `model.state_dict()`, which holds "
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
        f"{shapes} computes something else: outputs differ by {fit.error:.1e} of the largest{which}. Sizes that were "
        "pinned or heads whose dimensions were pruned are in no configuration; save `model.state_dict()`, which holds "
        "the plan."
    )


def refuse_shared(shared: Mapping[str, float], error: float, norms: Mapping[str, Rescaled], form: Form) -> NoReturn:
    """Say which norms share an eps, and how large the error is.

    Raises:
        VerificationError: always.
    """
    names = ", ".join(repr(name) for name in list(shared)[:3]) + (" and others" if len(shared) > 3 else "")
    eps = next(iter(shared.values()))
    narrow = f", as {next(iter(norms))!r}" if norms else ""
    raise VerificationError(
        f"One field of {form.cls.__name__}'s configuration is the eps of norms that lost channels{narrow}, "
        f"and of norms that need another one. Under the best value {names} get {eps:g}, and "
        f"outputs differ by {error:.1e} of the largest. Pass `tolerance={_above(error):g}` to save it like that, leave "
        "the stream unmasked, or save `model.state_dict()`, which holds the plan."
    )


def _above(error: float) -> float:
    """Return the next power of ten.

    Example:
        >>> _above(3e-5)
        0.0001
    """
    return float(10.0 ** math.ceil(math.log10(error)))


def _fields_of(search: Search, name: str, wanted: Shape | None, shape: Shape | None) -> list[Path]:
    """Return the fields that a tensor follows in the dimensions in which one shape differs from another."""
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
    """Return what the same parameter of other layers has, where layers differ."""
    if not fields:
        return ""
    generic = _generic(name)
    shapes = Counter(shape for other, shape in search.target.shapes.items() if _generic(other) == generic)
    if len(shapes) < 2:
        return ""
    listed = ", ".join(f"{_shape(shape)} ({count}×)" for shape, count in shapes.most_common(4))
    return f", which has one value for all layers, while they have {listed}"


def _generic(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _shape(shape: Shape | None) -> str:
    return "no place" if shape is None else str(list(shape))


def _changes(values: Values) -> str:
    return ", ".join(f"{shown(path)}={value:g}" for path, value in values.items()) or "the old one"


def _listed(paths: list[Path]) -> str:
    return ", ".join(f"`{shown(path)}`" for path in paths)

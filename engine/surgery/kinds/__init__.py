"""The kinds of exchanges, one file per kind: a file in this folder is a kind, and nothing else lists it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from engine.errors import PlanError
from engine.surgery.exchange import Decision, Exchange

__all__ = ["KINDS", "exchanges_from", "exchanges_of", "joined", "printed", "state_of"]

for _file in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_file.name)

KINDS: tuple[type[Exchange], ...] = tuple(
    sorted(
        (kind for kind in Exchange.__subclasses__() if kind.__module__.startswith(f"{__name__}.")),
        key=lambda kind: (kind.stage, kind.kind),
    )
)
"""In the order in which they are prepared."""

_BY_NAME = {kind.kind: kind for kind in KINDS}


def exchanges_of(decision: Decision) -> tuple[Exchange, ...]:
    """Return the exchanges that a decision requires."""
    return tuple(exchange for kind in KINDS for exchange in kind.planned(decision))


def state_of(exchange: Exchange) -> dict[str, Any]:
    """Return an exchange as primitives and tensors, with the name of its kind."""
    return {"kind": exchange.kind, **exchange.state_dict()}


def exchanges_from(states: Iterable[Mapping[str, Any]]) -> tuple[Exchange, ...]:
    """Load exchanges from what `state_of` returned.

    Raises:
        PlanError: if a kind is unknown, an exchange is damaged, or there are two of a kind for one module.
    """
    exchanges: dict[tuple[str, str], Exchange] = {}
    for state in states:
        kind = _BY_NAME.get(str(state["kind"]))
        if kind is None:
            raise PlanError(f"The plan has an exchange of an unknown kind, {state['kind']!r}. Update the package.")
        exchange = kind.from_state_dict(state)
        key = exchange.kind, exchange.module
        if key in exchanges:
            raise PlanError(f"The plan is damaged: it has two exchanges of the kind {kind.kind!r} for {key[1]!r}.")
        exchanges[key] = exchange
    return tuple(exchanges.values())


def joined(earlier: Iterable[Exchange], later: Iterable[Exchange]) -> tuple[Exchange, ...]:
    """Return the exchanges that are equivalent to those of two compactions in a row."""
    exchanges = {(exchange.kind, exchange.module): exchange for exchange in earlier}
    for exchange in later:
        key = exchange.kind, exchange.module
        exchanges[key] = exchanges[key].then(exchange) if key in exchanges else exchange
    return tuple(exchanges.values())


def printed(exchanges: Iterable[Exchange]) -> Iterator[tuple[str, list[str]]]:
    """Yield a heading and lines for each kind."""
    exchanges = list(exchanges)
    for kind in KINDS:
        yield f"{kind.title}:", [f"  {exchange}" for exchange in exchanges if isinstance(exchange, kind)]

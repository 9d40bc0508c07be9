"""Every trap of the catalogue is exact where nobody looked, or refused or kept whole with the right reason."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from types import FunctionType

import pytest

from tests.engine.traps.trap import Ablation, Trap, catalogue, check

TRAPS: list[Trap] = catalogue("TRAPS")
ABLATIONS: list[Ablation] = catalogue("ABLATIONS")


@pytest.mark.parametrize("repaired", [False, True], ids=["masks", "repaired"])
@pytest.mark.parametrize("trap", TRAPS, ids=str)
def test_a_trap_catches_nothing(trap: Trap, repaired: bool) -> None:
    """Masked and compacted agree in every use, or the engine says why it kept or refused."""
    check(trap, repaired=repaired)


def _clear_caches() -> None:
    for name in [name for name in sys.modules if name.startswith("engine.")]:
        for function in vars(sys.modules[name]).values():
            if isinstance(function, (FunctionType, type(functools.cache(len)))):
                getattr(function, "cache_clear", bool)()


@pytest.fixture
def fresh_caches() -> Iterator[None]:
    """What is remembered without a mechanism would disable it in later tests, and the reverse."""
    _clear_caches()
    yield
    _clear_caches()


@pytest.mark.usefixtures("fresh_caches")
@pytest.mark.parametrize("ablation", ABLATIONS, ids=str)
def test_without_a_mechanism_a_trap_catches(ablation: Ablation, monkeypatch: pytest.MonkeyPatch) -> None:
    """No mechanism is idle: the trap that it names, which passes above, fails without it: a difference or an error."""
    [trap] = [trap for trap in TRAPS if trap.name == ablation.trap]
    ablation.disable(monkeypatch)
    with pytest.raises(Exception) as failure:  # a difference, or whatever the engine runs into
        check(trap, repaired=ablation.repaired)
    fits = not re.search(r"<lambda>\(\) (takes|missing|got an unexpected)", str(failure.value))
    assert fits, f"What stands in for the mechanism is not called as the mechanism is: {failure.value}"


def test_names_are_distinct() -> None:
    """Two traps of one name would hide each other in a report."""
    names = [trap.name for trap in TRAPS]
    assert len(names) == len(set(names))

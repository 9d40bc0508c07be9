"""Other moments of a fit at which a step may run otherwise: the numbers of the batch, of the epoch and of the step.

A step that alternates between two losses, or adds one after some epochs, runs otherwise than on the first batch. Which
numbers make a difference is read off its code: those that stand there, those in attributes and hyperparameters that it
names, and the ones next to them.
"""

from __future__ import annotations

import dis
import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from lightning_compress.trainer.packages import LIGHTNING_MODULES

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule

__all__ = ["counters", "other_moments"]

_COUNTERS = {"epoch": "current_epoch", "step": "global_step", "last": "is_last_batch"}
_LATE = 10**6
_MOST = 24
_DECIDING = ("COMPARE_OP", "CONTAINS_OP", "BINARY_MODULO", "BINARY_FLOOR_DIVIDE")

Arguments = tuple[Any, ...]


def other_moments(
    pl_module: LightningModule,
    name: str,
    arguments: Arguments,
    epoch: int = 0,
    step: int = 0,
    callbacks: Sequence[Any] = (),
) -> dict[str, tuple[Arguments, Mapping[str, Any]]]:
    """The arguments of a step at other moments, by what is other; none where its code does not ask for the moment.

    Args:
        pl_module: has the step.
        name: of the step.
        arguments: of the step: a batch, and its number.
        epoch, step: those of the present moment.
        callbacks: whose code may ask for the moment, too.

    Example:
        >>> from pytorch_lightning import LightningModule
        >>> class Alternating(LightningModule):
        ...     def training_step(self, batch, batch_idx):
        ...         return batch.mean() if batch_idx % 2 else batch.sum()
        >>> list(other_moments(Alternating(), "training_step", (None, 0)))
        ['batch 1', 'batch 2', 'batch 3', 'batch 1000000']
    """
    codes = [(code, owner) for owner in (pl_module, *callbacks) for code in _codes(owner)]
    names = set(itertools.chain.from_iterable(code.co_names for code, _ in codes))
    numbers = sorted({n for code, owner in codes for n in _numbers(code, owner)})
    ways: list[list[tuple[str, tuple[Arguments, Mapping[str, Any]]]]] = []
    if _asks_for_batch(pl_module, name):
        near = _near(numbers, arguments[1])
        ways.append([(f"batch {n}", ((arguments[0], n, *arguments[2:]), {})) for n in near])
    for counter, present in (("epoch", epoch), ("step", step)):
        if _COUNTERS[counter] in names:
            ways.append([(f"{counter} {n}", (arguments, {counter: n})) for n in _near(numbers, present)])
    if _COUNTERS["last"] in names:
        ways.append([("last batch", (arguments, {"last": True}))])
    rounds = itertools.chain.from_iterable(itertools.zip_longest(*ways))
    return dict(itertools.islice((way for way in rounds if way is not None), _MOST))


def counters(moment: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a Trainer at a moment.

    Example:
        >>> counters({"epoch": 3})
        {'current_epoch': 3}
    """
    return {_COUNTERS[counter]: value for counter, value in moment.items()}


def _near(numbers: Sequence[int], present: int) -> list[int]:
    """The numbers that may make a difference: the next one, those in the code and around them, and a late one."""
    around = (n + step for n in numbers for step in (-1, 0, 1))
    return [n for n in dict.fromkeys((present + 1, *around, _LATE)) if n >= 0 and n != present]


def _codes(owner: Any) -> Iterator[CodeType]:
    """Yield the code of the methods that a LightningModule, or a callback, has beside Lightning's own."""
    own = {base for kind in LIGHTNING_MODULES for base in kind.__mro__}
    for kind in type(owner).__mro__:
        for value in () if kind in own else vars(kind).values():
            function = value.fget if isinstance(value, property) else getattr(value, "__wrapped__", value)
            if isinstance(function, FunctionType):
                yield from _nested(function.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _asks_for_batch(pl_module: LightningModule, name: str) -> bool:
    """Whether a step reads the number of its batch; one that is wrapped, and cannot be looked into, may."""
    code = getattr(getattr(pl_module, name), "__code__", None)
    if code is None or code.co_argcount < 3:
        return code is None
    loads = (i.argval for i in dis.get_instructions(code) if i.opname.startswith("LOAD_"))
    names = itertools.chain.from_iterable(name if isinstance(name, tuple) else (name,) for name in loads)
    return code.co_varnames[2] in {*names, *code.co_cellvars}


def _numbers(code: CodeType, owner: Any) -> Iterator[int]:
    """Yield the whole numbers in code that decides by numbers: constants, and those in attributes that it names."""
    instructions = list(dis.get_instructions(code))
    if not any(i.opname in _DECIDING or (i.opname == "BINARY_OP" and i.argrepr in ("%", "//")) for i in instructions):
        return
    settings = {**vars(owner), **getattr(owner, "hparams", {})}
    values = [i.argval for i in instructions if i.opname in ("LOAD_CONST", "LOAD_SMALL_INT")]
    values += [settings[name] for name in code.co_names if name in settings]
    for value in values:
        if type(value) is int and 1 < value < _LATE:
            yield value

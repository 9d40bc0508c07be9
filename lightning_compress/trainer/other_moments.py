"""Other moments of a fit at which a step may behave differently: other indices of batch, epoch and step.

A step that alternates between two losses, or adds one after some epochs, behaves differently than on the first batch.
The numbers that may matter are taken from its code: literals, numbers in attributes and hyperparameters that it names,
and their neighbours. Code elsewhere (a schedule) compares counts that note the numbers.
"""

from __future__ import annotations

import dis
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any

from lightning_compress.trainer.named_tensors import codes_of
from lightning_compress.trainer.packages import LIGHTNING_MODULES

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule

__all__ = ["OtherMoments", "counters"]

_COUNTERS = {"epoch": "current_epoch", "step": "global_step", "last": "is_last_batch"}
_LATE = 10**6
_MOST = 24
_DECIDING = ("COMPARE_OP", "CONTAINS_OP", "BINARY_MODULO", "BINARY_FLOOR_DIVIDE")

Arguments = tuple[Any, ...]
Way = tuple[Arguments, Mapping[str, Any]]


class OtherMoments(Mapping[str, Way]):
    """The arguments of a step at other moments, by a label for the difference; empty if no code reads the moment.

    Relevant numbers are taken from the code of the LightningModule and of callbacks, and noted while the step runs: it
    has run once before the moments are iterated over.

    Args:
        pl_module: the LightningModule with the step.
        name: of the step.
        arguments: arguments of the step: a batch, and its index.
        present: current indices of the epoch and the step, by "epoch" and "step".
        callbacks: callbacks whose code may read the moment, too.
        noted: numbers with which counts were compared, by "batch", "epoch" and "step".

    Example:
        >>> from pytorch_lightning import LightningModule
        >>> class Alternating(LightningModule):
        ...     def training_step(self, batch, batch_idx):
        ...         return batch.mean() if batch_idx % 2 else batch.sum()
        >>> list(OtherMoments(Alternating(), "training_step", (None, 0)))
        ['batch 1', 'batch 2', 'batch 3', 'batch 1000000']
    """

    def __init__(
        self,
        pl_module: LightningModule,
        name: str,
        arguments: Arguments,
        present: Mapping[str, int] | None = None,
        callbacks: Sequence[Any] = (),
        noted: Mapping[str, Collection[int]] | None = None,
    ) -> None:
        codes = [(code, owner) for owner in (pl_module, *callbacks) for code in _codes(owner)]
        self._names = set(itertools.chain.from_iterable(code.co_names for code, _ in codes))
        self._numbers = {n for code, owner in codes for n in _numbers(code, owner)}
        self._asks = _asks_for_batch(pl_module, name)
        self._arguments, self._noted = arguments, {} if noted is None else noted
        self._late = _last_of_fit(pl_module)
        self._present = {"epoch": 0, "step": 0, **(present or {}), "batch": arguments[1]}

    def __iter__(self) -> Iterator[str]:
        """Yield labels; more numbers may be noted between two of them."""
        seen: set[str] = set()
        while len(seen) < _MOST:
            label = next((label for label in self._ways() if label not in seen), None)
            if label is None:
                return
            seen.add(label)
            yield label

    def __len__(self) -> int:
        return min(len(self._ways()), _MOST)

    def __getitem__(self, label: str) -> Way:
        return self._ways()[label]

    def _ways(self) -> dict[str, Way]:
        batch, *rest = self._arguments[0], *self._arguments[2:]
        ways: list[list[tuple[str, Way]]] = []
        if self._asks or self._noted.get("batch"):
            ways.append([(f"batch {n}", ((batch, n, *rest), {})) for n in self._near("batch")])
        for count in ("epoch", "step"):
            if _COUNTERS[count] in self._names or self._noted.get(count):
                ways.append([(f"{count} {n}", (self._arguments, {count: n})) for n in self._near(count)])
        if _COUNTERS["last"] in self._names:
            ways.append([("last batch", (self._arguments, {"last": True}))])
        rounds = itertools.chain.from_iterable(itertools.zip_longest(*ways))
        return dict(way for way in rounds if way is not None)

    def _near(self, count: str) -> list[int]:
        """Return the numbers to try: the next one, the relevant ones with their neighbours, and the last one."""
        present, noted = self._present[count], self._noted.get(count, ())
        around = (n + step for n in sorted({*self._numbers, *noted}) for step in (-1, 0, 1))
        return [
            n for n in dict.fromkeys((present + 1, *around, self._late.get(count, _LATE))) if n >= 0 and n != present
        ]


def _last_of_fit(pl_module: Any) -> dict[str, int]:
    """Return the last epoch and the last step of a fit with an end; later ones may need too much memory."""
    trainer = pl_module._trainer
    ends = {"epoch": getattr(trainer, "max_epochs", None), "step": getattr(trainer, "max_steps", None)}
    return {count: end - 1 for count, end in ends.items() if end is not None and end > 0}


def counters(moment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a Trainer at a moment.

    Example:
        >>> counters({"epoch": 3})
        {'current_epoch': 3}
    """
    return {_COUNTERS[counter]: value for counter, value in moment.items()}


def _codes(owner: Any) -> Iterator[CodeType]:
    """Yield the code of the methods of a LightningModule or a callback, without Lightning's own."""
    own = {base for kind in LIGHTNING_MODULES for base in kind.__mro__}
    for kind in type(owner).__mro__:
        for value in () if kind in own else vars(kind).values():
            yield from codes_of(value)


def _asks_for_batch(pl_module: LightningModule, name: str) -> bool:
    """Whether a step may read the index of its batch; a wrapped step whose code is hidden may."""
    code = getattr(getattr(pl_module, name), "__code__", None)
    if code is None or code.co_argcount < 3:
        return code is None
    loads = (i.argval for i in dis.get_instructions(code) if i.opname.startswith("LOAD_"))
    names = itertools.chain.from_iterable(name if isinstance(name, tuple) else (name,) for name in loads)
    return code.co_varnames[2] in {*names, *code.co_cellvars}


def _numbers(code: CodeType, owner: Any) -> Iterator[int]:
    """Yield the integers in code that compares numbers: constants, and those in attributes that it names."""
    instructions = list(dis.get_instructions(code))
    if not any(i.opname in _DECIDING or (i.opname == "BINARY_OP" and i.argrepr in ("%", "//")) for i in instructions):
        return
    settings = {**vars(owner), **getattr(owner, "hparams", {})}
    values = [i.argval for i in instructions if i.opname in ("LOAD_CONST", "LOAD_SMALL_INT")]
    values += [settings[name] for name in code.co_names if name in settings]
    for value in values:
        if type(value) is int and 1 < value < _LATE:
            yield value

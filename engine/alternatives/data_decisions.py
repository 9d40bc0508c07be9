"""Decisions that code makes on the numbers in tensors (``if x.mean() > 0``), recorded with both outcomes.

The example decides them one way, other inputs may decide the other way. While a model is recorded on data, the recorder
answers in place of the tensor, so it can give another answer, and whatever the code then does becomes part of the
program. A number that code compares or counts with is replaced by very different ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.limits import NEIGHBOURS
from engine.program.graph import Value

__all__ = ["Answers", "DataDecision", "DataDecisions", "further_answers", "turns"]


_FAR, _MANY = 1e6, 1000
"""Numbers beyond the thresholds with which code compares floats and integers."""

Answer = Any
"""What a tensor returns: a truth value, a number, or a list or an array of these."""

Answers = Mapping[tuple[str, int, str], Answer]
"""Answers by place, count and owner of a decision."""


class DataDecision(NamedTuple):
    """A read of the numbers in a tensor, on which code may decide.

    Attributes:
        place: file and line.
        nth: how often the module has decided there before in this run.
        owner: name of the module that runs.
        answer: as the data say.
    """

    place: str
    nth: int
    owner: str
    answer: Answer


class DataDecisions:
    """The decisions of the current run, some of which may be given another outcome.

    Args:
        owner: returns the name of the module that runs.

    Attributes:
        taken: the decisions so far.

    Example:
        >>> decisions = DataDecisions(lambda: "head")
        >>> decisions.answer("net.py:3", True)
        True
        >>> with decisions.answering({("net.py:3", 0, "head"): False}):
        ...     decisions.restart()
        ...     decisions.answer("net.py:3", True), decisions.answer("net.py:3", True)
        (False, True)
    """

    def __init__(self, owner: Callable[[], str]) -> None:
        self._owner = owner
        self.taken: list[DataDecision] = []
        self._counts: dict[tuple[str, str], int] = {}
        self._other_answers: Answers = {}
        self._sized_by_data: set[int] = set()

    def restart(self) -> None:
        """Begin another run."""
        self.taken, self._counts, self._sized_by_data = [], {}, set()

    @contextmanager
    def answering(self, answers: Answers) -> Iterator[None]:
        """Give other answers in the body.

        Args:
            answers: the other answers, in the place of those that the data give.
        """
        before, self._other_answers = self._other_answers, answers
        try:
            yield
        finally:
            self._other_answers = before

    @property
    def answers(self) -> Answers:
        """The other answers that the current run is given."""
        return self._other_answers

    def answer(self, place: str, answer: Answer) -> Answer:
        """Return the answer that the code is given.

        Args:
            place: file and line of the question.
            answer: as the data say.
        """
        owner = self._owner()
        count = self._counts.get((owner, place), 0)
        self._counts[owner, place] = count + 1
        self.taken.append(DataDecision(place, count, owner, answer))
        return self._other_answers.get((place, count, owner), answer)

    def note_sizes(self, func: Any, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
        """Note the results of an op with a size that depends on data, directly or through an input.

        Args:
            func: the op.
            inputs, outputs: values of its arguments and results.
        """
        sizes = {n for value in inputs if self.has_size_of_data(value) for n in value.shape}
        follows = torch.Tag.dynamic_output_shape in getattr(func, "tags", ())
        if follows and len(inputs) > 1:  # an index of whole numbers has its own size
            follows = any(value.dtype is torch.bool for value in inputs)
        if follows or any(n in sizes for value in outputs for n in value.shape):
            self._sized_by_data.update(value.index for value in outputs)

    def has_size_of_data(self, value: Value) -> bool:
        """Whether a size of a value depends on the numbers in a tensor."""
        return value.index in self._sized_by_data


def turns(taken: Iterable[DataDecision], places: Collection[str]) -> Iterator[tuple[str, Answers]]:
    """Yield places with the answers that reverse decisions there: the first of each module, the second, and so on.

    Truth values come first, because code often only computes with numbers.

    Args:
        taken: the decisions of a run.
        places: places to leave out.
    """
    groups: dict[tuple[str, int, int], dict[tuple[str, int, str], Answer]] = {}
    for place, count, owner, answer in taken:
        if place not in places:
            for which, other in enumerate(_others(answer)):
                groups.setdefault((place, count, which), {})[place, count, owner] = other
    order = sorted(groups, key=lambda key: (not isinstance(next(iter(groups[key].values())), bool), key[1]))
    yield from ((key[0], groups[key]) for key in order)


def further_answers(answers: Answers, taken: Iterable[DataDecision]) -> list[Answers]:
    """Return the next integers in the direction in which a decision was changed: a further layer may run there.

    Args:
        answers: the answers that led to something new.
        taken: the decisions with the answers of the data.
    """
    own = {(place, nth, owner): answer for place, nth, owner, answer in taken}
    if any(type(answer) is not int or not 0 < abs(answer - own[key]) < NEIGHBOURS for key, answer in answers.items()):
        return []
    further = {key: answer + (1 if answer > own[key] else -1) for key, answer in answers.items()}
    return [further] if all(answer >= 0 for answer in further.values()) else []


def _others(answer: Answer) -> list[Answer]:
    """Return other answers of the same form; an integer often selects one of several layers, or counts something."""
    if isinstance(answer, bool):
        return [not answer]
    if isinstance(answer, int):
        return [n for n in dict.fromkeys((answer + 1, answer - 1, 0, answer + _MANY)) if n not in (answer, -1)]
    if isinstance(answer, float):
        return [number for number in (_FAR, -_FAR, 0.0, 1.0) if number != answer]
    if isinstance(answer, np.ndarray):
        return [np.full_like(answer, other) for other in _others_of(answer.dtype)]
    leaf = next(_leaves(answer), None) if isinstance(answer, list) else None
    return [_with_leaves(answer, other) for other in _others(leaf)] if isinstance(leaf, (bool, int, float)) else []


def _others_of(dtype: np.dtype[Any]) -> list[Answer]:
    """Return other numbers for an array that its dtype can represent."""
    if dtype == np.bool_:
        return [True, False]
    if np.issubdtype(dtype, np.integer):
        return [0, 1, min(_MANY, int(np.iinfo(dtype).max))]
    if np.issubdtype(dtype, np.floating):
        far = min(_FAR, float(np.finfo(dtype).max))
        return [far, -far, 0.0, 1.0]
    return []


def _leaves(nested: list[Any]) -> Iterator[Any]:
    for item in nested:
        yield from _leaves(item) if isinstance(item, list) else [item]


def _with_leaves(nested: list[Any], leaf: Any) -> list[Any]:
    return [_with_leaves(item, leaf) if isinstance(item, list) else leaf for item in nested]

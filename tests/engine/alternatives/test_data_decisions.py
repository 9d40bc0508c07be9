"""Decisions on data: which other answers code is given, and when the recorder gives up."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import engine
from engine.alternatives.data_decisions import DataDecision, DataDecisions, further_answers, turns
from engine.recording import variants


def _answers(answer: object) -> list[object]:
    return [answers["net.py:3", 0, "head"] for _, answers in turns([DataDecision("net.py:3", 0, "head", answer)], ())]


def test_truth_values_are_turned() -> None:
    """A condition has one other outcome."""
    assert _answers(True) == [False]


@pytest.mark.parametrize(("answer", "others"), [(0, [1, 1000]), (5, [6, 4, 0, 1005])])
def test_whole_numbers_have_neighbours(answer: int, others: list[int]) -> None:
    """An index or a count is tried next to it, at zero, and far above."""
    assert _answers(answer) == others


def test_floats_are_far_away_on_both_sides() -> None:
    """A threshold lies between."""
    assert _answers(0.3) == [1e6, -1e6, 0.0, 1.0]


def test_lists_and_arrays_keep_their_form() -> None:
    """What the code does with their lengths stays the same."""
    assert _answers([[0.5, 0.7]])[:2] == [[[1e6, 1e6]], [[-1e6, -1e6]]]
    assert _answers([]) == []
    assert [list(turned) for turned in _answers(np.array([True, False]))] == [[True, True], [False, False]]  # type: ignore[call-overload]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int64", "float16", "float64", "complex64", "U3"])
def test_arrays_of_every_type_get_numbers_that_they_can_hold(dtype: str) -> None:
    """Or none."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        turned = _answers(np.zeros(2, dtype))
    assert all(other.dtype == dtype and np.isfinite(other).all() for other in turned)  # type: ignore[attr-defined]
    assert bool(turned) is (dtype not in ("complex64", "U3"))


@pytest.mark.parametrize("answer", [[torch.zeros(2)], ["a"], [None], [[]]])
def test_a_list_of_other_things_has_no_other_answer(answer: object) -> None:
    """A function may return a list of tensors."""
    assert _answers(answer) == []


def test_modules_of_a_place_are_turned_together() -> None:
    """The blocks of a network share their code; each time that they ask is another run."""
    taken = [DataDecision("net.py:3", nth, owner, True) for owner in ("a", "b") for nth in (0, 1)]
    assert [sorted(answers) for _, answers in turns(taken, ())] == [
        [("net.py:3", 0, "a"), ("net.py:3", 0, "b")],
        [("net.py:3", 1, "a"), ("net.py:3", 1, "b")],
    ]
    assert not list(turns(taken, ["net.py:3"]))


def test_answers_are_those_of_the_innermost_context() -> None:
    """And those around it hold again afterwards."""
    decisions, outer, inner = DataDecisions(lambda: "head"), {("a", 0, "head"): 1}, {("b", 0, "head"): 2}
    with decisions.answering(outer):
        with decisions.answering(inner):
            assert decisions.answers == inner
        assert decisions.answers == outer
    assert not decisions.answers


def test_whole_numbers_go_on_in_their_direction() -> None:
    """One expert after the other."""
    taken, key = [DataDecision("net.py:3", 0, "head", 2)], ("net.py:3", 0, "head")
    assert further_answers({key: 3}, taken) == [{key: 4}]
    assert further_answers({key: 1}, taken) == [{key: 0}]
    assert further_answers({key: 0}, taken) == further_answers({key: 1002}, taken) == []


class _Counts(nn.Module):
    """Runs a layer as often as the data say."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x.sum())):
            x = self.layer(x)
        return self.last(x)


class _Gate(nn.Module):
    """Runs a layer where the data say so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.mean() > 0 else x


def test_what_is_beyond_the_budget_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the line that decides."""
    assert not any("Decisions on data" in note for note in engine.trace(_Gate(), torch.zeros(2, 4)).notes)
    monkeypatch.setattr(variants, "MOST_FURTHER_OPS", -1)
    monkeypatch.setattr(variants, "LEAST_RUNS", -1)
    [note] = [n for n in engine.trace(_Gate(), torch.zeros(2, 4)).notes if "Decisions on data" in n]
    assert "test_data_decisions.py:" in note and "only with the example's outcome" in note


class _Addresses(nn.Module):
    """Asks where a tensor is, and decides by the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.data_ptr() and x.mean() > 0 else x


def test_an_address_is_never_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code in C may write there."""
    answers, answer = list[object](), DataDecisions.answer
    monkeypatch.setattr(
        DataDecisions, "answer", lambda self, place, own: answers.append(own) or answer(self, place, own)
    )
    engine.trace(_Addresses(), torch.zeros(2, 4))
    assert set(answers) == {False}


def test_a_count_is_not_followed_for_ever() -> None:
    """A thousand rounds are more than the budget."""
    graph = engine.trace(_Counts(), torch.zeros(2, 4))
    assert 1 <= sum(node.module == "layer" for node in graph.nodes) < 200

"""Tests of decisions that all ranks share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_compress.trainer import ranks
from lightning_compress.trainer.packages import MisconfigurationException
from lightning_compress.trainer.ranks import alone, from_rank_zero, gathered, together


def rank(number: int, sent: list[Any], world: int = 2) -> Any:
    """A Trainer on one of several ranks; rank 0 sends, the others receive."""

    def broadcast(value: Any) -> Any:
        if number == 0:
            sent.append(value)
        return sent[-1]

    return SimpleNamespace(world_size=world, is_global_zero=number == 0, strategy=SimpleNamespace(broadcast=broadcast))


def test_rank_zero_decides() -> None:
    """The others get its result and do not call the function."""
    sent: list[Any] = []
    assert from_rank_zero(rank(0, sent), lambda: 3) == 3
    assert from_rank_zero(rank(1, sent), lambda: pytest.fail("called")) == 3
    assert from_rank_zero(rank(0, sent, world=1), lambda: 4) == 4 and len(sent) == 1


def test_what_all_pass_is_there_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a group of processes; a process by itself asks nobody."""
    assert gathered("own") == ["own"]
    distributed = {
        "is_initialized": lambda: True,
        "get_world_size": lambda: 2,
        "all_gather_object": lambda values, value: values.__setitem__(slice(None), ["other", value]),
    }
    for name, stand_in in distributed.items():
        monkeypatch.setattr(torch.distributed, name, stand_in)
    assert gathered("own") == ["other", "own"]


def test_failure_reaches_all() -> None:
    """Rank 0 raises its own error, the others one with its message, and none waits for ever."""
    sent: list[Any] = []
    with pytest.raises(ZeroDivisionError):
        from_rank_zero(rank(0, sent), lambda: 1 // 0)
    with pytest.raises(MisconfigurationException, match="On rank 0: .*zero"):
        from_rank_zero(rank(1, sent), lambda: 3)


@pytest.mark.parametrize(
    ("own_failure", "options", "undoes"),
    [(False, {}, True), (True, {}, True), (True, {"undoes_itself": True}, False)],
)
def test_all_ranks_fail_together(
    monkeypatch: pytest.MonkeyPatch, own_failure: bool, options: dict[str, Any], undoes: bool
) -> None:
    """The rank that failed raises its own error, the others its message; what was done is undone on all."""
    undone: list[bool] = []
    monkeypatch.setattr(ranks, "gathered", lambda value: [value, "KeyError: 'fc'"])
    error, message = (ZeroDivisionError, "zero") if own_failure else (MisconfigurationException, "rank 1: KeyError")
    with pytest.raises(error, match=message):
        together(lambda: 1 // (not own_failure), lambda: undone.append(True), **options)
    assert undone == [True] * undoes


def test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that asks finds no other processes, until the context ends, by an error too."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(KeyError), alone():
        assert not torch.distributed.is_initialized()
        raise KeyError
    assert torch.distributed.is_initialized()

"""Freed memory goes back to the system."""

from __future__ import annotations

import ctypes

import pytest

from engine.verification import memory


def test_it_is_given_back_where_the_c_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing happens where it cannot."""
    assert memory.give_back() == hasattr(ctypes.CDLL(None), "malloc_trim")
    monkeypatch.setattr("engine.verification.memory._trim", lambda: None)
    assert not memory.give_back()

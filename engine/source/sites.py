"""The place of a call in the user's code: the innermost frame outside of torch and the recorder."""

from __future__ import annotations

import copy
import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from engine.program.places import shown_place

__all__ = [
    "CALLBACKS",
    "ENGINE",
    "LAYERS",
    "Site",
    "is_exchanged",
    "is_foreign",
    "is_handler",
    "is_library",
    "is_of_a_package",
    "user_site",
]

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
LAYERS = os.path.join(_TORCH, "nn", "modules") + os.sep
"""Folder of torch's own layers."""

ENGINE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""Folder of the engine."""

CALLBACKS = os.path.join(os.path.dirname(ENGINE[: -len(os.sep)]), "lightning_compress") + os.sep
"""Folder of the callbacks beside it, whose code runs the recorded steps; it is not imported here."""

_RECORDER = frozenset(
    os.path.join(ENGINE, *place)
    for place in (
        ("numbers", "sizes.py"),
        ("numbers", "replaced_functions.py"),
        ("running", "provenance.py"),
        ("recording", "recorder.py"),
    )
)

_LIBRARIES = _RECORDER | {os.path.abspath(copy.__file__)}

_PACKAGES = {"site-packages", "dist-packages"}
_PYTHON = os.path.dirname(os.__file__) + os.sep

_EXCHANGES = f"{__name__.partition('.')[0]}.surgery."


@dataclass(frozen=True)
class Site:
    """A call in the user's code.

    Attributes:
        function: name of the torch function that is called.
        code: the code object that makes the call.
        caller: the code object that called that one.
        line: line of the call, counted from 1.
        start, end: first and last line and column of the call in the source; None where Python does not keep them.
        reflected: whether it is an operator with a number on its left.
    """

    function: str
    code: CodeType
    caller: CodeType | None
    line: int
    start: tuple[int, int] | None
    end: tuple[int, int] | None
    reflected: bool = False

    @property
    def span(self) -> tuple[Any, Any]:
        """Start and end of the call; in ``h * pick(x)``, two calls have the same end."""
        return self.start, self.end

    @property
    def place(self) -> str:
        """File and line."""
        return f"{self.code.co_filename}:{self.line}"

    @property
    def spot(self) -> str:
        """File, line and last column if known, which tells apart two calls on one line."""
        return self.place if self.end is None else f"{self.code.co_filename}:{self.end[0]}:{self.end[1]}"

    def __str__(self) -> str:
        return shown_place(self.place)


@functools.cache
def _spans(code: CodeType) -> list[tuple[tuple[int, int], tuple[int, int]] | tuple[None, None]]:
    """Return the lines and columns at which each instruction begins and ends in the source."""
    return [
        (None, None) if None in place else ((place[0], place[2]), (place[1], place[3]))  # type: ignore[misc]
        for place in code.co_positions()
    ]


@functools.cache
def is_library(filename: str) -> bool:
    """Whether a file belongs to torch, to the recorder or to Python's module that copies, and not to the user."""
    return filename.startswith(_TORCH) or filename in _LIBRARIES


@functools.cache
def is_of_a_package(filename: str) -> bool:
    """Whether a file belongs to an installed package other than torch and this project."""
    is_other = not is_library(filename) and not filename.startswith((ENGINE, CALLBACKS))
    return is_other and not _PACKAGES.isdisjoint(Path(filename).parts)


@functools.cache
def is_foreign(filename: str) -> bool:
    """Whether a file belongs to torch, Python, this project, or a package, and not to the user's project."""
    ours = filename.startswith((ENGINE, CALLBACKS, _PYTHON, "<frozen "))
    return is_library(filename) or ours or is_of_a_package(filename)


def is_exchanged(cls: type) -> bool:
    """Whether a class is one of the engine's that replaces a layer's own class.

    An analysis treats its code like that of torch, so that a compacted model is recorded like the original.
    """
    return cls.__module__.startswith(_EXCHANGES)


def is_handler(code: CodeType) -> bool:
    """Whether a function is the method of a mode, or of a class of tensors, that torch calls instead of its own."""
    return code.co_name == "__torch_function__"


def user_site(function: str, reflected: bool = False) -> Site:
    """Return the innermost call outside of torch and the engine."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (is_library(frame.f_code.co_filename) or is_handler(frame.f_code)):
        frame = frame.f_back
    code, caller = frame.f_code, None if frame.f_back is None else frame.f_back.f_code
    key = function, id(code), id(caller), frame.f_lasti, reflected  # the hash of code takes longer than all else
    site = _SITES.get(key)
    if site is None:
        spans, place = _spans(code), frame.f_lasti // 2
        start, end = spans[place] if place < len(spans) else (None, None)
        site = Site(function, code, caller, frame.f_lineno, start, end, reflected)
        if len(_SITES) >= _MOST:
            _SITES.clear()
        _SITES[key] = site
    return site


_SITES: dict[tuple[str, int, int, int, bool], Site] = {}
_MOST = 20_000

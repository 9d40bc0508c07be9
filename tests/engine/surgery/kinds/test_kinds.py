"""The list of kinds, and what a plan does with its exchanges; each kind has a test file of its own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from engine.errors import PlanError
from engine.surgery import kinds
from engine.surgery.kinds import KINDS, exchanges_from, joined, printed, state_of
from engine.surgery.kinds.attention import Headwise
from engine.surgery.kinds.norms import NarrowedNorm
from engine.surgery.kinds.spread import Spread

NORM = NarrowedNorm("norm", 8, 6, None)


def test_each_file_is_a_kind() -> None:
    """One class in each; names in files, and headings, are unique."""
    files = [path.stem for path in Path(kinds.__file__).parent.glob("*.py") if path.stem != "__init__"]
    assert sorted(kind.__module__.rpartition(".")[2] for kind in KINDS) == sorted(files)
    assert len({kind.kind for kind in KINDS}) == len({kind.title for kind in KINDS}) == len(KINDS)


def test_the_code_of_a_class_is_edited_first() -> None:
    """Then the class is exchanged, then wrapped; a module is replaced last."""
    assert [kind.kind for kind in KINDS] == ["pins", "attention", "norm", "ordinary", "spread", "replacement"]


MIRRORED = """
from dataclasses import dataclass
from engine.surgery.exchange import Exchange

@dataclass(frozen=True, eq=False)
class Mirrored(Exchange):
    kind = "mirrored"
    title = "Mirrored"

    @classmethod
    def planned(cls, decision):
        yield cls("layer")

    @classmethod
    def from_state_dict(cls, state):
        return cls(str(state["module"]))

    def prepare(self, change):
        pass

    def __str__(self):
        return f"{self.module} is mirrored"
"""


def test_a_new_kind_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is in the folder, it is planned, stored, read and printed."""
    (tmp_path / "mirrored.py").write_text(MIRRORED)
    spec = importlib.util.spec_from_file_location(
        "more_kinds", kinds.__file__, submodule_search_locations=[str(tmp_path)]
    )
    assert spec is not None and spec.loader is not None
    folder = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "more_kinds", folder)
    spec.loader.exec_module(folder)
    monkeypatch.delitem(sys.modules, "more_kinds.mirrored")
    (planned,) = folder.exchanges_of(None)
    (loaded,) = folder.exchanges_from([folder.state_of(planned)])
    assert dict(folder.printed([loaded])) == {"Mirrored:": ["  layer is mirrored"]}
    assert folder.KINDS == (type(loaded),) and type(loaded) not in KINDS


def test_a_round_trip() -> None:
    """With the name of the kind."""
    (norm, attention) = exchanges_from([state_of(NORM), state_of(Headwise("attend"))])
    assert isinstance(norm, NarrowedNorm) and isinstance(attention, Headwise) and state_of(norm) == state_of(NORM)


def test_an_unknown_kind_is_refused() -> None:
    """A plan of a newer version is not applied in part."""
    with pytest.raises(PlanError, match="unknown kind, 'rescaled'"):
        exchanges_from([{"kind": "rescaled", "module": "norm"}])


def test_two_compactions_as_one() -> None:
    """Exchanges of one module and kind become one, of others follow; what cannot happen twice is an error."""
    later = NarrowedNorm("norm", 6, 5, torch.tensor([2.0], dtype=torch.float64))
    attend = Headwise("attend")
    both, last = joined([NORM], [later, attend])
    assert isinstance(both, NarrowedNorm) and (both.size, both.kept) == (8, 5)
    assert both.fill is not None and both.fill.tolist() == [0, 0, 2] and last is attend
    spread = Spread("layer", 1, 2, torch.arange(2), torch.zeros(1))
    with pytest.raises(PlanError, match="'layer' is spread already"):
        joined([spread], [spread])


def test_printed() -> None:
    """By kind, in the order of the list."""
    lines = dict(printed([Headwise("attend"), NORM]))
    assert list(lines) == [f"{kind.title}:" for kind in KINDS] and lines["Pinned:"] == []
    assert lines["Norms:"] == ["  norm keeps the statistics of 8 channels"]

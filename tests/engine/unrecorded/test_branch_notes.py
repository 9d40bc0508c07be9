"""Notes on branches that no recording took."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import engine
from engine.unrecorded.branch_notes import BranchNotes


class _Options(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, levels: list[int] | None = None) -> Tensor:
        h = self.first(x)
        if levels is not None:
            return h[:, levels]
        return self.last(h)  # type: ignore[no-any-return]


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Options()

    def forward(self, x: Tensor, levels: list[int] | None = None) -> Tensor:
        return self.inner(x, levels)  # type: ignore[no-any-return]


def test_nothing_to_say() -> None:
    """Without places there are no messages, even if conditions test arguments."""
    notes = BranchNotes()
    notes.options["levels"] = None
    assert notes.messages() == []


def test_an_argument_that_a_condition_tests_is_named() -> None:
    """The notes say how to declare it, under a name that the engine accepts, and declaring it frees channels."""
    example = torch.randn(2, 4)
    for net, name in ((_Options(), "levels"), (_Outer(), "inner.levels")):
        [note] = [note for note in engine.trace(net, example).notes if "depends on these arguments" in note]
        assert f"constants=['{name}']" in note
        graph = engine.trace(net, example, constants=[name])
        reasons = [group.reason for group in engine.dependency_groups(net, example, graph=graph)]
        assert reasons[0] is None


def test_the_model_itself_is_no_module_that_did_not_run() -> None:
    """A parameter of the model that nothing reads gave a note with an empty name."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.spare = nn.Linear(4, 3), nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)  # type: ignore[no-any-return]

    assert not engine.trace(Net(), torch.randn(2, 4)).notes

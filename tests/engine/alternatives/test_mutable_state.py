"""Which tensors of a model may be others at its next call."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torchvision.ops import FrozenBatchNorm2d

import engine
from engine.alternatives import mutable_state
from engine.alternatives.mutable_state import MutableState
from engine.program.stored import PART


class Queue(nn.Module):
    """A queue, its pointer, and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(4, 2))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("gate", torch.ones(4))
        self.register_buffer("mask", torch.tensor([0, 1, 1, 0]))
        self.register_buffer("order", torch.tensor([0, 2, 1, 3]))
        self.register_buffer("kernel", torch.tensor([0.25, 0.5]), persistent=False)
        self.register_buffer("steps", torch.tensor([0.5, 1.0]), persistent=False)
        self.register_buffer("empty", torch.zeros(4), persistent=False)
        self.plain, self.cache = torch.randn(3), {"key": torch.randn(3)}

    def enqueue(self, x: Tensor) -> None:
        """Store a sample."""
        self.queue[int(self.pointer)] = x
        self.cache["key"] = x


def test_what_may_change() -> None:
    """All that code writes to, numbers that wait for others, zeros and ones; no tables."""
    model = Queue()
    changing = MutableState(model)
    assert changing.names == {"queue", "pointer", "table", "gate", "empty", "mask", "steps"}
    assert model.cache["key"] in changing and model.plain not in changing


def test_what_is_understood() -> None:
    """Statistics of norms and masks of pruning are constants."""
    pruned = nn.Conv2d(2, 2, 1)
    prune.ln_structured(pruned, "weight", 0.5, 1, 0)
    prune.identity(pruned, "bias")
    model = nn.Sequential(
        pruned, nn.BatchNorm2d(2), FrozenBatchNorm2d(2), nn.InstanceNorm2d(2, track_running_stats=True)
    )
    assert not MutableState(model).names


def test_arguments() -> None:
    """What lies in an object that is passed in varies."""
    cache = SimpleNamespace(keys=[torch.randn(2)])
    assert cache.keys[0] in MutableState(nn.ReLU(), ((cache,), {}))


@pytest.mark.parametrize("constants", [["queue", "pointer", "table", "gate", "empty", "mask", "steps"], ["*"]])
def test_a_declaration(constants: list[str]) -> None:
    """Names and patterns."""
    assert not MutableState(Queue(), constants=constants).names


def test_a_declaration_of_nothing() -> None:
    """A name that the model does not have."""
    with pytest.raises(engine.errors.InputError, match="gates"):
        engine.trace(nn.Linear(2, 2), torch.zeros(1, 2), constants=["gates"])


class Written(nn.Module):
    """Writes to a buffer in a way that its own code does not show."""

    def __init__(self, write: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.body, self.write = nn.Linear(2, 4), write
        self.register_buffer("scale", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return features, and keep their mean."""
        out = self.body(x) * self.scale
        self.write(self.scale, out)
        return out


def test_a_write_that_runs() -> None:
    """It is seen where it runs, and the buffer is read again as one that changes."""
    model = Written(lambda buffer, x: buffer.copy_(x.mean(0)))
    assert engine.trace(model, torch.zeros(3, 2)).changing == {"scale"}


def test_the_history_of_a_compaction_is_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans hold many indices, and each part of a compacted model holds all of them: nobody looks there."""
    model = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 2))
    mask = torch.tensor([1.0, 0, 1, 0, 1, 0])
    masks = {"0": {"weight": mask[:, None].expand(6, 2), "bias": mask}}
    engine.ModelSpeedup(model, torch.randn(3, 2), masks).speedup_model()
    looked: list[Any] = []

    def held(values: Any) -> list[Tensor]:
        looked.extend(values)
        return []

    monkeypatch.setattr(mutable_state, "_held", held)
    MutableState(model)
    assert PART in vars(model[0]) and not any(value is vars(model[0])[PART] for value in looked)


class _Dilated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift, self.items, self.sizes = 2, [1, 2], (3, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = x[self.shift :] + x.view(self.sizes) + self.items[0]
        y += 1
        return y


def test_what_is_written_to_is_no_number() -> None:
    """Nothing but an assignment changes a number or a tuple, whatever is written in place; a list may change."""
    assert {name for _, name in MutableState(_Dilated()).set_later} == {"items"}

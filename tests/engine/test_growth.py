"""The analysis takes time in proportion to the number of ops, also where one weight is called at each step."""

from __future__ import annotations

import cProfile
import pstats
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import engine

STEPS = (12, 24, 48)
ENGINE = Path(engine.__file__).parent


class _Cells(nn.Module):
    """A cell that is called at each step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(3, 4), cell, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in self.first(x).unbind(1):
            state = self.cell(step, state)
        out: Tensor = self.last(state[0] if isinstance(state, tuple) else state)
        return out


class _Shared(nn.Module):
    """A block that is applied again and again: a universal transformer, ALBERT, a recurrent refinement."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(3, 4), block, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x[:, :5])
        for _ in range(x.shape[1]):
            hidden = self.block(hidden)
        out: Tensor = self.last(hidden)
        return out


class _Stack(nn.Module):
    """As many blocks as there are steps, each with weights of its own."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.blocks = nn.Sequential(*(_attention() for _ in range(steps)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.blocks(self.first(x[:, :5])))
        return out


class _Calls(TorchFunctionMode):
    """Counts what is asked of torch, operators on tensors included, which no profiler of Python sees."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[getattr(func, "__name__", str(func))] += 1
        return func(*args, **(kwargs or {}))


def _attention() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)


NETS: dict[str, Callable[[int], nn.Module]] = {
    "LSTM cell": lambda steps: _Cells(nn.LSTMCell(4, 4)),
    "GRU cell": lambda steps: _Cells(nn.GRUCell(4, 4)),
    "shared linear layers": lambda steps: _Shared(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))),
    "shared linear layers and norm": lambda steps: _Shared(
        nn.Sequential(nn.Linear(4, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 4))
    ),
    "shared attention": lambda steps: _Shared(_attention()),
    "distinct attention": _Stack,
}


def _counts(make: Callable[[int], nn.Module], steps: int) -> Counter[str]:
    torch.manual_seed(0)
    model, x = make(steps).eval(), torch.randn(2, steps, 3)
    masks = {"first": {"weight": (torch.arange(4) % 2)[:, None].expand(4, 3)}}
    calls = _Calls()
    profile = cProfile.Profile()
    with calls:
        profile.enable()
        graph = engine.trace(model, x)
        repaired = engine.fix_mask_conflict(masks, model, x, graph=graph)
        engine.count_flops_params(model, x, verbose=False, graph=graph, masks=repaired)
        engine.not_safe_to_prune(model, x, graph=graph)
        engine.ModelSpeedup(model, x, repaired, confidence=0, graph=graph).speedup_model()
        profile.disable()
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    own = {key: calls[1] for key, calls in stats.items() if key[0] == "~" or ENGINE in Path(key[0]).parents}
    return Counter({f"{file}:{line} {name}": count for (file, line, name), count in own.items()}) + calls.counts


@pytest.mark.parametrize("name", NETS)
def test_no_call_grows_faster_than_the_number_of_ops(name: str) -> None:
    """Nothing is called more than in proportion: twice the steps take twice as many more calls."""
    _counts(NETS[name], STEPS[0])  # what is computed once and remembered
    few, some, many = (_counts(NETS[name], steps) for steps in STEPS)
    faster = [call for call in many if many[call] - some[call] > 2.2 * (some[call] - few[call]) + STEPS[-1]]
    assert not faster, "\n".join(f"{call}: {few[call]}, {some[call]}, {many[call]} at {STEPS}" for call in faster[:9])

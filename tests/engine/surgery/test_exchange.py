"""What all exchanges share: steps that are prepared, taken and undone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from engine.errors import PlanError
from engine.surgery.encoders import PaddedEncoder
from engine.surgery.exchange import Change, Decision, Exchange


class Doubled(nn.Module):
    """A layer that holds one of its methods."""

    factor = 2

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.plain  # type: ignore[method-assign]

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """Return a multiple."""
        return self.factor * x


@dataclass(frozen=True, eq=False)
class Multiplied(Exchange):
    """A layer with another factor: all that a further kind consists of."""

    kind = "multiplied"
    title = "Multiplied"

    by: int

    @classmethod
    def planned(cls, decision: Decision) -> Iterator[Multiplied]:
        """Yield nothing."""
        yield from ()

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Multiplied:
        """Load."""
        return cls(state["module"], state["by"])

    def prepare(self, change: Change) -> None:
        """Derive a class from the one of the step before."""
        module = change.module(self.module)
        own = change.class_of(module)
        change.become(module, type(own.__name__, (own,), {"factor": own.factor * self.by}), {"by": self.by})

    def __str__(self) -> str:
        return f"{self.module} times {self.by}"


def test_exchanges_of_one_module_build_on_each_other() -> None:
    """The second one sees the class that the first one will give; undoing restores class and attributes."""
    net = nn.Sequential(Doubled())
    before, change = dict(vars(net[0])), Change(net)
    change.add_exchanges([Multiplied("0", 3), Multiplied("0", 5)])
    x = torch.ones(1)
    assert net(x) == 2 and type(net[0]) is Doubled
    change.commit()
    assert net(x) == 30 and net[0].by == 5 and net[0].forward.__self__ is net[0]
    change.rollback()
    assert net(x) == 2 and type(net[0]) is Doubled and vars(net[0]) == before


def test_a_failing_step_can_be_undone() -> None:
    """Steps before it are undone, those behind it are never taken."""
    net, taken = nn.Sequential(Doubled()), []
    change = Change(net)
    change.add_exchanges([Multiplied("0", 3)])
    change.add(partial(int, "no number"))  # type: ignore[arg-type]
    change.add(lambda: taken.append(1))  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="no number"):
        change.commit()
    change.rollback()
    assert type(net[0]) is Doubled and not taken


def test_a_module_of_another_model() -> None:
    """It is named before anything is prepared."""
    with pytest.raises(PlanError, match="no module '7'"):
        Multiplied("7", 2).prepare(Change(nn.Sequential(Doubled())))


def test_an_encoder_around_an_exchange_calls_its_modules() -> None:
    """Fused code would bypass whatever was exchanged inside."""
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 1)
    net.layers[0].dropout = Doubled()
    change = Change(net)
    change.add_exchanges([Multiplied("layers.0.dropout", 2)])
    change.commit()
    assert type(net) is PaddedEncoder and net.layers[0].activation_relu_or_gelu == 0


def test_the_shared_abilities() -> None:
    """A kind need not write them: fields as they are stored, the later one holds, another name."""
    exchange = Multiplied("0", 3)
    assert exchange.state_dict() == {"module": "0", "by": 3} and exchange.renamed("1").module == "1"
    assert exchange.then(Multiplied("0", 4)).by == 4 and exchange.structure() is exchange
    assert exchange.exact and exchange.exact_in_train and exchange.permanent is None and exchange.notes == ()

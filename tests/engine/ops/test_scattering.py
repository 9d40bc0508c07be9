"""Ops that move entries along one dimension at an index, against running them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.ops import scattering
from tests.engine.exactness import check_exact, randomised
from tests.engine.ops.brute import check_constants, check_labels, check_use

PLACES = torch.tensor([2, 0])[:, None]


def index(x: Tensor) -> Tensor:
    """The same places for all channels."""
    one = x.new_zeros(x.shape[0], 1, 2, 1, dtype=torch.long) + PLACES
    return one.expand(-1, x.shape[1], -1, x.shape[3])


LABELS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "gather, expanded": (lambda x: x.gather(2, index(x)), 8),
    "gather, sizes of the input": (lambda x: x.gather(2, torch.zeros(*x.shape[:2], 2, 4, dtype=torch.long)), 8),
    "gather, a table of the code's": (lambda x: x.gather(2, PLACES.expand(*x.shape[:2], 2, 4)), 0),
    "gather, of channels": (lambda x: x.gather(1, (x > 0).long()), 0),
    "gather, of a part": (lambda x: x.gather(2, index(x)[:, :4]), 0),
    "scatter_add": (lambda x: x.scatter_add(2, index(x), x[:, :, :2]), 8),
    "scatter": (lambda x: x.scatter(2, index(x), x[:, :, :2]), 8),
    "scatter of a number": (lambda x: x.scatter(2, index(x), 0.5), 8),
    "scatter_reduce": (lambda x: x.scatter_reduce(2, index(x), x[:, :, :2], "amax"), 8),
    "scatter over channels": (lambda x: x.scatter(1, (x > 0).long(), x), 0),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels(name: str) -> None:
    """Channels pass along all dimensions but the indexed one; an index of a fixed size or of a part keeps them."""
    f, classes = LABELS[name]
    check_labels(f, classes, positions=name != "scatter of a number")


@pytest.mark.parametrize(
    ("f", "dead"),
    [
        (lambda x: x.gather(2, index(x)), [0, 1, 2, 3]),
        (lambda x: x.scatter(2, index(x), x[:, :, :2]), [0, 1, 2, 3]),
        (lambda x: x.scatter_reduce(2, index(x), x[:, :, :2], "amin"), [0, 1, 2, 3]),
        (lambda x: x.scatter_add(2, index(x), x[:, :, :2]), []),
        (lambda x: x.scatter(2, index(x), 0.5), []),
    ],
    ids=["gather", "scatter", "scatter_reduce", "scatter_add", "scatter of a number"],
)
def test_constants(f: Callable[[Tensor], Tensor], dead: list[int]) -> None:
    """A dead channel stays the same constant where what is written is the same, and not where it adds up."""
    check_constants(f, dead)


@pytest.mark.parametrize("name", [name for name, (_, classes) in LABELS.items() if classes])
def test_use(name: str) -> None:
    """A channel without influence has none before the op either."""
    check_use(lambda x: LABELS[name][0](x).flatten(2)[..., None], [1, 6], [1, 6])


class Messages(nn.Module):
    """One layer of a graph network, as `MessagePassing` of torch_geometric runs it: gather, then scatter to targets."""

    def __init__(self, inputs: int, outputs: int, reduce: str) -> None:
        super().__init__()
        self.linear, self.own, self.reduce = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs), reduce

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return what arrives at each node, and the node itself."""
        messages = self.linear(x).relu().index_select(0, edges[0])
        targets = edges[1].view(-1, 1).expand_as(messages)
        out = messages.new_zeros(len(x), messages.shape[1])
        if self.reduce == "add":
            return self.own(x) + out.scatter_add_(0, targets, messages)
        return self.own(x) + out.scatter_reduce_(0, targets, messages, self.reduce, include_self=False)


class Graph(nn.Module):
    """Two layers over a fixed graph."""

    def __init__(self, reduce: str) -> None:
        super().__init__()
        self.first, self.second, self.head = Messages(5, 16, reduce), Messages(16, 16, reduce), nn.Linear(16, 3)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 0, 2], [1, 0, 3, 2, 2, 2]]))

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores per node."""
        edges = self.get_buffer("edges")
        out: Tensor = self.head(self.second(self.first(x, edges).relu(), edges).relu())
        return out


@pytest.mark.parametrize("reduce", ["add", "mean", "amax", "prod"])
def test_a_graph_network_shrinks(reduce: str) -> None:
    """Half of its units go, exactly."""
    model = randomised(Graph(reduce))
    x = torch.randn(4, 5, dtype=torch.float64)
    groups = engine.dependency_groups(model, x)
    assert [group.reason for group in groups].count(None) == 2
    masks: dict[str, dict[str, Tensor]] = {}
    for name in ("first", "second"):
        for layer in ("linear", "own"):
            module = model.get_submodule(f"{name}.{layer}")
            kept = (torch.arange(16) % 2).double()
            masks[f"{name}.{layer}"] = {"weight": kept[:, None].expand_as(module.weight), "bias": kept}
    check_exact(model, masks, x)
    small = engine.ModelSpeedup(model, x, masks).speedup_model()
    assert small.first.linear.out_features == small.second.own.out_features == 8


@pytest.mark.parametrize("sample", [s for rule in scattering.RULES for s in rule.samples()], ids=lambda s: s.name)
def test_the_rules_hold(sample: engine.Sample) -> None:
    """By brute force: each call is cut, held constant and changed where the rule says that it may be."""
    for rule in scattering.RULES:
        engine.check_rule(rule, [sample])


@pytest.mark.parametrize("sample", [s for rule in scattering.RULES for s in rule.samples()], ids=lambda s: s.name)
def test_samples_shrink(sample: engine.Sample) -> None:
    """No channel stays but for the last."""
    model, x = sample.make(), torch.rand(sample.shape)
    model(x)
    groups = engine.dependency_groups(model, x)
    assert sum(group.reason is None for group in groups) >= 1

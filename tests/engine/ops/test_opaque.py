"""Modules that a function of the user makes smaller: what is found out about their channels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.analysis.constants import Constants
from engine.analysis.use import Use
from engine.compaction.build import canonical_tensors
from engine.masks import canonical_masks
from engine.removal.keep import only_zeros
from engine.removal.structure import structure_of
from engine.running.probe import Probe
from tests.engine.exactness import randomised
from tests.engine.nets import Mean, Net, dead, image


class Own(nn.Module):
    """Any function of (module, *inputs), with one parameter per channel, and a class name of its own."""

    def __init__(self, function: Any, channels: int = 6) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.rand(channels) + 0.5)

    def forward(self, *args: Any) -> Any:
        """Call the function."""
        return self.function(self, *args)


def net(function: Any, width: int = 6) -> nn.Module:
    """Convolution, the module, convolution, head."""
    return randomised(
        nn.Sequential(nn.Conv2d(3, 6, 1), Own(function), nn.Conv2d(width, 4, 1), nn.ReLU(), Mean(), nn.Linear(4, 2))
    )


def scaled(m: Own, x: Tensor) -> Tensor:
    """Channel by channel."""
    return torch.sigmoid(x * m.scale[:, None, None])


def mixed(m: Own, x: Tensor) -> Tensor:
    """Each channel depends on its neighbour."""
    return torch.tanh(x + x.roll(1, 1) * m.scale[:, None, None])


def graph_of(model: nn.Module, x: Any = None) -> engine.Graph:
    """Trace with the module opaque."""
    return engine.trace(model, image() if x is None else x, opaque=("1",))


def probe_of(model: nn.Module) -> Probe:
    """Of the module's call."""
    return Probe(next(n for n in graph_of(model).nodes if n.module == "1"))


PASSES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "point-wise": (scaled, (1, 2, 3)),
    "pooling": (lambda m, x: torch.nn.functional.avg_pool2d(x, 3, 1, 1) * m.scale[:, None, None], (1,)),
    "neighbours": (mixed, (2, 3)),
    "statistics": (lambda m, x: x - x.mean((2, 3), keepdim=True), (1,)),
    "over channels": (lambda m, x: x - x.mean(1, keepdim=True), (2, 3)),
    "narrower": (lambda m, x: x[:, :3], (2, 3)),
    "zero weights prove nothing": (lambda m, x: x + x.roll(1, 1) * m.zero[:, None, None], (2, 3)),
}


@pytest.mark.parametrize("name", PASSES)
def test_what_passes_is_found_by_running_it(name: str) -> None:
    """Along these dimensions each output depends on the inputs at its own index only."""
    function, passes = PASSES[name]
    model = net(function)
    model[1].zero = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    model[2] = nn.Identity() if name == "narrower" else model[2]
    model = model[:3]
    assert probe_of(model).passes() == passes


def test_a_module_that_does_not_run_alone_passes_nothing() -> None:
    """It is taken for one that mixes everything."""

    def picky(m: Own, x: Tensor) -> Tensor:
        if not isinstance(x, torch._subclasses.FakeTensor):
            raise ValueError("not now")
        return x * 1

    probe = probe_of(net(picky))
    assert not probe.runs and probe.passes() == ()


def test_on_meta_nothing_is_run() -> None:
    """There are no numbers."""
    model = net(scaled).to("meta")
    graph = graph_of(model, image().to("meta"))
    assert Probe(next(n for n in graph.nodes if n.module == "1")).passes() == ()


def test_slots_pass_or_are_new() -> None:
    """Channel by channel they are those of the layer before; a module that mixes them puts out new ones."""
    for function in (scaled, mixed):
        found = structure_of(graph_of(net(function)), engine.RULES)
        node = next(n for n in found.graph.nodes if n.module == "1")
        before, after = (found.along(v, 1) for v in (node.inputs[0], node.output))
        assert torch.equal(before, after) is (function is scaled)
        assert found.free()[before].all() and found.free()[after].all()
        assert found.slots.why(found.along(found.graph.stored["1.scale"], 0)).startswith("belongs to '1'")


def constants_of(model: nn.Module, masks: Any) -> tuple[Constants, engine.Node]:
    """And the module's node."""
    graph = graph_of(model)
    known = Constants(graph, engine.RULES, canonical_tensors(model, graph), canonical_masks(masks, model))
    return known, next(n for n in graph.nodes if n.module == "1")


def test_constants_of_a_channel_that_passes() -> None:
    """What the module makes of the constant that comes in, with its masked weights."""
    model = net(scaled)
    masks = dead(model, {"0": [0, 1, 2]}) | {"1": {"scale": torch.tensor([0.0, 1, 1, 1, 1, 1])}}
    known, node = constants_of(model, masks)
    scale = model[1].scale.detach() * masks["1"]["scale"]
    expected = torch.sigmoid(model[0].bias.detach() * scale)[:3]
    found = known.along(node.output, 1)
    torch.testing.assert_close(found[:3], expected, rtol=0, atol=1e-12)
    assert found[3:].isnan().all()


def test_a_constant_that_a_border_disturbs_varies() -> None:
    """Also where the border is seen at another resolution only."""
    model = net(lambda m, x: torch.nn.functional.avg_pool2d(x, 3, 1, 1) * m.scale[:, None, None])
    known, node = constants_of(model, dead(model, {"0": [0]}))
    assert known.along(node.output, 1).isnan().all()
    graph = engine.trace(model, image(1), opaque=("1",))
    tensors = canonical_tensors(model, graph)
    known = Constants(graph, engine.RULES, tensors, canonical_masks(dead(model, {"0": [0]}), model))
    assert known.along(next(n for n in graph.nodes if n.module == "1").output, 1).isnan().all()


def test_a_mixed_output_is_zero_where_masks_leave_nothing() -> None:
    """Zero weights that are not masked are no reason."""
    model = net(lambda m, x: torch.tanh(x + x.roll(1, 1)) * m.scale[:, None, None])
    with torch.no_grad():
        model[1].scale[3] = 0
    masks = {"1": {"scale": torch.tensor([0.0, 0, 1, 1, 1, 1])}}
    known, node = constants_of(model, masks)
    row = known.along(node.output, 1)
    assert row[:2].tolist() == [0, 0] and row[2:].isnan().all()


def test_only_zeros_may_leave_a_module_that_mixes() -> None:
    """A constant other than zero stays; a module that passes channels has no say."""
    for function, count in ((mixed, 1), (scaled, 0)):
        model = net(function)
        masks = dead(model, {"0": [0, 1]})
        masks["0"]["bias"] = torch.tensor([0.0, 1, 1, 1, 1, 1])
        known, _ = constants_of(model, masks)
        structure = structure_of(known.graph, engine.RULES)
        votes = list(only_zeros(structure, known, Use(structure, known)))
        assert len(votes) == count
        for _, row in votes:
            assert row[0] == 0 and row[1] == model[0].bias.detach()[1] and row[2:].isnan().all()


@pytest.mark.parametrize(("function", "unused"), [(scaled, [1, 4]), (mixed, [])])
def test_use_passes_where_channels_do(function: Any, unused: list[int]) -> None:
    """Else everything is used."""
    model = net(function)
    columns = torch.ones(4, 6, 1, 1)
    columns[:, [1, 4]] = 0
    known, node = constants_of(model, {"2": {"weight": columns}})
    use = Use(structure_of(known.graph, engine.RULES), known)
    assert (~use.along(node.inputs[0], 1)).nonzero()[:, 0].tolist() == unused


def test_two_calls_lose_the_same_channels() -> None:
    """The function is called once: channels of both are tied; sizes that differ are frozen."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head((m.act(m.a(x)) + m.b(m.act(m.c(x)))).mean((2, 3)))

    parts = {"a": nn.Conv2d(3, 6, 1), "b": nn.Conv2d(6, 6, 1), "c": nn.Conv2d(3, 6, 1)}
    model = randomised(Net(forward, act=Own(scaled), head=nn.Linear(6, 2), **parts))
    found = structure_of(engine.trace(model, image(), opaque=("act",)), engine.RULES)
    first, second = (found.along(found.graph.stored[f"{n}.weight"], 0) for n in "ac")
    assert torch.equal(first, second) and found.free()[first].all()


def test_several_inputs_of_one_width() -> None:
    """A gate of one's own: both inputs and the output are one slot."""
    model = randomised(
        Net(
            lambda m, x: m.head(m.gate(m.a(x), m.b(x)).mean((2, 3))),
            a=nn.Conv2d(3, 6, 1),
            b=nn.Conv2d(3, 6, 1),
            gate=Own(lambda m, x, y: x * torch.sigmoid(y)),
            head=nn.Linear(6, 2),
        )
    )
    found = structure_of(engine.trace(model, image(), opaque=("gate",)), engine.RULES)
    slots = [found.along(found.graph.stored[f"{n}.weight"], d) for n, d in (("a", 0), ("b", 0), ("head", 1))]
    assert torch.equal(slots[0], slots[1]) and torch.equal(slots[0], slots[2]) and found.free()[slots[0]].all()

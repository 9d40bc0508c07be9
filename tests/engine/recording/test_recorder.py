"""What the recorder sees: names, aliases, writes, structured outputs."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

import engine
from engine.program.signature import signature
from engine.program.trees import map_tensors, tensors_in
from engine.recording.recorder import Recorder
from engine.recording.tape import Mark
from tests.engine.exactness import KINDS, check_exact, randomised
from tests.engine.nets import Net, dead, image, snapshot, unchanged


@dataclass
class Pair:
    """Two tensors and a number."""

    first: Tensor
    second: Any
    number: int = 3


Named = namedtuple("Named", "a b")


def test_tensors_of_nested_outputs() -> None:
    """Lists, tuples, mappings and dataclasses, in order."""
    a, b, c = (torch.full((1,), float(n)) for n in range(3))
    assert [float(t) for t in tensors_in({"x": [a], "y": Pair(b, (c, None))})] == [0, 1, 2]


def test_mapping_over_nested_inputs_keeps_their_types() -> None:
    """Named tuples too."""
    a = torch.ones(1)
    out = map_tensors({"x": [a, 1], "y": Named(a, "text")}, lambda t: t + 1)
    assert out["x"] == [2, 1] and out["y"] == Named(2, "text") and isinstance(out["y"], Named)


def test_signatures_bind_arguments_by_name() -> None:
    """Defaults are filled in; in-place forms have the plain name and say what they write."""
    what = signature(torch.ops.aten.add_.Tensor)
    assert (what.op, what.writes, what.bind((1, 2), {})) == ("add", ("self",), {"self": 1, "other": 2, "alpha": 1})
    assert signature(torch.ops.aten.relu.default).writes == ()
    assert not signature(torch.ops.prim.device.default).recorded


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dict": lambda a, b: {"first": a, "second": [b]},
    "dataclass": lambda a, b: Pair(a, b),
    "tuple": lambda a, b: (a, b),
    "named tuple": lambda a, b: Named(a, b),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_structured_outputs(kind: str) -> None:
    """Every tensor of a dict, a dataclass or a tuple is an output, and both are exact."""

    def forward(m: Net, x: Tensor) -> Any:
        x = torch.relu(m.stem(x))
        return OUTPUTS[kind](m.one(x.mean((2, 3))), m.two(x).mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 6, 1), one=nn.Linear(6, 2), two=nn.Conv2d(6, 3, 3)))
    assert len(engine.trace(model, image()).outputs) == 2
    plan = check_exact(model, dead(model, {"stem": [0, 1], "one": [0], "two": [0]}), image(), image(9))
    assert set(plan.slices) == {"stem.weight", "stem.bias", "one.weight", "two.weight"}


def test_a_module_called_twice() -> None:
    """Its weight is one value with two calls; input and output are coupled, and the result is exact."""
    model = randomised(
        Net(
            lambda m, x: m.head(m.conv(torch.relu(m.conv(m.stem(x)))).mean((2, 3))),
            stem=nn.Conv2d(3, 6, 1),
            conv=nn.Conv2d(6, 6, 3, padding=1),
            head=nn.Linear(6, 2),
        )
    )
    graph = engine.trace(model, image())
    assert sum(node.module == "conv" for node in graph.nodes) == 2 and len(graph.stored) == 6
    assert [g.layers for g in engine.dependency_groups(model, image())][0] == ("stem", "conv")
    for seed, kind in enumerate(KINDS):
        check_exact(model, KINDS[kind](model, seed), image(), image(9))


def test_a_shared_submodule_under_two_names() -> None:
    """Both names are aliases of one; masks under either name are understood, and it is cut once."""
    conv = nn.Conv2d(6, 6, 3, padding=1)
    model = randomised(
        Net(
            lambda m, x: m.head(m.two(torch.relu(m.one(m.stem(x)))).mean((2, 3))),
            stem=nn.Conv2d(3, 6, 1),
            one=conv,
            two=conv,
            head=nn.Linear(6, 2),
        )
    )
    graph = engine.trace(model, image())
    assert graph.aliases["two.weight"] == "one.weight" and "two.weight" not in graph.stored
    masks = dead(model, {"stem": [0, 1]}, bias=True) | {"two": dead(model, {"one": [0, 1]}, bias=True)["one"]}
    plan = check_exact(model, masks, image(), image(9))
    assert plan.slices["one.weight"].shape == (4, 4, 3, 3)


def test_the_tied_weight_of_two_linear_layers() -> None:
    """One parameter under two names, in two layers: cut once, still tied afterwards."""
    model = randomised(
        Net(
            lambda m, x: m.head(torch.tanh(m.two(torch.relu(m.one(m.stem(x))))).mean((1,))),
            stem=nn.Linear(6, 6),
            one=nn.Linear(6, 6),
            two=nn.Linear(6, 6),
            head=nn.Linear(6, 2),
        )
    )
    model.two.weight = model.one.weight
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    for kind in KINDS:
        check_exact(model, KINDS[kind](model, 1), x)
    closed = {"stem": [0, 1], "one": [0, 1], "two": [0, 1]}
    engine.ModelSpeedup(model, x, dead(model, closed, bias=True)).speedup_model()
    assert model.one.weight is model.two.weight and model.one.weight.shape == (4, 4)
    assert model.one.in_features == model.two.out_features == 4


def test_nodes_know_their_module_and_line() -> None:
    """The module whose forward runs; for a direct ``.forward()`` call, the owner of the weight; and file:line."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.second.forward(m.block(x)).mean((2, 3))

    model = Net(forward, block=nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), second=nn.Conv2d(4, 2, 1))
    graph = engine.trace(model, image().float())
    assert [n.module for n in graph.nodes] == ["block.0", "block.1", "second", ""]
    assert "test_recorder.py:" in graph.nodes[-1].location
    assert graph.types["second"] is nn.Conv2d and graph.attributes["second"]["in_channels"] == 4


def test_a_parameter_outside_of_any_module() -> None:
    """Known by its identity, wherever it is used."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.scale = nn.Conv2d(3, 4, 1), nn.Parameter(torch.ones(4, 1, 1))
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((self.conv(x) * self.scale).mean((2, 3)))

    model = randomised(Scaled())
    assert "scale" in engine.trace(model, image()).stored
    plan = check_exact(model, dead(model, {"conv": [1]}, bias=True), image())
    assert plan.slices["scale"].shape == (3, 1, 1)


def test_tensors_made_in_the_forward_are_constants() -> None:
    """They keep their data; a factory whose size follows a shape is part of the program."""
    model = Net(lambda m, x: m.conv(x) * torch.tensor(2.0) + torch.ones(x.shape[0], 1, 1, 1), conv=nn.Conv2d(3, 4, 1))
    graph = engine.trace(model, image().float())
    assert [float(v.data) for v in graph.values if v.data is not None] == [2.0]
    assert any(node.op == "ones" for node in graph.nodes)


@pytest.mark.parametrize("decides", [False, True])
def test_other_memory_under_a_parameter(decides: bool) -> None:
    """``weight.data = f(weight.data)`` in the forward: what comes after reads that, and the model keeps its weights."""

    class Limited(nn.Linear):
        """Clamps its weight at each call."""

        def forward(self, x: Tensor) -> Tensor:
            """Return the linear map."""
            self.weight.data = self.weight.data.clamp(-0.1, 0.1)
            return super().forward(x)

    def forward(m: Net, x: Tensor) -> Tensor:
        if decides and x.sum().item() > 1e9:  # it is recorded on the real tensors
            return x
        return m.last(torch.tanh(m.first(x)))

    model = randomised(Net(forward, first=nn.Linear(5, 8), last=Limited(8, 3)))
    state = snapshot(model)
    graph = engine.trace(model, torch.randn(2, 5).double())
    clamp, linear = (next(n for n in graph.nodes if n.op == op and n.module == "last") for op in ("clamp", "linear"))
    assert linear.args["weight"] is clamp.output and graph.decided == decides
    assert unchanged(model, state)
    masks = dead(model, {"first": [0, 3]}, bias=True)
    assert check_exact(model, masks, torch.randn(2, 5).double()).slices["last.weight"].shape == (3, 6)


@pytest.mark.parametrize("opaque", [(), ("last",)])
def test_what_is_written_into_a_parameter_is_taken_back(opaque: tuple[str, ...]) -> None:
    """Where data decide, the model runs on its own parameters."""

    class Clamping(nn.Linear):
        """Clamps its weight in place at each call."""

        def forward(self, x: Tensor) -> Tensor:
            """Return the linear map."""
            with torch.no_grad():
                self.weight.data[:, 1:].clamp_(-0.1, 0.1)
                self.bias.mul_(0.5)
            return super().forward(x)

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.last(torch.tanh(m.first(x))) if x.sum().item() < 1e9 else x

    model = randomised(Net(forward, first=nn.Linear(5, 8), last=Clamping(8, 3)))
    state = snapshot(model)
    graph = engine.trace(model, torch.randn(2, 5).double(), opaque=opaque)
    assert graph.decided and unchanged(model, state)
    if not opaque:
        assert graph.written == {"last.weight", "last.bias"}
        masks = dead(model, {"first": [0, 3]}, bias=True)
        engine.ModelSpeedup(model, torch.randn(2, 5).double(), masks, confidence=4).speedup_model()
        assert torch.equal(model.last.bias, state["last.bias"])


def test_vmap_under_a_mode_of_the_model_reads_no_data() -> None:
    """Its ops run with the modes of functions on, the model's and the recorder's, and ask for devices and memory."""

    def forward(m: Net, x: Tensor) -> Tensor:
        positions = torch.ones_like(x).cumsum(1).long()
        with TransformGetItemToIndex():
            keep = torch.vmap(lambda place: (place < 4).to(place.device), in_dims=1, out_dims=1)(positions)
        return m.last(m.first(x * keep))

    model = randomised(Net(forward, first=nn.Linear(5, 8), last=nn.Linear(8, 3)))
    assert not engine.trace(model, torch.randn(2, 5).double()).decided
    assert check_exact(model, dead(model, {"first": [0, 3]}, bias=True), torch.randn(2, 5).double()).slices


@pytest.mark.parametrize(
    ("path", "drawn"), [("eval", True), ("train", False), ("train, other", False), ("train2", True)]
)
def test_draws_of_train_mode_are_not_recorded(path: str, drawn: bool) -> None:
    """Which paths these are is listed: other paths are names of the user's."""
    recorder = Recorder(nn.Identity(), None)
    with torch.inference_mode():
        recorder.run(lambda args, _: args[0] + torch.rand(2), (torch.zeros(2),), {}, [""], path)
    assert ("rand" in [node.op for node in recorder.since(Mark()).nodes]) is drawn


def test_a_tensor_on_memory_that_was_read_is_no_constant() -> None:
    """It is set to the storage of features: its numbers are those of the input, not of the recording."""

    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.first(x).detach()
        return m.last(torch.empty(0).set_(h.untyped_storage(), 0, h.shape, h.stride()))

    graph = engine.trace(Net(forward, first=nn.Linear(5, 8), last=nn.Linear(8, 3)), torch.randn(2, 5))
    [placed] = [node.inputs[0] for node in graph.nodes if node.module == "last"]
    assert placed.producer is None and placed.data is None

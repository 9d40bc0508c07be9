"""Recording a model leaves no trace on it."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.errors import InputError, TraceError
from tests.engine.exactness import check_exact, randomised
from tests.engine.nets import Auxiliary, Net, dead, image, plain, snapshot, unchanged


class Busy(nn.Module):
    """Changes itself in its forward: counters, caches, buffers, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Linear(4, 2)
        self.calls = 0
        self.cache: Any = None
        self.log: list[int] = []
        self.kept: dict[str, Any] = {"nested": [{"deep": deque([1])}]}
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        self.calls += 1
        self.cache = x
        self.log.append(len(x))
        self.kept["x"] = self.kept["nested"][0]["x"] = x
        self.kept["nested"][0]["deep"].append(x)
        self.extra = x.mean()
        self.seen = self.seen + 1
        x = self.norm(self.conv(x)) + 0 * torch.rand(1)
        return self.head(F.dropout(x, 0.5, self.training).mean((2, 3)))


@pytest.mark.parametrize("training", [True, False])
def test_nothing_of_the_model_changes(training: bool) -> None:
    """Weights, buffers and their identity, ``__dict__``, hooks, modes, gradients and the random state."""
    model = Busy().train(training)
    model.conv.eval()
    calls: list[str] = []
    model.head.register_forward_hook(lambda *a: calls.append("hook"))
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    before, state = [dict(vars(m)) for m in model.modules()], snapshot(model)
    tables = [(dict(m._parameters), dict(m._buffers), dict(m._forward_hooks)) for m in model.modules()]
    random = torch.get_rng_state()
    global_hooks = dict(torch.nn.modules.module._global_forward_hooks)
    engine.trace(model, torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)))
    assert model.log == [] and model.kept == {"nested": [{"deep": deque([1])}]}
    assert unchanged(model, state) and torch.equal(torch.get_rng_state(), random)
    for m, attributes, (parameters, buffers, hooks) in zip(model.modules(), before, tables, strict=True):
        now = vars(m)
        assert now.keys() == attributes.keys() and all(now[k] is v for k, v in attributes.items())
        assert all(m._parameters[k] is v for k, v in parameters.items())
        assert all(m._buffers[k] is v for k, v in buffers.items())
        assert dict(m._forward_hooks) == hooks
    assert model.training is training and not model.conv.training
    assert model.calls == 0 and not hasattr(model, "extra") and type(model.calls) is int
    assert torch.equal(model.conv.weight.grad, torch.ones_like(model.conv.weight))
    assert dict(torch.nn.modules.module._global_forward_hooks) == global_hooks


def test_a_rejected_input_changes_nothing_either() -> None:
    """And names the model, the shape and the cause."""
    model = Busy()
    before, state = [dict(vars(m)) for m in model.modules()], snapshot(model)
    with pytest.raises(TraceError, match=r"Busy rejected the example input \(\(2, 5, 4, 4\) float32\)"):
        engine.trace(model, torch.randn(2, 5, 4, 4))
    assert unchanged(model, state) and [dict(vars(m)) for m in model.modules()] == before


@pytest.mark.parametrize("bad", [None, 3, "text", (), [], {}, {"x": 1}, ([],), np.ones((1, 3, 8, 8))])
def test_inputs_without_a_tensor_are_refused(bad: object) -> None:
    """The type is named, and what to pass instead."""
    with pytest.raises(InputError, match=type(bad).__name__):
        engine.trace(plain(), bad)
    with pytest.raises(ValueError, match="holds no tensor"):
        engine.ModelSpeedup(plain(), bad, {})


def test_a_shape_in_place_of_an_input() -> None:
    """What to write is said."""
    with pytest.raises(InputError, match=r"`torch.rand\(1, 3, 8, 8\)`"):
        engine.ChannelDependency(plain(), (1, 3, 8, 8))


@pytest.mark.parametrize("inputs", ["positional", "keywords", "list"])
def test_models_with_several_inputs(inputs: str) -> None:
    """Each way of passing them traces and compacts."""
    model = randomised(
        Net(
            lambda m, a, b=None: m.head((m.one(a) * m.two(b)).mean((2, 3))),
            one=nn.Conv2d(3, 4, 1),
            two=nn.Conv2d(3, 4, 1),
            head=nn.Linear(4, 2),
        )
    )
    a, b = image(), image(seed=1)
    example = {"positional": (a, b), "keywords": {"a": a, "b": b}, "list": [a, b]}[inputs]
    before = model(a, b).detach()
    masks = dead(model, {"one": [0], "two": [0]}, bias=True)
    with torch.no_grad():
        for name in ("one", "two"):
            model.get_submodule(name).weight[0] = 0
            model.get_submodule(name).bias[0] = 0
    reference = model(a, b).detach()
    engine.ModelSpeedup(model, example, masks).speedup_model()
    assert model.one.out_channels == 3 and not torch.allclose(before, reference)
    torch.testing.assert_close(model(a, b).detach(), reference)


def test_an_auxiliary_head_shrinks_along() -> None:
    """It is traced in train mode, loses its columns too, and still runs and trains after compaction."""
    model = randomised(Auxiliary())
    graph = engine.trace(model, image())
    assert {n.module for n in graph.nodes if n.path == "train"} >= {"aux.0", "aux.2"}
    masks = engine.fix_mask_conflict(dead(model, {"stem": [0, 1], "aux.0": [3]}), model, image())
    small = copy.deepcopy(model).train()
    with torch.no_grad():
        for name, entries in masks.items():
            for key, mask in entries.items():
                getattr(small.get_submodule(name), key).mul_(mask)
    reference = [t.detach() for t in small(image())]
    speedup = engine.ModelSpeedup(small, image(), masks)
    speedup.speedup_model()
    assert speedup.plan.slices["aux.0.weight"].shape == (4, 4, 1, 1)
    for old, new in zip(reference, small(image()), strict=True):
        torch.testing.assert_close(new, old)
    check_exact(model, dead(model, {"stem": [0, 1], "aux.0": [3]}), image())


def test_a_train_path_that_cannot_run_is_noted() -> None:
    """A detector wants targets while training: what can be seen is analysed, and the notes say what was not."""

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
            if self.training and targets is None:
                raise ValueError("targets should be passed")
            return self.conv(x)

    graph = engine.trace(Detector(), image().float())
    assert len(graph.nodes) == 1 and "targets should be passed" in graph.notes[0]


def test_control_flow_that_depends_on_data() -> None:
    """``nonzero`` needs real numbers: the same recorder runs on the real tensors, and still changes nothing."""

    def forward(m: Net, x: Tensor) -> Tensor:
        rows = torch.nonzero(x.sum((1, 2, 3)) > -1e9)[:, 0]
        return m.head(torch.relu(m.norm(m.stem(x[rows]))).mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 4, 1), norm=nn.BatchNorm2d(4), head=nn.Linear(4, 2))).train()
    state = snapshot(model)
    graph = engine.trace(model, image())
    assert any(node.op == "nonzero" for node in graph.nodes)
    assert unchanged(model, state) and model.training


def test_python_branches_on_buffers() -> None:
    """``.item()`` on a registered number runs for real."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.conv(x) if m.switch.item() > 0 else x

    model = Net(forward, conv=nn.Conv2d(3, 4, 1))
    model.register_buffer("switch", torch.ones(()))
    assert [n.op for n in engine.trace(model, image().float()).nodes][-1] == "conv2d"


def test_the_fast_path_of_attention_is_put_back() -> None:
    """It is off while recording only."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    engine.trace(plain(), image())
    assert torch.backends.mha.get_fastpath_enabled() == enabled


def test_a_compiled_model_stays_compiled() -> None:
    """It is recorded as it is written, and compiled when it runs the next time."""
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(len(graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    model = plain()
    model.compile(backend=backend)
    assert [node.op for node in engine.trace(model, image()).nodes][:2] == ["conv2d", "batch_norm"]
    assert not compiled
    model(image())
    assert compiled


def test_no_hooks_are_left() -> None:
    """Global hooks of modules are gone after a trace, all of their tables: torch.compile warns of what is left."""
    model = nn.Linear(3, 2)
    engine.trace(model, torch.ones(2, 3))
    tables = {name: value for name, value in vars(torch.nn.modules.module).items() if name.startswith("_global_f")}
    assert tables and not any(tables.values())

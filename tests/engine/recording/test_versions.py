"""Tensors that share memory hold the right values after writes."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.recording.versions import WRITE
from tests.engine.exactness import KINDS, check_exact, randomised
from tests.engine.nets import Net, dead, image


def test_an_in_place_relu_on_a_view() -> None:
    """``x[:, :4].relu_()`` changes the base: an explicit write brings it up to date."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        F.relu_(x[:, : x.shape[1] // 2])
        return m.head(x.mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 8, 1), head=nn.Linear(8, 2)))
    assert WRITE in [node.op for node in engine.trace(model, image()).nodes]
    for kind in KINDS:
        check_exact(model, KINDS[kind](model, 2), image(), image(9))


def test_a_view_sees_a_later_write_to_its_base() -> None:
    """A view that is read after its base was changed is replayed on the new value."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        early = x.flatten(2)
        x.mul_(0).add_(1)
        return m.head(early.mean(2))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 6, 1), head=nn.Linear(6, 2)))
    graph = engine.trace(model, image())
    mean = next(node for node in graph.nodes if node.op == "mean")
    replayed = graph.nodes[mean.inputs[0].producer]
    assert replayed.op in ("flatten", "view") and graph.nodes[replayed.inputs[0].producer].op == "add"
    check_exact(model, dead(model, {"stem": [0, 1]}), image(), image(9))


def test_an_in_place_op_on_the_input_or_a_parameter_is_seen() -> None:
    """Also where the tensor that is returned is another object for the same memory."""

    def forward(m: Net, x: Tensor) -> Tensor:
        y = m.stem(x).mul_(2)
        y.add_(y.detach())
        return m.head(y.mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 6, 1), head=nn.Linear(6, 2)))
    assert [n.op for n in engine.trace(model, image()).nodes].count("mul") == 1
    check_exact(model, dead(model, {"stem": [0, 1]}), image(), image(9))

"""Single calls, taken out of a program and run again."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.checking.isolated import calls_of, run
from engine.rule import Demand
from tests.engine.nets import Net


def model(f: object) -> nn.Module:
    """A convolution and a function of what it puts out."""
    return Net(lambda m, x: f(m.stem(x)), stem=nn.Conv2d(3, 4, 1)).eval()  # type: ignore[operator]


def test_a_call_gives_what_it_gave_in_the_model() -> None:
    """The same tensors, by themselves."""
    net, x = model(torch.relu), torch.randn(2, 3, 5, 5)
    (conv,) = calls_of(net, x, ["conv2d"])
    (relu,) = calls_of(net, x, ["relu"])
    torch.testing.assert_close(run(conv.node, conv.tensors)[0], net.stem(x))
    torch.testing.assert_close(run(relu.node, relu.tensors)[0], net(x))
    assert [conv.name(v) for v in conv.inputs] == ["input", "weight", "bias"]
    assert conv.activations == conv.inputs[:1] and set(conv.stored) == {"stem.weight", "stem.bias"}


def test_each_kind_of_call_comes_once() -> None:
    """Two calls with the same shapes and numbers are one."""
    net = model(lambda x: x.roll(1, 1).roll(1, 1).roll(2, 1))
    assert [call.node.args["shifts"] for call in calls_of(net, torch.randn(2, 3, 5, 5), ["roll"])] == [[1], [2]]


def test_what_a_call_writes_to_is_left_alone() -> None:
    """It writes to a copy, which is its first output."""
    net = model(lambda x: (x * 1).relu_())
    (call,) = calls_of(net, torch.randn(2, 3, 5, 5), ["relu"])
    before = {k: t.clone() for k, t in call.tensors.items()}
    (made,) = run(call.node, call.tensors)
    assert float(made.min()) >= 0 and all(torch.equal(t, call.tensors[k]) for k, t in before.items())


def test_a_number_can_be_replaced() -> None:
    """As a demand says."""
    net = model(lambda x: x.view(x.shape[0], 2, -1))
    (call,) = calls_of(net, torch.randn(2, 3, 5, 5), ["view"])
    (made,) = run(call.node, call.tensors, [Demand(("size", 1), 2, 4)])
    assert made.shape == (2, 4, 25)


def test_a_write_into_a_view() -> None:
    """Replayed with the views that led to it."""

    def half(x: Tensor) -> Tensor:
        x = x * 1
        x[:, :2] = x[:, 2:]
        return x + 0

    net, x = model(half), torch.randn(2, 3, 5, 5)
    (call,) = calls_of(net, x, ["engine::write"])
    torch.testing.assert_close(run(call.node, call.tensors)[0], net(x))


def test_random_numbers_are_the_same_each_time() -> None:
    """As is what uninitialised memory holds; the global random state stays as it is."""
    (call,) = calls_of(model(lambda x: x + torch.randn_like(x)), torch.randn(2, 3, 5, 5), ["randn_like"])
    state = torch.get_rng_state()
    assert torch.equal(run(call.node, call.tensors)[0], run(call.node, call.tensors)[0])
    assert torch.equal(state, torch.get_rng_state())

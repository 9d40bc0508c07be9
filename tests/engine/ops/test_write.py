"""Writes into views."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.recording.versions import WRITE
from tests.engine.exactness import KINDS, check_exact, randomised
from tests.engine.nets import Net, constants_of, dead, image
from tests.engine.ops.brute import check_labels, check_use, labels_of, stems


def halves(x: Tensor) -> Tensor:
    """Overwrite the first half of the channels with the second."""
    x = x * 1
    x[:, :4] = x[:, 4:]
    return x


def positions(x: Tensor) -> Tensor:
    """Change some positions of every channel."""
    x = x * 1
    x[:, :, 1:2].sigmoid_()
    return x


def base(x: Tensor) -> Tensor:
    """Change the base of a view that is read afterwards."""
    x = x * 1
    flat = x.flatten(2)
    x.tanh_()
    return x + flat.mean(2)[:, :, None, None]


def whole(x: Tensor) -> Tensor:
    """Write a whole view over all channels."""
    x = x * 1
    x.view(x.shape[0], -1)[:] = x.flatten(1) * 2
    return x


def nowhere(x: Tensor) -> Tensor:
    """Write to no position, as windows at the border of a small image do."""
    x = x * 1
    x[:, :, 0:-9] = 0.5
    x[:, :, 0:-9] = x[:, :, 0:-9].tanh()
    return x


@pytest.mark.parametrize("f", [halves, positions, base, whole, nowhere])
@pytest.mark.parametrize("kind", ["channels", "columns", "elements"])
def test_a_write_into_a_view_compacts_exactly(f: Callable[[Tensor], Tensor], kind: str) -> None:
    """The recorder sees the write, so nothing that it moved is removed by mistake."""
    model = randomised(
        Net(
            lambda m, x: m.head(m.conv(f(m.stem(x))).mean((2, 3))),
            stem=nn.Conv2d(3, 8, 1),
            conv=nn.Conv2d(8, 4, 3),
            head=nn.Linear(4, 2),
        )
    )
    check_exact(model, KINDS[kind](model, 1), image(), image(8))


def test_a_missed_write_would_be_wrong() -> None:
    """The written channels come from others: masking their own layer rows makes nothing dead."""
    model = Net(lambda m, x: halves(m.stem(x)), stem=nn.Conv2d(3, 8, 1)).double()
    constants = constants_of(model, image(), dead(model, {"stem": [0, 1, 2, 3]}))
    assert constants.along(constants.graph.outputs[0], 1)[:4].isnan().all()


def test_the_written_part_goes_with_its_place() -> None:
    """Channel i of what is written and channel i of the place are one slot."""
    labels = labels_of(stems(halves))
    row = labels.slots.find(labels.along(labels.graph.outputs[0], 1))
    assert torch.equal(row[:4], row[4:])
    assert any(node.op == WRITE for node in labels.graph.nodes)


def test_a_write_to_positions_keeps_channels_apart() -> None:
    """Each channel stays a class of its own."""
    check_labels(positions, classes=8)
    check_use(positions, [1], [1])


def test_an_unknown_view_freezes() -> None:
    """Through a view that no rule knows, both sides are frozen, with a reason."""

    def diagonal(x: Tensor) -> Tensor:
        x = x * 1
        x.diagonal(0, 2, 3).zero_()
        return x

    model = Net(lambda m, x: m.head(diagonal(m.stem(x)).mean((2, 3))), stem=nn.Conv2d(3, 6, 1), head=nn.Linear(6, 2))
    group = engine.dependency_groups(model, torch.randn(2, 3, 4, 4))[0]
    assert group.reason is not None
    check_exact(randomised(model), dead(model, {"stem": [0, 1]}), image())


def test_a_number_written_to_channels() -> None:
    """``x[:, :2] = 0.5``: the bound is written in the code, so those channels stay."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        x[:, :2] = 0.5
        return m.head(x.mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 6, 1), head=nn.Linear(6, 2)))
    check_exact(model, dead(model, {"stem": [0, 3, 4]}), image(), image(9))


def cleared(x: Tensor) -> Tensor:
    """Clear some channels, everywhere."""
    x = x * 1
    x[:, 2:4].zero_()
    return x


def bordered(x: Tensor) -> Tensor:
    """Clear all channels, at some positions."""
    x = x * 1
    x[:, :, 0] = 0.0
    return x


def joined(x: Tensor) -> Tensor:
    """Write channels into zeros."""
    y = x.new_zeros(x.shape)
    y[:, 1:] = x[:, 1:]
    return y


@pytest.mark.parametrize(
    ("f", "dead_channels", "zero", "known"),
    [
        (cleared, [2, 5], [2, 3, 5], [2, 3, 5]),
        (bordered, [2, 5], [2, 5], [2, 5]),
        (joined, [2, 5], [0, 2, 5], [0, 2, 5]),
    ],
)
def test_constants_go_through_writes(
    f: Callable[[Tensor], Tensor], dead_channels: list[int], zero: list[int], known: list[int]
) -> None:
    """What is overwritten everywhere has the new constant, what is not overwritten the old one, a mixture none."""
    model = Net(lambda m, x: f(m.stem(x)), stem=nn.Conv2d(3, 8, 1)).double()
    constants = constants_of(model, image(), dead(model, {"stem": dead_channels}, bias=True))
    found = constants.along(constants.graph.outputs[0], 1)
    assert (found == 0).nonzero()[:, 0].tolist() == zero and found.isfinite().nonzero()[:, 0].tolist() == known


def test_a_bias_that_is_cleared_in_part() -> None:
    """As attention without a bias on its keys does: what is masked in the bias stays dead behind the write."""

    def forward(m: Net, x: Tensor) -> Tensor:
        bias = m.stem.bias.clone()
        bias[bias.numel() // 4 : bias.numel() // 2].zero_()
        return m.head(nn.functional.conv2d(x, m.stem.weight, bias).mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 8, 1), head=nn.Linear(8, 2)))
    constants = constants_of(model, image(), dead(model, {"stem": [0, 2, 5]}, bias=True))
    node = next(n for n in constants.graph.nodes if n.op == "conv2d")
    assert (constants.along(node.output, 1) == 0).nonzero()[:, 0].tolist() == [0, 2, 5]

"""cat and stack against running them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import engine
from tests.engine.exactness import KINDS, check_exact, randomised
from tests.engine.nets import Net, dead, image
from tests.engine.ops.brute import check_constants, check_labels, check_use, labels_of, stem_slots, stems


def test_cat_over_channels_sets_slots_side_by_side() -> None:
    """Joined channels stay independent of each other."""
    check_labels(lambda x, y: torch.cat([x, y], 1), classes=16, count=2)


def test_cat_of_itself_ties_nothing_but_the_copies() -> None:
    """A channel that occurs twice goes from both places."""
    check_labels(lambda x: torch.cat([x, x.flip(1)], 1), classes=8)


def test_cat_over_positions_ties_channels() -> None:
    """Along other dimensions the operands must agree."""
    check_labels(lambda x, y: torch.cat([x, y], 2), classes=8, count=2)


def test_cat_with_a_constant_freezes_only_the_constant() -> None:
    """A part of fixed size stays; the others may go."""
    check_labels(lambda x: torch.cat([torch.ones(2, 2, 4, 4).to(x), x], 1), classes=8)


def test_cat_over_positions_with_a_constant_freezes() -> None:
    """A part without slots has a fixed number of channels."""
    check_labels(lambda x: torch.cat([torch.ones(2, 8, 1, 4).to(x), x], 2), classes=0)


def test_stack_ties_all_axes_but_the_new_one() -> None:
    """Stacked tensors have equal shapes before and after."""
    check_labels(lambda x, y: torch.stack([x, y], 1), classes=8, count=2)
    check_labels(lambda x, y: torch.stack([x, y], 2).flatten(1, 2), classes=8, count=2)


def test_constants_stand_side_by_side() -> None:
    """Each part keeps its own constants; over positions they must agree."""
    closed = [[0, 1], [2, 3]]
    check_constants(lambda x, y: torch.cat([x, y], 1), [0, 1, 6, 7], count=2, channels=4, closed=closed)
    check_constants(lambda x, y: torch.stack([x, y], 1).flatten(1, 2), [0, 1, 6, 7], 2, 4, closed)
    check_constants(lambda x: torch.cat([x, x], 2), [0, 1, 2, 3])
    check_constants(lambda x, y: torch.cat([x, y], 2), [], count=2)


def test_use_is_cut_apart() -> None:
    """What is behind unread columns of the joined tensor is unused."""
    check_use(lambda x: torch.cat([x[:, 4:], x[:, :4]], 1), [0, 5], [1, 4])
    check_use(lambda x: torch.cat([x, x], 1), [0, 1, 9], [1])
    check_use(lambda x: torch.stack([x, x], 1).sum(1), [3], [3])


def test_an_empty_part_is_skipped() -> None:
    """An empty tensor of rank 1, which torch tolerates, changes nothing."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(torch.cat([torch.zeros(0, dtype=x.dtype), m.stem(x)], 1).mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 4, 1), head=nn.Linear(4, 2)))
    plan = check_exact(model, dead(model, {"stem": [0]}), image())
    assert plan.slices["stem.weight"].shape == (3, 3, 1, 1)


def test_dense_concatenation_keeps_layers_apart() -> None:
    """Layers that are concatenated are in different groups, and each loses its own channels."""

    def forward(m: Net, x: Tensor) -> Tensor:
        a = torch.relu(m.one(x))
        b = torch.relu(m.two(torch.cat([x, a], 1)))
        return m.head(torch.cat([x, a, b], 1).mean((2, 3)))

    model = randomised(Net(forward, one=nn.Conv2d(3, 4, 1), two=nn.Conv2d(7, 5, 1), head=nn.Linear(12, 2)))
    assert [g.name for g in engine.dependency_groups(model, image())] == ["one", "two", "head"]
    plan = check_exact(model, dead(model, {"one": [0, 3], "two": [1]}), image(), image(8))
    assert plan.slices["head.weight"].shape == (2, 9)


def test_the_new_axis_of_a_stack_is_fixed() -> None:
    """The number of stacked tensors is written in the code."""
    labels = labels_of(stems(lambda x, y: torch.stack([x, y], 1), 2))
    value = labels.graph.outputs[0]
    assert all(layer.size(1) == 1 for layer in labels.layers(value))
    assert len(stem_slots(labels)) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_joined(kind: str) -> None:
    """Two parameters joined into one weight: each of them keeps something, and the result is exact."""

    def forward(m: Net, x: Tensor) -> Tensor:
        weight = torch.cat([m.one.weight, m.two.weight], 0)
        return m.head(torch.conv2d(m.stem(x), weight).mean((2, 3)))

    model = randomised(
        Net(
            forward,
            stem=nn.Conv2d(3, 6, 1),
            one=nn.Conv2d(6, 4, 1, bias=False),
            two=nn.Conv2d(6, 2, 1, bias=False),
            head=nn.Linear(6, 2),
        )
    )
    check_exact(model, KINDS[kind](model, 1), image(), image(8))


def test_heads_of_which_a_part_of_the_entries_is_rotated() -> None:
    """Entries that meet a table stay or go with their head, and so do those beside them (Phi, GLM, DINOv3)."""

    def forward(m: Net, x: Tensor) -> Tensor:
        y = m.stem(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        first, last = y[..., :2], y[..., 2:]
        y = torch.cat([first * m.table + first.flip(-1), last], -1)
        return m.head(y.transpose(1, 2).flatten(2))

    model = randomised(Net(forward, stem=nn.Linear(3, 16), head=nn.Linear(16, 2)))
    model.table = torch.tensor([0.3, 0.7], dtype=torch.float64)
    x, other = torch.randn(2, 5, 3).double(), torch.randn(3, 4, 3).double()
    plan = check_exact(model, dead(model, {"stem": [4, 5, 6, 7, 12, 13, 14, 15]}, bias=True), x, other)
    assert plan.slices["stem.weight"].shape == (8, 3) and plan.slices["head.weight"].shape == (2, 8)
    (group,) = (g for g in engine.dependency_groups(model, x) if g.name == "stem")
    assert group.size == 4 and group.reason is None
    check_exact(model, dead(model, {"stem": [2, 3, 6, 7, 9]}, bias=True), x, other)


def test_an_empty_part_of_channels_is_used_nowhere() -> None:
    """Some of the other channels are not used, so that use is told channel by channel."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(torch.cat([m.stem(x), x[:, 3:]], 1).mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 8, 1), head=nn.Linear(8, 2)))
    columns = torch.ones(2, 8)
    columns[:, [1, 4]] = 0
    plan = check_exact(model, {"head": {"weight": columns}}, image(8))
    assert plan.slices["stem.weight"].shape[0] == 6

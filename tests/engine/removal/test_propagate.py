"""Labels of a whole graph."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.analysis.labels import Labels
from engine.program.arrays import support
from engine.removal.propagate import propagate
from tests.engine.exactness import KINDS, check_exact, randomised
from tests.engine.nets import Net, image, plain, residual_net


def structure(model: nn.Module, example: Tensor) -> object:
    """Propagate without looking at sizes."""
    return propagate(engine.trace(model, example), engine.RULES)


def test_outputs_of_the_model_are_frozen() -> None:
    """With the reason."""
    found = structure(plain(), image())
    slots = found.along(found.graph.stored["7.weight"], 0)
    assert found.frozen[slots].all() and found.slots.why(slots) == "is an output of the model"
    assert not found.frozen[found.along(found.graph.stored["0.weight"], 0)].any()


def test_inputs_of_the_model_are_no_slots() -> None:
    """The first layer's columns are nobody's outputs, so they never go."""
    found = structure(plain(), image())
    assert found.along(found.graph.inputs[0], 1) is None
    columns = found.along(found.graph.stored["0.weight"], 1)
    assert columns is None or not found.free()[columns].any()


def test_a_residual_ties_its_branches() -> None:
    """Stem, norm and branch have the same slots."""
    found = structure(residual_net(), image())
    slots = [found.along(found.graph.stored[n], 0) for n in ("stem.weight", "norm.weight", "branch.weight")]
    assert all(torch.equal(slots[0], other) for other in slots)
    assert torch.equal(found.along(found.graph.stored["branch.weight"], 1), slots[0])


def test_labels_of_a_value() -> None:
    """Layers along dimensions; what is tied over other dimensions loses them; freezing and fixing."""
    graph = engine.trace(nn.Conv2d(3, 4, 1), image().float())
    labels = Labels(graph)
    value = graph.nodes[-1].output
    assert labels.along(value, 1) is None and labels.layers(value) == []
    (row,) = labels.fresh(value, [1])
    labels.add(value, row)
    assert torch.equal(labels.along(value, 1), row.flatten())
    (again,) = labels.fresh(value, [1])
    labels.add(value, again)
    assert len(labels.layers(value)) == 1 and torch.equal(labels.slots.find(row), labels.slots.find(again))
    labels.fix(value, 1)
    assert labels.slots.frozen(row).all()
    labels.add(value, labels.fresh(value, [2])[0])
    assert [support(layer) for layer in labels.layers(value)] == [(1,), (2,)]
    assert len(labels.without(value, [2], "because")) == 1
    assert labels.slots.why(labels.along(value, 2)) == "because"


def test_joint_labels_become_a_product() -> None:
    """An activation's labels over (g, c) are tied over the shorter dimension, so that what stays is rectangular."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = x.view(x.shape[0], 2, x.shape[1] // 2, *x.shape[2:]).transpose(1, 2).flatten(1, 2)
        return m.head(x.mean((2, 3)))

    found = structure(Net(forward, stem=nn.Conv2d(3, 8, 1), head=nn.Linear(8, 2)), image().float())
    slots = found.along(found.graph.stored["stem.weight"], 0)
    assert torch.equal(slots[:4], slots[4:]) and len(slots.unique()) == 4


def overlapping(*layers: tuple[int, ...]) -> tuple[Labels, list[Tensor]]:
    """Labels of a value of shape (2, 3, 4, 5), given layers over some dimensions, and these layers."""
    graph = engine.trace(nn.ReLU(), torch.zeros(2, 3, 4, 5))
    labels, value = Labels(graph), graph.nodes[-1].output
    made = []
    for dims in layers:
        shape = [size if d in dims else 1 for d, size in enumerate(value.shape)]
        made.append(labels.slots.new(math.prod(shape)).view(shape))
        labels.add(value, made[-1])
    return labels, made


def test_overlapping_axes_go_along_what_they_share() -> None:
    """A layer over (a, b) meets one over (b, c): what is left is one slot per entry of b, the same of both."""
    labels, (first, second) = overlapping((0, 1), (1, 2))
    assert len(labels.layers(labels.graph.nodes[-1].output)) == 1
    roots = [labels.slots.find(layer).movedim(1, 0).reshape(3, -1) for layer in (first, second)]
    assert torch.equal(roots[0].amin(1), roots[1].amax(1)) and len(roots[0].unique()) == 3
    assert not labels.slots.frozen(first).any() and not labels.slots.frozen(second).any()


def test_overlapping_axes_that_share_nothing_are_frozen() -> None:
    """A layer over (b, c) between one over (a, b) and one over (c, d): no common form, all stay with a reason."""
    labels, layers = overlapping((0, 1), (2, 3), (1, 2))
    assert all(labels.slots.frozen(layer).all() for layer in layers) and "overlap" in labels.slots.why(layers[1])


def test_contractions_of_a_structure() -> None:
    """In order of execution."""
    found = structure(plain(), image())
    assert [node.module for node, _ in found.contractions()] == ["0", "3", "7"]


def test_a_claimed_parameter_gets_slots_once() -> None:
    """Along each dimension that has none yet."""
    graph = engine.trace(plain(), image())
    labels = Labels(graph)
    weight = graph.stored["7.weight"]
    labels.claim(weight)
    first = labels.along(weight, 0)
    labels.claim(weight)
    assert torch.equal(labels.along(weight, 0), first) and len(labels.layers(weight)) == 2


def test_slots_that_do_not_fit() -> None:
    """A rule that hands a dimension's slots on to one of another size is named by what it gave them to."""
    graph = engine.trace(nn.Conv2d(3, 4, 1), image().float())
    labels = Labels(graph)
    value = graph.nodes[-1].output
    with pytest.raises(engine.errors.RuleError, match=r"shape \(1, 5, 1, 1\) do not fit %3\[.*its op's rule is wrong"):
        labels.add(value, torch.arange(5).view(1, 5, 1, 1))
    assert labels.layers(value) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("layer", "function"),
    [
        (nn.Conv2d(8, 8, 3), torch.conv_transpose2d),
        (nn.ConvTranspose2d(8, 8, 3), torch.conv2d),
    ],
    ids=["convolution", "transposed"],
)
def test_a_weight_that_is_read_the_other_way_round_alone(
    kind: str, layer: nn.Module, function: Callable[..., Tensor]
) -> None:
    """The numbers of a layer that never runs do not follow what a function reads of its weight."""

    def forward(m: Net, x: Tensor) -> Tensor:
        return m.head(torch.relu(function(torch.relu(m.stem(x)), m.layer.weight)).mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 8, 1), layer=layer, head=nn.Linear(8, 2)))
    check_exact(model, KINDS[kind](model, 1), image(), image(8))

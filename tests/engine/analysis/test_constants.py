"""What is known of tensors without running the model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import engine
from engine.analysis.constants import Constants
from engine.compaction.build import canonical_tensors
from tests.engine.exactness import masked, randomised, run
from tests.engine.nets import Net, constants_of, dead, image, plain


def _note(outputs: dict[str, torch.Tensor], name: str, module: nn.Module, args: object, out: torch.Tensor) -> None:
    outputs[name] = out.detach().clone()


def test_everything_varies_with_the_input_unless_something_is_zero() -> None:
    """Without masks nothing that depends on the input is known."""
    constants = constants_of(plain(), image(), {})
    assert all(constants[node.output].isnan().all() for node in constants.graph.nodes)


def test_predicted_constants_are_what_the_masked_model_computes() -> None:
    """At every node of a network, at two resolutions."""
    model = plain(padding=0)
    masks = dead(model, {"0": [0, 1], "3": [2]})
    constants = constants_of(model, image(), masks)
    small = masked(model, masks)
    for size in (6, 9):
        outputs: dict[str, torch.Tensor] = {}
        for name, module in small.named_children():
            module.register_forward_hook(partial(_note, outputs, name))
        run(small, image(size))
        seen = 0
        for node in constants.graph.nodes:
            predicted = constants[node.output]
            if node.module in outputs and outputs[node.module].ndim == predicted.ndim:
                expected = predicted.expand_as(outputs[node.module])
                where = ~expected.isnan()
                torch.testing.assert_close(outputs[node.module][where], expected[where])
                seen += int(where.any())
        assert seen >= 6


def test_zero_times_a_varying_input_is_zero() -> None:
    """A masked weight on an input that varies gives the bias, not NaN."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1)).double()
    constants = constants_of(model, image(), dead(model, {"0": [1]}))
    row = constants.along(constants.graph.outputs[0], 1)
    assert row[1] == model[0].bias[1] and row[[0, 2, 3]].isnan().all()


def test_only_masked_entries_count_as_zero_under_masks() -> None:
    """A weight that happens to be zero has yet to learn; without masks it counts."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1)).double()
    nn.init.zeros_(model[0].weight)
    assert constants_of(model, image(), {})[constants_of(model, image(), {}).graph.outputs[0]].isnan().all()
    constants = constants_of(model, image(), None)
    assert torch.equal(constants.along(constants.graph.outputs[0], 1), model[0].bias.detach())


def test_weights_on_meta_are_not_zero() -> None:
    """Without data only masks make zeros."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False))
    x = torch.zeros(1, 3, 4, 4, device="meta")
    constants = constants_of(model, x, dead(model, {"0": [1]}))
    row = constants.along(constants.graph.outputs[0], 1)
    assert row[1] == 0 and row[[0, 2, 3]].isnan().all()
    constants = constants_of(model, x, None)
    assert constants.along(constants.graph.outputs[0], 1).isnan().all()


def test_a_constant_of_the_code_is_known() -> None:
    """A tensor that no module registers is a constant, combined with dead channels."""
    table = torch.arange(4.0, dtype=torch.float64).view(4, 1, 1)
    model = Net(lambda m, x: m.conv(x) * table, conv=nn.Conv2d(3, 4, 1)).double()
    constants = constants_of(model, image(), dead(model, {"conv": [2, 3]}))
    row = constants.along(constants.graph.outputs[0], 1)
    assert torch.equal(row[2:], model.conv.bias.detach()[2:] * table[2:, 0, 0]) and row[0] == 0 and row[1].isnan()


def test_infinite_constants_are_not_computed_with() -> None:
    """The logarithm of a dead zero channel is nothing to fold."""
    model = Net(lambda m, x: torch.log(m.conv(x) ** 2), conv=nn.Conv2d(3, 4, 1, bias=False)).double()
    constants = constants_of(model, image(), dead(model, {"conv": [0]}))
    assert constants.along(constants.graph.outputs[0], 1).isnan().all()


def test_magnitude_is_the_l1_norm_of_the_unmasked_weight() -> None:
    """Per output; what is masked counts, so that a choice among masked channels is possible."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).double()
    constants = constants_of(model, image(), dead(model, {"0": [0, 1, 2, 3]}))
    found = constants.magnitude(engine.RULES.contraction(constants.graph.nodes[-1]))
    torch.testing.assert_close(found, model[0].weight.detach().abs().sum((1, 2, 3)))


def test_parameters_and_buffers_are_told_apart() -> None:
    """Only parameters can be masked."""
    constants = constants_of(plain(), image(), {})
    stored = constants.graph.stored
    assert constants.is_parameter(stored["1.weight"]) and not constants.is_parameter(stored["1.running_mean"])


def test_plain_drops_what_holds_up_to_a_map() -> None:
    """Of a profile only zero is a constant for ops that do not keep it."""
    model = Net(lambda m, x: torch.nn.functional.avg_pool2d(m.conv(x), 3, 1, 1), conv=nn.Conv2d(3, 4, 1)).double()
    with torch.no_grad():
        model.conv.bias[0] = 0
    constants = constants_of(model, image(), dead(model, {"conv": [0, 1]}))
    value = constants.graph.outputs[0]
    assert constants.has_profile(value)
    kept, plain_ = constants[value].flatten(), constants.plain(value).flatten()
    assert kept[1] == model.conv.bias[1] and plain_[0] == 0 and plain_[1].isnan()


def test_only_zeros_knows_what_varies_or_is_zero() -> None:
    """Not where a constant is left, and not of what a module stores."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sigmoid()).double()
    with torch.no_grad():
        model[0].bias[0] = 0
    constants = constants_of(model, image(), dead(model, {"0": [0]}))
    first, last = (node.output for node in constants.graph.nodes)
    assert constants.only_zeros(first) and not constants.only_zeros(last)
    assert constants.along(last, 1)[0] == 0.5
    assert not constants.only_zeros(constants.graph.stored["0.weight"])
    left = constants_of(model, image(), dead(model, {"0": [1]}))
    assert not left.only_zeros(left.graph.nodes[0].output)


@pytest.mark.parametrize("repaired", [True, False])
def test_train_mode_from_what_is_known(repaired: bool) -> None:
    """Taking over what does not depend on the mode gives what computing everything gives, profiles included."""
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.AvgPool2d(3, 1, 1), nn.Sigmoid(), nn.Conv2d(6, 5, 3, padding=1),
        nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 1),
    ).double()  # fmt: skip
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.bias), module.running_mean.uniform_(), module.running_var.uniform_(1, 2)
    graph, masks = engine.trace(model, image()), dead(model, {"0": [0, 3], "1": [3], "4": [1, 2]})
    canonical = {f"{m}.{p}": mask.bool() for m, own in masks.items() for p, mask in own.items()}
    make = partial(Constants, graph, engine.RULES, canonical_tensors(model, graph), canonical, repaired)
    known, anew = make(), make(training=True)
    quick = make(training=True, base=known)
    differ = 0
    for value in graph.values:
        assert torch.equal(quick[value].nan_to_num(7.0), anew[value].nan_to_num(7.0)), value
        assert quick.has_profile(value) == anew.has_profile(value)
        differ += not torch.equal(known[value].nan_to_num(7.0), anew[value].nan_to_num(7.0))
    assert differ > 0 or repaired


class Detections(nn.Module):
    """Sorts what passes a threshold by class, as RetinaNet and FCOS do; on the example nothing passes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scores, self.boxes = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return boxes and classes of what was found."""
        x = self.body(x).relu()
        scores, boxes = self.scores(x).sigmoid(), self.boxes(x)
        kept = scores.flatten() > 2
        places = torch.where(kept)[0]
        rows = torch.div(places, 3, rounding_mode="floor")
        if not len(rows):  # torchvision answers with new tensors, which are picked from all the same
            return torch.zeros(0, 4)[rows], torch.zeros(0, dtype=torch.long)[rows]
        return boxes[rows], places % 3


def test_nothing_is_known_of_what_is_empty() -> None:
    """Ops on no entries run through, and what passes at another input is exact."""
    model = randomised(Detections())
    x = torch.randn(6, 4, dtype=torch.float64)
    kept = (torch.arange(8) % 2).double()
    masks = {"body": {"weight": kept[:, None].expand(8, 4), "bias": kept}}
    speedup = engine.ModelSpeedup(model, x, masks, confidence=1)
    assert speedup.speedup_model().body.out_features == 4  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("layer", "numbers", "opens"),
    [
        (nn.Conv2d(3, 2, 3), (0,), True),  # its padding
        (nn.ConvTranspose2d(3, 2, 1), (1,), True),  # its stride, which puts zeros between the entries
        (nn.ConvTranspose2d(3, 2, 1), (), False),
        (nn.Conv2d(3, 2, 1), (1,), False),  # a stride leaves entries out
    ],
    ids=str,
)
def test_numbers_that_open_borders(layer: nn.Module, numbers: tuple[int, ...], opens: bool) -> None:
    """What another number puts beside the input differs from the constants there."""
    graph = engine.trace(layer, torch.zeros(1, 3, 5, 5))
    graph = replace(graph, uncertain={graph.nodes[0].index: numbers})
    constants = Constants(graph, engine.RULES, canonical_tensors(layer, graph))
    [c] = engine.RULES.contractions(graph.nodes[0])
    assert constants.bordered(graph.nodes[0], c) == opens

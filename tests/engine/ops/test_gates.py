"""Which hidden units are zero, and what masks of them come to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.analysis.constants import Constants
from engine.compaction.build import canonical_tensors
from tests.engine.exactness import check_exact, randomised
from tests.engine.nets import Net
from tests.engine.ops.test_recurrent import LAYERS, features, groups, reading, steps


def silenced(name: str, chosen: int) -> nn.Module:
    """A layer of two units of which tensors of the first are zero, gate by gate, as the bits say."""
    layer = (
        LAYERS[name]()
        if name in ("GRU without bias",)
        else {"GRU": nn.GRU, "LSTM": nn.LSTM, "RNN": nn.RNN}[name](2, 2, batch_first=True)
    )
    randomised(layer, seed=chosen)
    with torch.no_grad():
        for tensor, parameter in enumerate(layer.parameters()):
            for gate in range(len(parameter) // 2):
                if chosen >> (tensor + 4 * gate) & 1:
                    parameter[2 * gate] = 0
    return layer


@pytest.mark.parametrize(("name", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_which_units_are_zero(name: str, gates: int) -> None:
    """Zero rows of every choice of weights and biases, gate by gate: known to be zero is what is zero, no more or less.

    Of 65 536 choices of an LSTM a part is tried: all of the gate that counts with none or all of the others, each gate
    by itself, and some by chance.
    """
    generator = torch.Generator().manual_seed(0)
    key, others = 0 if name == "RNN" else 2, 2 ** (4 * gates) - 1
    tries = {bits << 4 * key | rest for bits in range(16) for rest in (0, others & ~(15 << 4 * key))}
    tries |= {15 << 4 * gate for gate in range(gates)}
    tries |= set(torch.randint(2 ** (4 * gates), (10,), generator=generator).tolist())
    zero = 0
    for chosen in sorted(tries):
        layer = silenced(name, chosen)
        x = torch.randn(3, 5, 2, generator=generator, dtype=torch.float64)
        graph = engine.trace(layer, x)
        known = Constants(graph, engine.RULES, canonical_tensors(layer, graph)).along(graph.outputs[0], 2)
        with torch.no_grad():
            really = (layer(x)[0] == 0).all(0).all(0)
        assert torch.equal(known == 0, really), (name, bin(chosen))
        zero += int(really[0])
    assert zero


def test_a_unit_that_reads_only_dead_ones_is_dead() -> None:
    """And one that reads a living one is not, although its own rows of the input are zero."""
    layer = randomised(nn.GRU(2, 3, batch_first=True))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.view(3, 3, -1)[2, 1:] = 0
        layer.weight_hh_l0[7, 2] = 1.0  # the second reads the third
        layer.weight_hh_l0[8, 1] = 1.0  # and the third the second
    graph = engine.trace(layer, steps()[..., :2])
    tensors = canonical_tensors(layer, graph)
    assert Constants(graph, engine.RULES, tensors).along(graph.outputs[0], 2)[1:].tolist() == [0, 0]
    with torch.no_grad():
        layer.weight_hh_l0[8, 0] = 1.0
    found = Constants(graph, engine.RULES, tensors).along(graph.outputs[0], 2)
    assert found.isnan().all()


def rows_closed(layer: nn.Module, **units: list[int]) -> dict[str, Tensor]:
    """Masks of some units in all that puts them out, by the ending of the parameters' names."""
    masks = {}
    for name, parameter in layer.named_parameters():
        _, _, place = name.partition("_l")
        mask = torch.ones(parameter.shape, dtype=torch.float64)
        gates = 1 if "_hr_" in name else len(parameter) // layer.hidden_size
        mask.view(gates, -1, *parameter.shape[1:])[:, units.get(f"l{place}", [])] = 0
        masks[name] = mask
    return masks


def test_layers_keep_equally_many() -> None:
    """Three dead units in one layer and one in the other: one goes from each, each its own."""
    model = reading(lambda m, x: m.out(m.layer(x)[0]), 4, nn.LSTM(3, 4, 2, batch_first=True))
    masks = {"layer": rows_closed(model.layer, l0=[0, 1, 3], l1=[2])}
    plan = check_exact(model, masks, features(), features(3))
    assert plan.attributes["layer"] == {"hidden_size": 3}
    assert plan.slices["out.weight"].cuts[0].index.tolist() == [0, 1, 3]


def test_a_projection_stays_smaller_than_the_units() -> None:
    """torch tells from the sizes of the states that there is one: as many units as outputs would be none."""
    layer = nn.LSTM(3, 4, proj_size=3, batch_first=True)
    model = reading(lambda m, x: m.out(m.layer(x)[0]), 3, layer)
    mask = torch.ones(16, 3)
    mask.view(4, 4, 3)[:, :3] = 0
    every = {"weight_ih_l0": mask, "weight_hh_l0": mask, "bias_ih_l0": mask[:, 0], "bias_hh_l0": mask[:, 0]}
    plan = check_exact(model, {"layer": every}, features())
    assert plan.attributes.get("layer", {}).get("hidden_size", 4) == 4
    put = torch.ones(3, 4)
    put[0] = 0
    plan = check_exact(model, {"layer": {**every, "weight_hr_l0": put}}, features())
    assert plan.attributes["layer"] == {"hidden_size": 3, "proj_size": 2}


def test_one_silent_gate_is_enough() -> None:
    """Of an LSTM the rows of ``g``; those of ``o`` alone silence nothing."""
    for gate, left in ((2, 3), (3, 4)):
        model = reading(lambda m, x: m.out(m.layer(x)[0]), 4, nn.LSTM(3, 4, batch_first=True))
        masks = {name: torch.ones(p.shape, dtype=torch.float64) for name, p in model.layer.named_parameters()}
        for mask in masks.values():
            mask[4 * gate + 1] = 0
        plan = check_exact(model, {"layer": masks}, features())
        assert plan.attributes.get("layer", {}).get("hidden_size", 4) == left


def test_repair_masks_the_whole_unit() -> None:
    """The rows of both weights close a unit; repair masks the biases too, and without them nothing could go."""
    model = reading(lambda m, x: m.out(m.layer(x)[0]), 4, nn.GRU(3, 4, batch_first=True))
    masks = {"layer": {k: v for k, v in rows_closed(model.layer, l0=[1, 3]).items() if k.startswith("weight")}}
    assert check_exact(model, masks, features()).is_empty
    fixed = engine.fix_mask_conflict(masks, model, features())
    assert fixed["layer"]["bias_hh_l0"].view(3, 4).tolist() == [[1, 0, 1, 0]] * 3
    assert "layer: 2 of 4 units stay" in str(fixed.report)
    assert check_exact(model, fixed, features()).attributes["layer"]["hidden_size"] == 2
    one = {"layer": {"weight_ih_l0": masks["layer"]["weight_ih_l0"]}}
    assert engine.fix_mask_conflict(one, model, features())["layer"]["weight_hh_l0"][1].sum() == 0


def test_weights_that_are_computed_freeze() -> None:
    """With the reason."""
    layer = nn.utils.parametrizations.weight_norm(nn.GRU(3, 4, batch_first=True), "weight_hh_l0")
    model = Net(lambda m, x: m.out(m.layer(torch.relu(m.first(x)))[0]), layer=layer, out=nn.Linear(4, 2))
    model.first = nn.Linear(3, 3)
    assert "the weights of gru in 'layer'" in str(groups(model.double(), features())["first"])

"""Counting, now and after compaction."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import engine
from engine.errors import InputError, MaskError
from tests.engine.exactness import KINDS, parameters, randomised
from tests.engine.nets import Auxiliary, Net, dead, image, plain, residual_net


def test_resnet50_at_224() -> None:
    """4 089 184 256 multiply-accumulates and 25 557 032 parameters, on a device without data."""
    with torch.device("meta"):
        model, x = torchvision.models.resnet50(weights=None), torch.zeros(1, 3, 224, 224)
    flops, params, results = engine.count_flops_params(model, x, verbose=False)
    assert (flops, params) == (4_089_184_256, 25_557_032)
    assert sum(sum(row["flops"]) for row in results.values()) == flops
    assert type(flops) is int and type(params) is int


def test_the_two_layers_of_nnis_documentation() -> None:
    """FLOPs 60 and 100, parameters 20 and 30."""
    model = nn.Sequential(nn.Conv2d(3, 5, 1), nn.ReLU(), nn.Conv2d(5, 5, 1))
    flops, params, results = engine.count_flops_params(model, (1, 3, 2, 2), verbose=False)
    assert (flops, params) == (160, 50)
    assert [results[n]["flops"] for n in ("0", "2")] == [[60], [100]]
    assert [results[n]["params"] for n in ("0", "2")] == [[20], [30]]
    assert results["0"]["weight_size"] == [(5, 3, 1, 1)] and results["0"]["module_type"] == ["Conv2d"]
    assert results["0"]["input_size"] == [(1, 3, 2, 2)] and results["0"]["output_size"] == [(1, 5, 2, 2)]


@pytest.mark.parametrize("make", [plain, residual_net])
def test_torchs_own_counter_agrees(make: object) -> None:
    """Half of FlopCounterMode with gradients enabled."""
    model = make()
    with FlopCounterMode(display=False) as counter:
        model(image())
    assert engine.count_flops_params(model, image(), verbose=False, batch_dim=None)[0] == counter.get_total_flops() / 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_prediction_under_masks_is_what_is_measured(kind: str) -> None:
    """Equal integers, per layer too."""
    model = residual_net()
    masks = KINDS[kind](model, 2)
    predicted = engine.count_flops_params(model, image(), verbose=False, masks=masks)
    engine.ModelSpeedup(model, image(), masks).speedup_model()
    measured = engine.count_flops_params(model, image(), verbose=False)
    assert predicted[:2] == measured[:2] and predicted[1] == parameters(model)
    for name, row in measured[2].items():
        assert {k: predicted[2][name][k] for k in row} == row


def test_zeros_of_the_weights() -> None:
    """``ZEROS`` reads what is zero anyway; None counts the dense model."""
    model = plain()
    dense = engine.count_flops_params(model, image(), verbose=False)
    with torch.no_grad():
        model[0].weight[:3] = 0
        model[0].bias[:3] = 0
        model[1].weight[:3] = 0
        model[1].bias[:3] = 0
    assert engine.count_flops_params(model, image(), verbose=False)[:2] == dense[:2]
    predicted = engine.count_flops_params(model, image(), verbose=False, masks=engine.ZEROS)
    engine.ModelSpeedup(model, image()).speedup_model()
    assert predicted[:2] == engine.count_flops_params(model, image(), verbose=False)[:2] and predicted[0] < dense[0]


def test_a_model_without_data() -> None:
    """On meta it is traced, grouped and counted under masks, as the real one is."""
    real = plain().float()
    model = copy.deepcopy(real).to("meta")
    x = torch.zeros(2, 3, 6, 6, device="meta")
    masks = engine.fix_mask_conflict(dead(real, {"0": [0, 1], "3": [2]}), real, image().float())
    assert [n.op for n in engine.trace(model, x).nodes] == [n.op for n in engine.trace(real, image().float()).nodes]
    groups = engine.dependency_groups(model, x)
    assert [str(g) for g in groups] == [str(g) for g in engine.dependency_groups(real, image().float())]
    predicted = engine.count_flops_params(model, x, verbose=False, masks=masks)
    engine.ModelSpeedup(real, image().float(), masks).speedup_model()
    assert predicted[:2] == engine.count_flops_params(real, image().float(), verbose=False)[:2]
    assert engine.fix_mask_conflict(dead(model, {"0": [0]}), model, x)["1"]["bias"].shape == (6,)


def test_nnis_number_under_masks() -> None:
    """Outputs shrink, inputs do not: half of a layer's outputs is half of its FLOPs."""
    model = plain()
    masks = dead(model, {"0": [0, 1, 2]}, bias=True)
    results = engine.count_flops_params(
        model,
        image(),
        verbose=False,
        masks=masks | {"1": {k: torch.tensor([0.0, 0, 0, 1, 1, 1]) for k in ("weight", "bias")}},
    )[2]
    dense = engine.count_flops_params(model, image(), verbose=False)[2]
    assert results["0"]["masked_flops"][0] * 2 == dense["0"]["flops"][0]
    assert (
        results["3"]["masked_flops"] == dense["3"]["flops"] and results["3"]["flops"][0] * 2 == dense["3"]["flops"][0]
    )
    assert "masked_flops" not in dense["0"]


def test_a_module_called_twice_has_two_entries() -> None:
    """One per call; its parameters count once in the total."""
    model = Net(lambda m, x: m.conv(m.conv(x)), conv=nn.Conv2d(3, 3, 1))
    flops, params, results = engine.count_flops_params(model, (1, 3, 4, 4), verbose=False)
    assert results["conv"]["flops"] == [144, 144] and flops == 288 and params == 12


def test_functional_calls_count_under_their_module() -> None:
    """``""`` for the root."""

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.linear(x, self.weight)

    assert engine.count_flops_params(Functional(), (1, 3), verbose=False)[2][""]["flops"] == [12]


def test_the_total_is_per_sample() -> None:
    """Divided by the batch size, which ``batch_dim=None`` leaves in."""
    one, four = (engine.count_flops_params(plain(), image(batch=b), verbose=False)[0] for b in (1, 4))
    assert one == four
    assert engine.count_flops_params(plain(), image(batch=4), verbose=False, batch_dim=None)[0] == 4 * one


def test_a_size_stands_for_random_input() -> None:
    """In the dtype of the model; a tuple of tensors is positional arguments."""
    model = nn.Linear(3, 2).bfloat16()
    assert engine.count_flops_params(model, (5, 3), verbose=False)[:2] == (6, 8)
    assert engine.count_flops_params(model, torch.Size([5, 3]), verbose=False)[:2] == (6, 8)
    assert engine.count_flops_params(nn.Linear(3, 2), (torch.ones(5, 3),), verbose=False)[:2] == (6, 8)


def test_unused_parameters_count() -> None:
    """They are part of the model."""
    model = Net(lambda m, x: m.conv(x), conv=nn.Conv2d(3, 3, 1), spare=nn.Linear(3, 2))
    assert engine.count_flops_params(model, (1, 3, 4, 4), verbose=False)[1] == 12 + 8


def test_train_only_branches_count_no_flops() -> None:
    """An auxiliary head costs nothing when the model is used."""
    results = engine.count_flops_params(Auxiliary(), (1, 3, 6, 6), verbose=False)[2]
    assert not any(name.startswith("aux") for name in results)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """``verbose`` prints a row per call and the totals."""
    engine.count_flops_params(nn.Sequential(nn.Conv2d(3, 5, 1)), (1, 3, 2, 2))
    out = capsys.readouterr().out
    assert "0     Conv2d  (5, 3, 1, 1)  60     20" in out and "FLOPs total: 60" in out and "Params total: 20" in out
    engine.count_flops_params(nn.Sequential(nn.Conv2d(3, 5, 1)), (1, 3, 2, 2), verbose=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("mode", ["fast", None, ""])
def test_an_unknown_mode_is_refused(mode: str) -> None:
    """With those that there are."""
    with pytest.raises(InputError, match=f"'default' or 'full'; got {mode!r}"):
        engine.count_flops_params(plain(), image(), verbose=False, mode=mode)


def test_bad_masks_and_inputs() -> None:
    """Each names the culprit."""
    with pytest.raises(MaskError, match="'missing'"):
        engine.count_flops_params(plain(), image(), verbose=False, masks={"missing": {}})
    with pytest.raises(engine.errors.TraceError, match="Sequential rejected the example input"):
        engine.count_flops_params(plain(), (1, 7, 4, 4), verbose=False)


class Padded(nn.Module):
    """Attention over windows; what does not fill one is padded, and in front of its first run a copy is made."""

    def __init__(self) -> None:
        super().__init__()
        self.runs, self.stem, self.qkv, self.out = 0, nn.Conv2d(3, 8, 1), nn.Linear(8, 24), nn.Linear(8, 3)
        self.heads = 4

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, (batch, 3)."""
        type(self).seen += 1
        x = self.stem(x.clone() if type(self).seen == 1 else x)
        if x.shape[-1] % 4:
            x = F.pad(x, (0, 4 - x.shape[-1] % 4))
        n, c, h, w = x.shape
        tokens = self.qkv(x.flatten(2).transpose(1, 2))
        q, k, v = tokens.reshape(n, h * w, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(n, h * w, c).mean(1))

    seen = 0


def test_a_second_recording_counts_by_its_own_values() -> None:
    """Where heads are pinned a larger resolution is recorded too, and the values of that graph may be numbered anew."""
    Padded.seen = 0
    model, x = randomised(Padded()), torch.randn(1, 3, 4, 4).double()
    graph = engine.trace(model, x)
    mask = torch.ones(3, 4, 2).index_fill(1, torch.tensor([0, 2]), 0).reshape(-1)
    masks = {"qkv": {"weight": mask[:, None].expand(24, 8), "bias": mask}}
    predicted = engine.count_flops_params(model, x, verbose=False, masks=masks, graph=graph)
    small = engine.ModelSpeedup(model, x, masks).speedup_model()
    assert small.qkv.out_features == 12 and predicted[:2] == engine.count_flops_params(small, x, verbose=False)[:2]


def test_a_custom_op_that_fails_is_named() -> None:
    """With the module that it was called for, and the original error as the cause."""
    with pytest.raises(InputError, match=r"custom op of Conv2d for '0' failed: KeyError: 'mine'") as raised:
        engine.count_flops_params(plain(), image(), custom_ops={nn.Conv2d: lambda *_: {}["mine"]})
    assert isinstance(raised.value.__cause__, KeyError)


def test_shapes_of_numpy_and_dimensions_that_are_not_there() -> None:
    """Whole numbers of any kind are a shape, truth values are none; a batch dimension has to be one of the input."""
    model = nn.Conv2d(3, 5, 1)
    assert engine.count_flops_params(model, tuple(np.array([1, 3, 2, 2])), verbose=False)[0] == 60
    with pytest.raises(InputError, match="holds no tensor"):
        engine.count_flops_params(model, (True, 3, 2, 2))
    with pytest.raises(InputError, match=r"`batch_dim` is 4, but the first input has the shape \(1, 3, 2, 2\)"):
        engine.count_flops_params(model, (1, 3, 2, 2), batch_dim=4)

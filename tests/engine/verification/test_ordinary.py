"""A compacted network whose RMS norms became ordinary ones."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.compaction.history import history, is_compacted
from engine.errors import InputError
from engine.verification import ordinary
from tests.engine.language import Language, RootMeanSquare, sentence


def halves(model: nn.Module, words: Tensor) -> dict[str, dict[str, Tensor]]:
    """Masks of half of the heads, of the neurons and of the stream."""
    groups = [group for group in engine.dependency_groups(model, words) if group.reason is None]
    return engine.group_masks(groups, {g.name: torch.arange(g.size) < (g.size + 1) // 2 for g in groups})


def decoder() -> Language:
    """In float64, with random norms."""
    torch.manual_seed(0)
    model = Language().double().eval()
    for module in model.modules():
        if isinstance(module, RootMeanSquare):
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model


def compacted(plain_norms: bool | str = "exact", training: bool = False) -> tuple[Language, engine.ModelSpeedup]:
    """The decoder, compacted."""
    model = decoder()
    speedup = engine.ModelSpeedup(model, sentence(), halves(model, sentence()), confidence=2, plain_norms=plain_norms)
    speedup.speedup_model(training=training)
    return model, speedup


def exchanged(model: nn.Module) -> list[str]:
    """Names of the modules whose class is not their own."""
    return [name for name, module in model.named_modules() if "_engine_made_by" in vars(type(module))]


def two_norms() -> tuple[nn.Sequential, Tensor, dict[str, dict[str, Tensor]]]:
    """One of each kind, an input, and masks of half of the channels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), RootMeanSquare(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    keep = torch.arange(8) < 4
    masks = {"0": {"weight": keep[:, None].expand(8, 3), "bias": keep}, "1": {"weight": keep}}
    masks |= {"2": {"weight": keep[:, None].expand(8, 8), "bias": keep}, "3": {"weight": keep, "bias": keep}}
    return model.double().eval(), torch.randn(4, 3).double(), masks


def test_the_decoder_has_the_classes_and_shapes_of_one_built_narrow() -> None:
    """It computes what the one with exchanged norms does."""
    (model, speedup), (other, _) = compacted(), compacted(False)
    narrow = Language(width=8, neurons=6, heads=2).double()
    assert exchanged(other) and not exchanged(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in narrow.modules()]
    shapes = {name: p.shape for name, p in narrow.named_parameters()}
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    assert torch.allclose(model(sentence(seed=1)), other(sentence(seed=1)), rtol=0, atol=1e-12)
    assert speedup.certificate.verified and speedup.certificate.exact and not speedup.certificate.exact_in_train
    assert "became ordinary" in speedup.certificate.notes[-1]


def test_while_training_goes_on_norms_stay_as_they_are() -> None:
    """With another scale they would train at another rate."""
    model, speedup = compacted(training=True)
    assert exchanged(model) and speedup.certificate.exact_in_train


def test_the_state_dict_loads() -> None:
    """Into a fresh network, which gets the same classes."""
    model, _ = compacted()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = engine.compactable(decoder())
    again.load_state_dict(torch.load(file, weights_only=True))
    assert not exchanged(again) and torch.equal(again(sentence()), model(sentence()))


def test_a_compacted_network_grows_back() -> None:
    """To the weights of before."""
    model, _ = compacted()
    with pytest.warns(UserWarning, match="grows back"):
        model.load_state_dict(decoder().state_dict())
    assert torch.equal(model(sentence()), decoder()(sentence()))


def test_it_is_compacted_once_more() -> None:
    """What remains is an ordinary network."""
    model, _ = compacted()
    masks = halves(model, sentence())
    expected = copy.deepcopy(model)
    for name, own in masks.items():
        for key, mask in own.items():
            expected.get_submodule(name).get_parameter(key).data.mul_(mask)
    engine.ModelSpeedup(model, sentence(), masks, confidence=2, plain_norms="exact").speedup_model()
    assert not exchanged(model) and model.norm.weight.shape == (4,)
    assert torch.allclose(model(sentence()), expected(sentence()), rtol=0, atol=1e-12)


@pytest.mark.parametrize("plain_norms", ["exact", True])
def test_norms_of_earlier_compactions_follow(plain_norms: bool | str) -> None:
    """Where nothing else is removed, the certificate is that of the exchange."""
    model, x, masks = two_norms()
    engine.ModelSpeedup(model, x, masks).speedup_model(training=True)
    expected, before = model(x), exchanged(model)
    speedup = engine.ModelSpeedup(model, x, {}, plain_norms=plain_norms)
    speedup.speedup_model()
    assert before == ["1", "3"] and exchanged(model) == ([] if plain_norms is True else ["3"])
    assert speedup.certificate.exact == speedup.certificate.verified == (plain_norms == "exact")
    assert torch.allclose(model(x), expected, atol=1e-12) == (plain_norms == "exact")
    assert not speedup.plan.is_empty and speedup.certificate.max_error > 0


class Read(nn.Module):
    """A network that reads the weight of its norm once more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 8), RootMeanSquare(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens, with the weight added."""
        return self.last(self.norm(self.first(x)) + self.norm.weight)


def test_a_weight_that_is_read_twice_keeps_its_scale() -> None:
    """The norm stays exchanged, which a note says."""
    model = Read().double().eval()
    keep = torch.arange(8) < 4
    masks = {"first": {"weight": keep[:, None].expand(8, 3), "bias": keep}, "norm": {"weight": keep}}
    x = torch.randn(4, 3).double()
    speedup = engine.ModelSpeedup(model, x, masks, confidence=2, plain_norms="exact")
    speedup.speedup_model()
    assert exchanged(model) == ["norm"] and model.first.out_features == 4
    assert "Does anything else read their weights" in speedup.certificate.notes[-1]


def test_layer_norms_need_consent() -> None:
    """``"exact"`` leaves them; True makes them another function."""

    def small(plain_norms: bool | str) -> tuple[nn.Module, engine.ModelSpeedup]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 2)).double().eval()
        keep = torch.arange(8) < 4
        masks = {"0": {"weight": keep[:, None].expand(8, 3), "bias": keep}, "1": {"weight": keep, "bias": keep}}
        speedup = engine.ModelSpeedup(model, torch.randn(4, 3).double(), masks, plain_norms=plain_norms)
        return speedup.speedup_model(), speedup

    assert exchanged(small("exact")[0]) == ["1"] and small("exact")[1].certificate.exact
    assert not exchanged(small(True)[0]) and not small(True)[1].certificate.exact
    with pytest.raises(InputError, match="'exact'"):
        engine.ModelSpeedup(nn.Linear(1, 1), torch.zeros(1, 1), plain_norms="all")


def interrupt(comparison: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt a comparison of outputs, counted from one."""
    difference, count = ordinary._difference, itertools.count(1)

    def interrupted(*outputs: list[Tensor]) -> float:
        if next(count) == comparison:
            raise KeyboardInterrupt
        return difference(*outputs)

    monkeypatch.setattr(ordinary, "_difference", interrupted)


def test_an_interrupted_compaction_leaves_the_masked_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was removed before comes back."""
    model, x, masks = two_norms()
    before, attributes, expected = copy.deepcopy(model.state_dict()), set(vars(model)), model(x)
    interrupt(1, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        engine.ModelSpeedup(model, x, masks, plain_norms="exact").speedup_model()
    assert set(vars(model)) == attributes and not is_compacted(model) and not exchanged(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("comparison", [1, 2], ids=["exact", "approximate"])
def test_an_interrupted_exchange_leaves_the_network_of_before(comparison: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of an earlier compaction: neither the RMS norm nor the layer norm is another."""
    model, x, masks = two_norms()
    engine.ModelSpeedup(model, x, masks).speedup_model(training=True)
    expected, classes, plans = model(x), [type(module) for module in model], len(history(model))
    interrupt(comparison, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        engine.ModelSpeedup(model, x, {}, plain_norms=True).speedup_model()
    assert [type(module) for module in model] == classes and len(history(model)) == plans
    assert torch.equal(model(x), expected)

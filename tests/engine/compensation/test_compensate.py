"""Least squares into the readers of masked channels."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
import engine.compensation.compensate as compensating
from engine.compensation.fit import Correction, correction
from engine.errors import EngineError
from tests.engine.compensation.test_norms import Remembering
from tests.engine.exactness import Masks, masked, randomised, relative_error, run


class _Residual(nn.Module):
    """A block whose second convolution is read by a norm and added to what went another way."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.first, self.norm = nn.Conv2d(6, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
        self.second, self.scale = nn.Conv2d(12, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.scale(self.second(self.norm(self.first(x)).relu_()))
        y += x[:, :, ::1, ::1]
        return self.head(y.relu().mean((2, 3)))


class _Perceptron(nn.Module):
    """Linear layers over tokens, with the channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(5, 16), nn.Linear(16, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(F.gelu(self.up(x))))


def _chain(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(copy.deepcopy(layer) for layer in layers))


class _Downsampled(nn.Module):
    """A block whose shortcut is a convolution, called after the other branch, and read by masks too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.second, self.norm = nn.Conv2d(8, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.shortcut, self.head = nn.Conv2d(6, 6, 1), nn.Conv2d(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        y = self.norm(self.second(self.first(x).relu()))
        return self.head((y + self.shortcut(x)).relu())


class _JoinedBias(_Perceptron):
    """The bias of a layer is put together of a parameter and a buffer, as BEiT does for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.ones(2))
        self.register_buffer("key", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        down = F.linear(F.gelu(self.up(x)), self.down.weight, torch.cat([self.query, self.key]))
        return self.head(x + down)


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (_Residual, (3, 8, 8)),
    "downsampled": (_Downsampled, (3, 8, 8)),
    "perceptron": (_Perceptron, (7, 5)),
    "joined bias": (_JoinedBias, (7, 5)),
    "strided": (_chain(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2, padding=1)), (3, 9, 9)),
    "dilated": (_chain(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, dilation=2)), (3, 9, 9)),
    "grouped": (_chain(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, groups=2)), (3, 9, 9)),
    "transposed": (_chain(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 4, 3, stride=2)), (3, 6, 6)),
    "one dimension": (_chain(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 3)), (3, 12)),
    "three dimensions": (_chain(nn.Conv3d(2, 8, 3), nn.ReLU(), nn.Conv3d(8, 4, 2)), (2, 5, 5, 5)),
}


def _setting(name: str, samples: int = 96) -> tuple[nn.Module, Masks, Tensor, list[Tensor]]:
    make, shape = NETS[name]
    torch.manual_seed(0)
    model = randomised(make())
    example = torch.randn(2, *shape, dtype=torch.float64)
    groups = [g for g in engine.dependency_groups(model, example) if g.reason is None]
    chosen = groups if name in ("residual", "downsampled") else groups[:1]
    keep = {g.name: torch.arange(g.size) % 2 == 0 for g in chosen}
    batches = list(torch.randn(samples, *shape, dtype=torch.float64).split(32))
    return model, engine.group_masks(groups, keep), example, batches


@pytest.mark.parametrize("name", NETS)
def test_the_error_falls_on_fresh_inputs_and_compaction_stays_exact(name: str) -> None:
    """Readers make up for masked channels, on inputs that they were not fitted on; what is masked goes all the same."""
    model, masks, example, batches = _setting(name)
    dense, plain = copy.deepcopy(model), masked(model, masks)
    report = engine.compensate(model, example, masks, batches)
    assert report and all(row.after < row.before for row in report.values())
    fresh = torch.randn(64, *example.shape[1:], dtype=torch.float64)
    target, compensated = run(dense, fresh)[0], masked(model, masks)
    before, after = (float((run(net, fresh)[0] - target).square().sum()) for net in (plain, compensated))
    assert after < before
    small = engine.ModelSpeedup(model, example, masks).speedup_model()
    assert relative_error(run(compensated, fresh), run(small, fresh)) <= 1e-9


def test_a_masked_channel_that_others_repeat_costs_nothing() -> None:
    """Where the kept channels span what the masked ones say, the output is restored."""
    model, masks, example, batches = _setting("perceptron")
    with torch.no_grad():
        model.up.weight[1::2] = model.up.weight[::2]
        model.up.bias[1::2] = model.up.bias[::2]
    expected = run(model, batches[0])
    report = engine.compensate(model, example, masks, batches, ridge=1e-12)
    assert report["up"].after <= 1e-15 and report["up"].layers == ("down",)
    assert relative_error(expected, run(masked(model, masks), batches[0])) <= 1e-9


def test_element_masks_of_a_reader_stay_masked() -> None:
    """The masked model is fitted: a weight that is masked by itself counts as zero before and after."""
    model, masks, example, batches = _setting("perceptron")
    own = (torch.rand(5, 16, generator=torch.Generator().manual_seed(1)) < 0.7).double()
    masks["down"] = {"weight": own}
    before = model.down.weight.detach().clone()
    report = engine.compensate(model, example, masks, batches)
    assert report["up"].after < report["up"].before
    changed = model.down.weight.detach() != before
    assert changed.any() and not changed[own == 0].any() and not changed[:, 1::2].any()


@pytest.mark.parametrize("empty", [True, False])
def test_nothing_to_compensate_changes_nothing(empty: bool) -> None:
    """No masks, or masks of what is zero anyway: the model stays bit for bit as it was."""
    model, masks, example, batches = _setting("strided")
    if not empty:
        with torch.no_grad():
            model[0].weight.mul_(masks["0"]["weight"])
            model[0].bias.mul_(masks["0"]["bias"])
    before = copy.deepcopy(model.state_dict())
    engine.compensate(model, example, {} if empty else masks, batches)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        ([], {}, "0 samples"),
        ([torch.full((4, 3, 9, 9), torch.nan).double()], {}, "NaN or infinite"),
        ([torch.rand(4, 2, 9, 9).double()], {}, r"rejected .*\(2, 2, 9, 9\)"),
        ([torch.rand(4, 3).double()], {}, r"shape \(4, 3\)"),
        ([torch.rand(8, 3, 9, 9).double()], {"samples": 1}, "`samples`"),
        ([torch.zeros(8, 3, 9, 9).double()], {"ridge": 0.0}, "'2'.*no unique solution"),
        ([{"x": torch.rand(8, 3, 9, 9).double(), "y": torch.rand(8).double()}], {}, "2 tensors, the example 1"),
    ],
)
def test_bad_batches_are_named_and_nothing_changes(batches: list[Any], options: dict[str, Any], message: str) -> None:
    """All or nothing: after an error the model is bit for bit as it was."""
    model, masks, example, _ = _setting("strided")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(EngineError, match=message):
        engine.compensate(model, example, masks, batches, **options)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_pairs_of_inputs_and_targets() -> None:
    """What a DataLoader gives is taken as it comes; modes and the random state stay."""
    model, masks, example, batches = _setting("strided")
    other = copy.deepcopy(model).train()
    state = torch.get_rng_state()
    one = engine.compensate(model, example, masks, batches)
    two = engine.compensate(other, example, masks, [(batch, torch.zeros(len(batch))) for batch in batches])
    assert one == two and other.training and torch.equal(state, torch.get_rng_state())


def test_what_cannot_be_fitted_is_left_and_named() -> None:
    """A weight that is read twice serves two inputs; it stays, and the report says why."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(self.down(self.up(x).relu())).relu())

    torch.manual_seed(0)
    model = Shared().double()
    mask = (torch.arange(8) % 2).double()
    masks = {"up": {"weight": mask[:, None].expand(8, 4), "bias": mask}}
    before = copy.deepcopy(model.state_dict())
    report = engine.compensate(model, torch.zeros(2, 4).double(), masks, [torch.randn(64, 4).double()])
    assert "read 2 times" in report["up"].skipped["down"] and "down" in str(report)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_code_that_decides_by_its_data_is_refused() -> None:
    """The recorded program is that of the example's numbers alone."""

    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).relu() if x.sum() > 0 else self.up(x))

    mask = (torch.arange(8) % 2).double()
    masks = {"up": {"weight": mask[:, None].expand(8, 4), "bias": mask}}
    with pytest.raises(EngineError, match="has data-dependent control flow"):
        engine.compensate(Deciding().double(), torch.ones(2, 4).double(), masks, [torch.randn(64, 4).double()])


def test_too_little_memory_is_not_put_down_to_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is torch's own, and the model is as it was."""
    model, masks, example, batches = _setting("perceptron")
    before = copy.deepcopy(model.state_dict())
    message = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    failing = mock.Mock(side_effect=RuntimeError(message))
    monkeypatch.setattr(compensating, "correction", failing)
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        engine.compensate(model, example, masks, batches)
    assert not isinstance(caught.value, EngineError)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class _Sequence(nn.Module):
    """A recurrent layer between two linear ones."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(5, 12), kind(12, 8, batch_first=True, **options)
        self.last = nn.Linear(16 if self.layer.bidirectional else 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(torch.tanh(self.first(x)))[0].relu())


class _Attention(nn.Module):
    """Heads of one fused projection over a normed stream, in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(5, 16), nn.LayerNorm(16)
        self.heads, self.last = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        y = self.norm(x)
        return self.last(x + self.heads(y, y, y, need_weights=False)[0])


OTHERS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "lstm": (lambda: _Sequence(nn.LSTM), {"layer", "last"}),
    "gru": (lambda: _Sequence(nn.GRU), {"layer", "last"}),
    "rnn without biases": (lambda: _Sequence(nn.RNN, bias=False), {"layer", "last"}),
    "both directions": (lambda: _Sequence(nn.LSTM, bidirectional=True), {"layer", "last"}),
    "attention": (_Attention, {"heads", "heads.out_proj", "last"}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_recurrent_layers_and_attention(name: str) -> None:
    """What gates and projections compute of their inputs is kept close, of each direction; compaction stays exact."""
    make, layers = OTHERS[name]
    torch.manual_seed(0)
    model = randomised(make())
    x, fresh = (torch.randn(n, 6, 5, dtype=torch.float64) for n in (256, 64))
    groups = [group for group in engine.dependency_groups(model, x[:2]) if group.reason is None]
    masks = engine.group_masks(groups, {group.name: torch.arange(group.size) % 4 != 0 for group in groups})
    masks = engine.fix_mask_conflict(masks, model, x[:2])
    dense, plain = copy.deepcopy(model), masked(model, masks)
    report = engine.compensate(model, x[:2], masks, [x])
    fitted = {layer for row in report.values() for layer in row.layers}
    assert fitted and fitted <= layers and {"layer", "heads.out_proj"} & fitted
    assert all(row.after <= row.before for row in report.values())
    target, compensated = run(dense, fresh)[0], masked(model, masks)
    before, after = (float((run(net, fresh)[0] - target).square().sum()) for net in (plain, compensated))
    assert after < 0.9 * before
    losses = engine.reconstruction_losses(dense, x[:2], groups, [x])
    assert {group.name for group in groups} <= set(losses)
    small = engine.ModelSpeedup(model, x[:2], masks).speedup_model()
    assert relative_error(run(compensated, fresh), run(small, fresh)) <= 1e-9


def test_columns_are_laid_out_a_few_samples_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bound that holds one sample only, the same weights come out."""
    results = []
    for most in (2**24, 1):
        monkeypatch.setattr("engine.ops.columns._MOST", most)
        model, masks, example, batches = _setting("strided")
        engine.compensate(model, example, masks, batches)
        results.append(model.state_dict())
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def _away(*args: Any) -> Correction:
    """Return ten times what is called for, in the wrong direction."""
    change = correction(*args)
    return Correction(-10 * change.weight, -10 * change.shift)


def test_nothing_is_kept_where_the_outputs_are_further_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer may be closer to its target, and the model further from the dense one; then all keep their weights."""
    model, masks, example, batches = _setting("residual")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    monkeypatch.setattr(compensating, "squared_error", lambda rows, residual, change: -float(residual.square().sum()))
    monkeypatch.setattr(compensating, "correction", _away)
    report = engine.compensate(model, example, masks, batches)
    assert report and not any(row.layers for row in report.values())
    assert all("outputs on held-out samples rose" in why for row in report.values() for why in row.skipped.values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_the_model_keeps_of_its_inputs_stays_as_it_was() -> None:
    """Buffers and weights that the program itself writes to; the model is changed in its weights alone."""
    torch.manual_seed(0)
    net, x = randomised(Remembering()), torch.randn(64, 4).double()
    mask = (torch.arange(8) % 2).double()
    masks = {"first": {"weight": mask[:, None].expand(8, 4), "bias": mask}, "norm": {"weight": mask, "bias": mask}}
    before = copy.deepcopy(net.state_dict())
    groups = engine.dependency_groups(net, x[:2])
    engine.reconstruction_losses(net, x[:2], groups, [x])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    engine.compensate(net, x[:2], masks, [x])
    changed = {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"head.weight", "head.bias"} and net.calls == 0 and net.sizes == []

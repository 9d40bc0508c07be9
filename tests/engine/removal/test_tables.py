"""Tables in buffers are masked where a channel would vary otherwise, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.ops import rules_of
from engine.removal.structure import structure_of
from engine.repair import fix_mask_conflict
from tests.engine.exactness import Masks, check_exact, masked, randomised, relative_error, run


class PositionalEncoding(nn.Module):
    """Sines and cosines in a buffer, as tutorials write it."""

    def __init__(self, width: int, length: int = 40, batch_first: bool = True) -> None:
        super().__init__()
        self.dropout, self.batch_first = nn.Dropout(0.1), batch_first
        position = torch.arange(length).unsqueeze(1)
        divisor = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        table = torch.zeros(length, width)
        table[:, 0::2] = torch.sin(position * divisor)
        table[:, 1::2] = torch.cos(position * divisor)
        self.register_buffer("pe", table.unsqueeze(0 if batch_first else 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return embedded words with their positions."""
        table = self.pe[:, : x.size(1)] if self.batch_first else self.pe[: x.size(0)]  # type: ignore[index]
        return self.dropout(x + table)  # type: ignore[no-any-return]


class Classifier(nn.Module):
    """The tutorial's transformer, of words in ``(batch, length)``, or in ``(length, batch)``."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(20, 16), PositionalEncoding(16, batch_first=batch_first)
        layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=batch_first)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 3)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits of each word."""
        return self.head(self.encoder(self.positions(self.embed(words) * math.sqrt(16))))  # type: ignore[no-any-return]


def _words(*shape: int) -> Tensor:
    return torch.randint(20, shape, generator=torch.Generator().manual_seed(3))


def _halved(model: nn.Module, example: Any) -> Masks:
    groups = [group for group in engine.dependency_groups(model, example) if group.reason is None]
    return engine.group_masks(groups, {group.name: torch.arange(group.size) % 2 == 0 for group in groups})


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_transformer_loses_channels_of_its_stream(batch_first: bool) -> None:
    """Its positions lose them too, at any length."""
    model, words = randomised(Classifier(batch_first)), _words(5, 5)
    masks = dict(fix_mask_conflict(_halved(model, words), model, words))
    assert masks["positions"]["pe"].shape == model.positions.pe.shape
    plan = check_exact(model, masks, words, _words(7, 9), _words(1, 30))
    assert plan.slices["positions.pe"].shape[-1] == 8
    assert plan.slices["head.weight"].shape == (3, 8)


def test_a_compacted_table_is_saved_and_loaded(tmp_path: Path) -> None:
    """A new model gets the table of the checkpoint, with its shape."""
    model, words = randomised(Classifier()), _words(2, 6)
    engine.ModelSpeedup(model, words, _halved(model, words)).speedup_model()
    torch.save(model.state_dict(), tmp_path / "small.pt")
    again = engine.load_compacted_state(Classifier().double(), tmp_path / "small.pt")
    assert again.positions.pe.shape == (1, 40, 8)
    assert torch.equal(again.eval()(words), model(words))


def test_masks_of_weights_alone_leave_the_stream_as_it_is() -> None:
    """The table is not zero where they are; a repair masks it, since it has no vote."""
    model, words = randomised(Classifier()), _words(2, 6)
    masks = {
        name: {key: mask for key, mask in own.items() if key == "weight"}
        for name, own in _halved(model, words).items()
        if name != "positions"
    }
    assert "positions.pe" not in check_exact(model, masks, words).slices
    fixed = fix_mask_conflict(masks, model, words)
    assert fixed["positions"]["pe"][0, 0].tolist() == [1.0, 0.0] * 8
    assert "positions.pe" in check_exact(model, dict(fixed), words).slices


def test_zeros_that_masks_left_count() -> None:
    """A masked network, as it is loaded from a checkpoint, loses them without its masks."""
    model, words = randomised(Classifier()), _words(2, 6)
    whole = masked(model, dict(fix_mask_conflict(_halved(model, words), model, words)))
    expected = run(whole, words)
    assert engine.ModelSpeedup(whole, words).speedup_model().head.in_features == 8
    assert relative_error(expected, run(whole, words)) <= 1e-9


def test_a_kept_column_of_a_table_is_masked() -> None:
    """Masks of single entries apply to a table as to a parameter."""
    model, words = randomised(Classifier()), _words(2, 6)
    mask = torch.ones(1, 40, 16)
    mask[:, 3:7, 5] = 0
    masks = dict(fix_mask_conflict({**_halved(model, words), "positions": {"pe": mask}}, model, words))
    check_exact(model, masks, words)


class Stream(nn.Module):
    """A residual stream behind a table; how they are combined is the test's."""

    def __init__(self, combine: Callable[[Any, Tensor], Tensor], table: Tensor) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Linear(5, 8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm, self.head, self.combine = nn.LayerNorm(8), nn.Linear(8, 3), combine
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        """Return what is computed of the stream."""
        y = self.combine(self.table, self.embed(x))
        return self.head(self.norm(y + self.down(self.up(y).relu())))  # type: ignore[no-any-return]


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _positions(y: Tensor) -> Tensor:
    return torch.arange(y.size(1), device=y.device)


ADDED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "slice": (lambda table, y: y + table[:, : y.size(1)], (1, 20, 8)),
    "to": (lambda table, y: y + table[:, : y.size(1)].to(y.device, dtype=y.dtype), (1, 20, 8)),
    "type_as": (lambda table, y: y + table[: y.size(1)].unsqueeze(0).type_as(y), (20, 8)),
    "float": (lambda table, y: y + table[: y.size(1)].float().to(y), (20, 8)),
    "repeat": (lambda table, y: y + table[None].repeat(y.size(0), 1, 1)[:, : y.size(1)], (20, 8)),
    "expand": (lambda table, y: y + table[: y.size(1)].expand(y.size(0), -1, -1), (20, 8)),
    "index": (lambda table, y: y + table[_positions(y)], (20, 8)),
    "index_select": (lambda table, y: y + table.index_select(0, _positions(y)), (20, 8)),
    "embedding": (lambda table, y: y + F.embedding(_positions(y), table), (20, 8)),
    "permute": (lambda table, y: y + table.permute(2, 0, 1)[:, : y.size(1)], (20, 8, 1)),
    "transpose": (lambda table, y: y + table[:, : y.size(1)].T, (8, 20)),
    "view": (lambda table, y: y + table.view(1, 20, -1)[:, : y.size(1)], (20, 8)),
    "normalize": (lambda table, y: y + F.normalize(table[:, : y.size(1)], dim=-1), (1, 20, 8)),
    "cat": (lambda table, y: torch.cat([table[:, :1].expand(len(y), -1, -1), y], 1), (1, 20, 8)),
    "a sigmoid before": (lambda table, y: y.sigmoid() * table[:, : y.size(1)], (1, 20, 8)),
    "square": (lambda table, y: y + table[: y.size(1)], (7, 8)),
    "in the place of some": (lambda table, y: torch.where(y > 0, y, table[:, : y.size(1)]), (1, 20, 8)),
}

MULTIPLIED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda table, y: y * table[:, : y.size(1)],
    "quotient": lambda table, y: y / table[:, : y.size(1)],
    "root": lambda table, y: y * table[:, : y.size(1)].square().rsqrt(),
}

KEPT: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "beside a fixed size": (lambda t, y: y + t[:, : y.size(1)] + t[:, :1] * torch.linspace(0, 1, 8), "fixed size"),
    "its mean": (lambda t, y: y + t[:, : y.size(1)] + t.mean(), "mean"),
    "one column": (lambda t, y: (y + t[:, : y.size(1)]) * t[:, : y.size(1), :1], "takes it alone"),
    "as a divisor": (lambda t, y: (y + t[:, : y.size(1)]) / t[:, : y.size(1)], "cannot be zero there"),
    "without a number at zero": (lambda t, y: y + t[:, : y.size(1)].square().rsqrt(), "cannot be zero there"),
    "a literal size": (lambda t, y: y + t.view(1, 20, 8)[:, : y.size(1)], "does not follow"),
    "its width": (lambda t, y: y * t[:, :1].size(-1) ** 0.5 + t[:, : y.size(1)], "does not follow"),
    "a number that Python reads": (lambda t, y: y * t.max().item() + t[:, : y.size(1)], "fixed size"),
}


def _stream(combine: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...] = (1, 20, 8)) -> tuple[Any, Tensor]:
    return randomised(Stream(combine, _numbers(*shape))), _numbers(2, 7, 5)


@pytest.mark.parametrize("form", ADDED)
def test_a_table_that_is_added_is_masked(form: str) -> None:
    """Whatever happens to it before: the stream loses half of its channels, and so does the table."""
    model, x = _stream(*ADDED[form])
    masks = dict(fix_mask_conflict(_halved(model, x), model, x))
    assert int(masks[""]["table"].sum()) * 2 == model.table.numel()
    others = [] if form == "square" else [_numbers(3, 4, 5), _numbers(1, 13, 5)]
    assert check_exact(model, masks, x, *others).slices["table"].shape.count(4) == 1


@pytest.mark.parametrize("form", MULTIPLIED)
def test_a_table_that_is_multiplied_stays_as_it_is(form: str) -> None:
    """Zero times anything is zero, and a zero as divisor would not be a number."""
    model, x = _stream(MULTIPLIED[form])
    masks = dict(fix_mask_conflict(_halved(model, x), model, x))
    assert "" not in masks
    assert check_exact(model, masks, x, _numbers(3, 4, 5)).slices["table"].shape == (1, 20, 4)


@pytest.mark.parametrize("form", KEPT)
def test_a_table_that_is_read_otherwise_stays_whole(form: str) -> None:
    """With the reason."""
    combine, reason = KEPT[form]
    model, x = _stream(combine)
    [stream] = [group for group in engine.dependency_groups(model, x) if group.name == "embed"]
    assert stream.reason is not None
    assert reason in stream.reason
    assert "table" not in check_exact(model, _halved(model, x), x).slices


def test_a_table_in_a_narrower_dtype() -> None:
    """The sum has the wider one."""
    model, x = _stream(ADDED["slice"][0])
    model.table = model.table.float()
    masks = dict(fix_mask_conflict(_halved(model, x), model, x))
    assert check_exact(model, masks, x).slices["table"].shape == (1, 20, 4)


def test_what_is_not_finite_stays_whole() -> None:
    """Zero times infinity is not zero."""
    model, x = _stream(lambda table, y: y + table[:, : y.size(1)].clamp(-9, 9))
    model.table[0, 3, 2] = -math.inf
    assert "fixed size" in str(engine.dependency_groups(model, x)[0].reason)


def test_a_table_that_two_modules_hold() -> None:
    """It ties their streams, and is masked under its first name."""
    first, x = _stream(ADDED["slice"][0])
    second, _ = _stream(ADDED["slice"][0])
    second.table = first.table
    model = nn.Sequential(first, nn.Linear(3, 5), second).double().eval()
    masks = dict(fix_mask_conflict(_halved(model, x), model, x))
    assert [name for name, own in masks.items() if "table" in own] == ["0"]
    assert list(check_exact(model, masks, x).slices["0.table"].shape) == [1, 20, 4]


def test_which_tables_are_masked() -> None:
    """The structure of a graph says it."""
    model, x = _stream(ADDED["slice"][0])
    graph = engine.trace(model, x)
    assert graph.maskable == {"table"}
    assert structure_of(graph, rules_of(graph)).masked_tables == {"table"}
    members = {m.parameter: m.role for m in engine.dependency_groups(model, x)[0].members}
    assert members["table"] == "scale"
    assert list(members)[-1] == "table"

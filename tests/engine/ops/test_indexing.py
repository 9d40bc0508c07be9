"""Ops that pick entries by an index, against running them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.ops.indexing import Place
from engine.program.graph import Value
from tests.engine.exactness import KINDS, Masks, check_exact, masked, randomised, relative_error, run
from tests.engine.nets import Net, constants_of, dead, image, structure
from tests.engine.ops.brute import check_constants, check_labels, check_use

PLACES, ROWS = torch.tensor([2, 0, 2]), torch.tensor([1, 0, 1])
LABELS: dict[str, tuple[Callable[..., Any], int]] = {
    # function, classes that are left free
    "one index, over positions": (lambda x: x[:, :, PLACES], 8),
    "one index, over the last": (lambda x: x[..., PLACES], 8),
    "one index of two dimensions": (lambda x: x[:, :, PLACES[None].expand(2, 3)], 8),
    "one index, over channels": (lambda x: x[:, PLACES], 0),
    "one index, over samples": (lambda x: x[torch.tensor([1, 0, 1])], 8),
    "two indices": (lambda x: x[:, :, PLACES, PLACES], 8),
    "two indices, broadcast": (lambda x: x[:, :, PLACES[:, None], PLACES[None]], 8),
    "two indices, one for all": (lambda x: x[:, :, PLACES, torch.tensor([1])], 8),
    "two indices in front": (lambda x: x.movedim(1, -1)[ROWS, PLACES], 8),
    "two indices around the channels": (lambda x: x[ROWS, :, PLACES], 8),
    "two indices around the channels, broadcast": (lambda x: x[ROWS[:, None], :, PLACES], 8),
    "two indices with positions between": (lambda x: x.movedim(1, 2)[ROWS, :, :, PLACES], 8),
    "two indices around the channels, behind the samples": (lambda x: x.movedim(1, 2)[:, PLACES, :, PLACES], 8),
    "two indices around positions, behind the channels": (lambda x: x[..., None, None][:, :, PLACES, :, PLACES % 1], 8),
    "three indices": (lambda x: x[ROWS, :, PLACES, PLACES], 8),
    "two indices, over channels": (lambda x: x[:, PLACES, PLACES], 0),
    "two indices around positions": (lambda x: x[ROWS, PLACES], 0),
    "a mask and an index": (lambda x: x[torch.tensor([True, False]), :, PLACES], 0),
    "an index that channels decide": (lambda x: x.mean(1)[:, x.mean((0, 2, 3)).argsort() % 4], 0),
    "boolean, over positions": (lambda x: x[:, :, torch.tensor([True, False, True, True])], 0),
    "index_select over positions": (lambda x: x.index_select(2, PLACES), 8),
    "index_select over channels": (lambda x: x.index_select(1, PLACES), 0),
    "index_select from the end": (lambda x: x.index_select(-1, PLACES), 8),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels(name: str) -> None:
    """What an index picks from stays whole; the other dimensions pass where one tensor is given."""
    f, classes = LABELS[name]
    check_labels(f, classes)


SAFE: dict[str, Callable[[Tensor], Tensor]] = {
    "one index": lambda x: x[:, :, PLACES],
    "index_select": lambda x: x.index_select(2, PLACES),
    "in front": lambda x: x[torch.tensor([1, 0, 1])],
    "two dimensions": lambda x: x[:, :, PLACES[None].expand(2, 3)],
    "two tensors": lambda x: x[:, :, PLACES, PLACES],
    "two tensors, broadcast": lambda x: x[:, :, PLACES[:, None], PLACES],
    "two tensors around the channels": lambda x: x[ROWS, :, PLACES],
    "boolean": lambda x: x[:, :, torch.tensor([True, False, True, True])],
}


@pytest.mark.parametrize("name", ["one index", "index_select", "in front", "two dimensions"])
def test_constants_pass_along_other_dimensions(name: str) -> None:
    """A dead channel is the same constant wherever it is looked at."""
    f = {
        **SAFE,
        "in front": lambda x: x[torch.zeros(2, dtype=torch.long)],
        "one index": lambda x: x[:, :, PLACES.clone()],
    }[name]
    row = check_constants(f, [0, 1, 2, 3])
    assert (row[:4] != 0).all()


def test_constants_along_the_picked_dimension_are_not_known() -> None:
    """Nothing is said about channels that an index puts elsewhere."""
    check_constants(lambda x: x[:, PLACES], [])


@pytest.mark.parametrize("name", SAFE)
def test_use(name: str) -> None:
    """Picking over positions leaves the channels' influence as it is; what is not understood uses everything."""
    unused = [1, 6] if name != "boolean" else []
    check_use(lambda x: SAFE[name](x).flatten(2)[..., None], [1, 6], unused)


@pytest.mark.parametrize("name", SAFE)
def test_compaction_is_exact(name: str) -> None:
    """Between two convolutions, with dead channels and with masked columns; other inputs too."""

    def forward(m: Net, x: Tensor) -> Tensor:
        picked = SAFE[name](m.stem(x))
        return m.head(m.body(picked.flatten(2)[..., None]).mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 8, 1), body=nn.Conv2d(8, 6, 1), head=nn.Linear(6, 2)))
    for kind in KINDS.values():
        check_exact(model, kind(model, 2), image(4), image(4, seed=1))
    plan = check_exact(model, dead(model, {"stem": [0, 3], "body": [2]}, bias=True), image(4))
    expected = 8 if name == "boolean" else 6
    assert (plan.slices["stem.weight"].shape[0] if "stem.weight" in plan.slices else 8) == expected
    assert plan.slices["body.weight"].shape[0] == 5


# ---------------------------------------------------------------- embedding


class Words(nn.Module):
    """A table of words, two layers, and a head over the words, tied to the table or not."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.table, self.inner, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return a score for each word, (batch, length, 11)."""
        return self.head(torch.tanh(self.inner(F.gelu(self.table(x)))))


def words(batch: int = 2, length: int = 4) -> Tensor:
    """Random words."""
    return torch.randint(11, (batch, length), generator=torch.Generator().manual_seed(batch * length))


def column_masks(closed: list[int], size: int = 11) -> dict[str, Tensor]:
    """Close columns of a table."""
    return {"weight": torch.ones(size, 8).index_fill(1, torch.tensor(closed), 0)}


def check_words(model: nn.Module, masks: Masks) -> engine.Plan:
    """Compact on one sentence; compare on others, shorter and longer."""
    reference = masked(model, masks)
    speedup = engine.ModelSpeedup(model, words(), masks)
    speedup.speedup_model()
    assert all(relative_error(run(reference, x), run(model, x)) < 1e-9 for x in (words(), words(1, 1), words(3, 7)))
    return speedup.plan


def test_columns_of_a_table_go_and_rows_stay() -> None:
    """A dead column is a dead channel; words are picked by the data, so that all rows stay, dead ones too."""
    model = randomised(Words())
    masks = {"table": column_masks([1, 5])}
    masks["table"]["weight"][3] = 0
    plan = check_words(model, masks)
    assert plan.slices["table.weight"].shape == (11, 6) and plan.slices["inner.weight"].shape == (8, 6)
    assert model.table.weight.shape == (11, 6) and model.table.num_embeddings == 11


def test_the_attribute_of_a_table_stays() -> None:
    """``embedding_dim`` keeps the old number: models scale by its root, and that factor has to stay what it was."""
    model = randomised(Words())
    check_words(model, {"table": column_masks([1, 5])})
    assert model.table.embedding_dim == 8 and model.table.weight.shape == (11, 6)


def test_columns_that_are_not_read_go() -> None:
    """What the next layer does not look at is not looked up."""
    model = randomised(Words())
    plan = check_words(model, {"inner": {"weight": torch.ones(8, 8).index_fill(1, torch.tensor([0, 7]), 0)}})
    assert plan.slices["table.weight"].shape == (11, 6)


def test_a_table_with_one_dead_row_less_keeps_its_columns() -> None:
    """A column with a single live entry is alive."""
    model = randomised(Words())
    masks = {"table": column_masks([1, 5])}
    masks["table"]["weight"][10, 1] = 1
    assert check_words(model, masks).slices["table.weight"].shape == (11, 7)


def test_a_table_tied_to_the_head() -> None:
    """Columns of the one are columns of the other, so they go only where both are dead; the tie stays."""
    model = randomised(Words(tied=True))
    masks = {"table": column_masks([1, 5])} | dead(model, {"inner": [1, 5, 6]}, bias=True)
    plan = check_words(model, masks)
    assert plan.slices["table.weight"].shape == (11, 6) and model.head.weight is model.table.weight
    assert model.head.in_features == 6 and plan.slices["inner.weight"].shape == (6, 6)


def test_a_tied_head_alone_cannot_lose_rows() -> None:
    """A mask on one side only is contradictory or too little: the result is exact."""
    model = randomised(Words(tied=True))
    check_words(model, dead(model, {"inner": [1, 5, 6]}))


def test_the_groups_of_a_table() -> None:
    """Its columns are a group of their own; its rows are in none."""
    model = randomised(Words())
    graph = engine.trace(model, words())
    found = structure(model, words())
    table = graph.stored["table.weight"]
    assert found.along(found.graph.stored["table.weight"], 1) is not None
    rows = found.along(found.graph.stored["table.weight"], 0)
    assert rows is None or found.frozen[rows].all()
    assert table.shape == (11, 8)


def test_constants_of_a_table() -> None:
    """A column of zeros gives zeros; nothing is known of the others."""
    model = randomised(Words())
    constants = constants_of(model, words(), {"table": column_masks([1, 5])})
    node = next(n for n in constants.graph.nodes if n.op == "embedding")
    known = constants.along(node.output, 2)
    assert (known == 0).nonzero()[:, 0].tolist() == [1, 5] and int(known.isnan().sum()) == 6


def test_a_computed_table_stays_whole() -> None:
    """Nothing of it is a parameter's column."""
    model = randomised(
        Net(
            lambda m, x: m.head(torch.tanh(F.embedding(x, m.table.weight * 2))),
            table=nn.Embedding(11, 8),
            head=nn.Linear(8, 2),
        )
    )
    assert "table.weight" not in check_words(model, {"table": column_masks([1, 5])}).slices


class Resizable(nn.Module):
    """Words whose padding a method sets, as methods do that resize vocabularies."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.table, self.head, self.reads = nn.Embedding(9, 8, padding_idx=2), nn.Linear(8, 2), reads

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, T) -> (N, T, 2)."""
        padding = int(tokens.min()) if self.reads else self.table.padding_idx
        return self.head(F.embedding(tokens, self.table.weight, padding))  # type: ignore[no-any-return]

    def resize(self, count: int, padding: int) -> None:
        """Take another table."""
        self.table = nn.Embedding(count, 8)
        self.table.padding_idx = padding


@pytest.mark.parametrize("reads", [False, True])
def test_an_index_that_gradients_alone_depend_on_may_be_any(reads: bool) -> None:
    """Neither the columns nor what is known of them depend on the index of the padding."""
    net, tokens = randomised(Resizable(reads)), torch.arange(6).view(2, 3)
    masks = {"table": {"weight": torch.ones(9, 8)}}
    masks["table"]["weight"][:, ::2] = 0
    check_exact(net, masks, tokens, tokens + 1)
    assert engine.count_flops_params(net, tokens, verbose=False, masks=masks)[1] == 9 * 4 + 4 * 2 + 2


@pytest.mark.parametrize("options", [{"padding_idx": 0}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_options_of_a_table(options: dict[str, Any]) -> None:
    """Padding, renormalised rows, scaled gradients: exact."""
    model = randomised(Words())
    model.table = nn.Embedding(11, 8, **options).double()
    check_words(model, {"table": column_masks([1, 5])})


def test_positions_added_to_words() -> None:
    """Two tables that are added lose their columns together."""

    def forward(m: Net, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        return m.head(torch.tanh(m.inner(m.table(x) + m.positions(positions))))

    parts = {"table": nn.Embedding(11, 8), "positions": nn.Embedding(9, 8)}
    model = randomised(Net(forward, **parts, inner=nn.Linear(8, 8), head=nn.Linear(8, 2)))
    plan = check_words(model, {"table": column_masks([1, 5]), "positions": column_masks([1, 5, 7], 9)})
    assert plan.slices["table.weight"].shape == (11, 6) and plan.slices["positions.weight"].shape == (9, 6)


def test_a_table_of_biases() -> None:
    """A parameter indexed by a buffer, as relative positions are: columns go with the channels, rows stay."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(5, 8), nn.Linear(8, 2)
            self.biases = nn.Parameter(torch.randn(9, 8))
            self.register_buffer("places", torch.tensor([3, 1, 1, 8]))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.stem(x) + self.biases[self.places]))

    model = randomised(Biased())
    masks = dead(model, {"stem": [0, 1]}, bias=True) | {"": {"biases": column_masks([0, 1], 9)["weight"]}}
    x = torch.randn(2, 4, 5, dtype=torch.float64)
    plan = check_exact(model, masks, x, x[:1] + 1)
    assert plan.slices["biases"].shape == (9, 6) and plan.slices["stem.weight"].shape == (6, 5)


PUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: _put(torch.zeros_like(x), (torch.tensor([1, 0]),), x),
    "rows by truth": lambda x: _put(torch.zeros_like(x), (torch.tensor([True, True]),), x),
    "positions": lambda x: _put(x * 1, (slice(None), slice(None), torch.tensor([0, 2])), x[:, :, 1:3].tanh()),
    "one for all": lambda x: _put(x * 1, (torch.tensor([0, 1]),), x.mean((0, 2, 3))[:, None, None]),
    "places": lambda x: _put(x * 1, (torch.tensor([0, 1]), slice(None), torch.tensor([3, 0])), x[:, :, 1].sigmoid()),
    "places, broadcast": lambda x: _put(
        torch.zeros_like(x), (slice(None), slice(None), torch.tensor([[0], [2]]), torch.tensor([1, 3])), x[..., :2, 1:3]
    ),
    "one for all places": lambda x: _put(
        x * 1, (torch.tensor([0, 1]), slice(None), torch.tensor([3, 0])), x[0, :, 0, 0, None]
    ),
    "a table of indices": lambda x: _put(x * 1, (torch.tensor([[0], [1]]),), x[:, None].neg()),
}


def _put(base: Tensor, index: Any, values: Tensor) -> Tensor:
    base[index] = values
    return base


@pytest.mark.parametrize("name", PUTS)
def test_writing_at_an_index(name: str) -> None:
    """What is written goes with what it replaces, channel by channel, exactly under all masks."""
    f = PUTS[name]
    check_labels(f, classes=8, positions=False)
    check_use(f, columns=[1, 7], unused=[1, 7])
    model = randomised(
        Net(
            lambda m, x: m.head(f(torch.sigmoid(m.stem(x))).flatten(1)), stem=nn.Conv2d(3, 8, 1), head=nn.Linear(128, 2)
        )
    )
    for kind in KINDS.values():
        check_exact(model, kind(model, 1), torch.randn(2, 3, 4, 4, dtype=torch.float64))


@pytest.mark.parametrize("name", ["two tensors", "two tensors, broadcast", "two tensors around the channels"])
def test_zeros_are_zeros_at_any_index(name: str) -> None:
    """A channel of zeros, and one that is the same at all places, stay so wherever several tensors point."""
    check_constants(lambda x: SAFE[name](x.sigmoid()), [0, 1, 2, 3])


def test_a_mask_of_bytes_selects_as_a_mask_does() -> None:
    """Older code flags entries with ``uint8``, which torch takes for a mask, not for places."""
    mask = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0]] * 2, dtype=torch.uint8)
    assert Place.of([None, _index(mask.bool()), _index(PLACES)]) is None
    assert Place.of([None, _index(mask)]) == Place.of([None, _index(mask.bool())]) == Place((1, 2), 1, 1)


def _index(tensor: Tensor) -> Value:
    return Value(0, tuple(tensor.shape), tensor.dtype)


def test_writing_channels_at_an_index() -> None:
    """Channels that an index tensor names stay, and channels of a width of their own too."""
    check_labels(lambda x: _put(x * 1, (slice(None), torch.tensor([0, 3])), x[:, 1:3]), classes=0)
    check_labels(lambda x: _put(x * 1, (torch.tensor([0, 1]), torch.tensor([0, 3])), x[:, 2]), classes=0)
    check_labels(lambda x: _put(x * 1, (torch.tensor([0, 1]),), torch.ones(8, 1, 1).to(x)), classes=0)
    mask = torch.tensor([True, False])
    check_labels(lambda x: _put(x * 1, (mask, slice(None), torch.tensor([3])), x[:1, :, 0]), classes=0)


def test_constants_under_an_index() -> None:
    """Over zeros: what is written, times a map that is the same for all channels; over anything else, what agrees."""
    stem = nn.Conv2d(3, 4, 1)
    for base, known in ((torch.zeros_like, [0, 1]), (torch.ones_like, [])):
        model = Net(lambda m, x, base=base: first_row_over(base, torch.sigmoid(m.stem(x))), stem=stem).double()
        constants = constants_of(model, image(4), dead(model, {"stem": [0, 1]}))
        out = constants.graph.outputs[0]
        assert (~constants.along(out, 1).isnan()).nonzero()[:, 0].tolist() == known
        assert constants.has_profile(out) == bool(known)


def first_row_over(base: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Write the first row over something."""
    return _put(base(x), (torch.tensor([0]),), x[:1])

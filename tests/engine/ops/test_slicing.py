"""Ops that take a part of a tensor, against running them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from tests.engine.exactness import KINDS, check_exact, randomised
from tests.engine.nets import Net, dead, image
from tests.engine.ops.brute import check_constants, check_labels, check_use, demands_of, labels_of, stems


@pytest.mark.parametrize(
    ("f", "classes"),
    [
        (lambda x: x[:, 2:5], 8),
        (lambda x: x[:, -3:], 8),
        (lambda x: x[:, :, 1:3], 8),
        (lambda x: x.narrow(1, 1, 4), 8),
        (lambda x: x.chunk(2, 1), 8),
        (lambda x: x.split(4, 1), 8),
        (lambda x: x.split([3, 5], 1), 8),
        (lambda x: x.split(3, 1), 0),  # the last piece is smaller: sizes cannot follow
        (lambda x: x.unbind(2), 8),
        (lambda x: x[:, ::2] + x[:, 1::2], 4),  # neighbours go together
        (lambda x: x[:, 1::3], 0),  # steps that do not fit
        (lambda x: x[:, :6:2], 0),  # steps over a part
        (lambda x: x.unfold(2, 3, 1), 8),
        (lambda x: x.unfold(-1, 2, 2), 8),
        (lambda x: x.unfold(1, 2, 2), 0),  # windows over channels
        (lambda x: x[:, 3], 0),  # an index written in the code
        (lambda x: x.unbind(1), 0),
    ],
)
def test_parts_carry_the_labels_of_what_they_are(f: Callable[[Tensor], Any], classes: int) -> None:
    """Entries of each piece hang on the channels that they are cut from, nothing else."""
    check_labels(f, classes)


def test_pieces_of_a_chunk_keep_equally_many() -> None:
    """``chunk(2)`` gives halves of whatever is there, so both halves lose equally many."""
    labels = labels_of(stems(lambda x: x.chunk(2, 1)))
    rows = [c.rows for c in labels.constraints if hasattr(c, "rows")]
    assert len(rows) == 1 and rows[0].shape == (2, 4)


class PerHead(nn.Module):
    """Attention whose projection puts out queries, keys and values head by head."""

    def __init__(self, sizes: list[int] | None) -> None:
        super().__init__()
        self.heads, self.sizes, self.width = 4, sizes, sum(sizes or [2, 2, 2])
        self.embed, self.qkv = nn.Linear(5, 8), nn.Linear(8, 4 * self.width)
        self.out = nn.Linear(4 * (sizes or [2])[-1], 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens."""
        y = self.qkv(self.embed(x).tanh()).view(*x.shape[:2], self.heads, self.width)
        q, k, v = y.chunk(3, -1) if self.sizes is None else y.split(self.sizes, -1)
        scores = torch.einsum("nqhd,nkhd->nhqk", q, k)
        return self.out(torch.einsum("nhqk,nkhd->nqhd", scores.softmax(-1), v).flatten(2))


@pytest.mark.parametrize("sizes", [None, [2, 2, 4]])
def test_queries_keys_and_values_of_each_head(sizes: list[int] | None) -> None:
    """Where each head is cut into pieces, of one size or not, whole heads go, and any masks are exact."""
    model = randomised(PerHead(sizes))
    x, other = torch.randn(2, 4, 5).double(), torch.randn(3, 7, 5).double()
    groups = {g.name: g for g in engine.dependency_groups(model, x)}
    assert (groups["qkv"].size, groups["qkv"].reason) == (4, None)
    masks = engine.group_masks(list(groups.values()), {"qkv": torch.tensor([True, False, True, False])})
    plan = check_exact(model, masks, x, other)
    assert plan.slices["qkv.weight"].shape[0] == model.qkv.out_features // 2
    for kind in KINDS:
        check_exact(model, KINDS[kind](model, 3), x, other)


def test_constants_of_parts() -> None:
    """A part has the constants of its channels."""
    check_constants(lambda x: x[:, 2:6], constant=[0, 1])
    check_constants(lambda x: x.unfold(3, 2, 1), constant=[0, 1, 2, 3])
    check_constants(lambda x: x.chunk(2, 1)[0], constant=[0, 1, 2, 3])
    check_constants(lambda x: x.split([3, 5], 1)[1], constant=[0])
    check_constants(lambda x: x.select(1, 2)[:, None], constant=[0])


def test_use_of_parts() -> None:
    """What lies outside of the part is unused."""
    check_use(lambda x: x.unfold(2, 3, 1).sum(-1), [1], [1])
    check_use(lambda x: x[:, 2:6], [1], [0, 1, 3, 6, 7])
    check_use(lambda x: x.chunk(2, 1)[1], [], [0, 1, 2, 3])
    check_use(lambda x: torch.add(*x.chunk(2, 1)), [2], [2, 6])
    check_use(lambda x: x[:, 3][:, None] + x[:, :2], [1], [1, 2, 4, 5, 6, 7])


@pytest.mark.parametrize(
    ("f", "op"),
    [
        (lambda x: x[:, :5], "slice"),
        (lambda x: x[:, 3:], "slice"),
        (lambda x: x[:, 2:6], "slice"),
        (lambda x: x[:, -4:], "slice"),
        (lambda x: x.narrow(1, 2, 4), "narrow"),
        (lambda x: x.narrow(1, 0, 4), "narrow"),
    ],
)
@pytest.mark.parametrize("keep", [[0, 2, 3, 6, 7], [1, 4], [0, 1, 2, 3, 4, 5, 6, 7]])
def test_what_bounds_become(f: Callable[[Tensor], Tensor], op: str, keep: list[int]) -> None:
    """Calling the op with the demanded bounds on the kept channels gives the kept channels of the part."""
    names = torch.arange(8).view(1, 8, 1, 1)
    part = [n for n in f(names).flatten().tolist() if n in keep]
    small = names[:, keep]
    demands = {d.argument[0]: d.wanted for d in demands_of(f, keep, op) if d.original != d.wanted}
    start, end = _bounds(f, op)
    if op == "slice":
        found = small[:, slice(demands.get("start", start), demands.get("end", end))]
    else:
        found = small.narrow(1, demands.get("start", start), demands.get("length", end))
    assert found.flatten().tolist() == part


def _bounds(f: Callable[[Tensor], Tensor], op: str) -> tuple[int | None, int | None]:
    node = next(n for n in labels_of(stems(f)).graph.nodes if n.op == op and n.args["dim"] == 1)
    return node.args["start"], node.args["end" if op == "slice" else "length"]


def test_a_piece_of_one_channel() -> None:
    """It has no slots of its own, and still cannot go while the code asks for it."""
    demands = demands_of(lambda x: x.split([7, 1], 1)[0], [0, 1, 2, 3, 4, 5, 6], "split_with_sizes")
    assert [(d.original, d.wanted) for d in demands] == [(7, 7), (1, 0)]


def test_what_a_split_size_becomes() -> None:
    """Half of eight becomes half of what is kept."""
    keep = [0, 2, 3, 4, 5, 7]
    assert [d.wanted for d in demands_of(lambda x: x.split(4, 1), keep, "split")] == [3]
    assert [d.wanted for d in demands_of(lambda x: x.split([3, 5], 1), keep, "split_with_sizes")] == [2, 4]
    assert demands_of(lambda x: x.chunk(2, 1), keep, "chunk") == []


@pytest.mark.parametrize("cut", [lambda x: x[:, -8:], lambda x: x[:, -512:]])
def test_a_slice_from_further_than_the_end(cut: Callable[[Tensor], Tensor]) -> None:
    """It takes all, as a window takes of a short cache, and goes on to do so."""
    assert demands_of(cut, [1, 4, 5, 6, 7], "slice") == []
    layers = {"stem": nn.Conv2d(3, 8, 1), "head": nn.Linear(8, 2)}
    model = randomised(Net(lambda m, x: m.head(cut(m.stem(x)).mean((2, 3))), **layers))
    plan = check_exact(model, dead(model, {"stem": [0, 2, 3]}, bias=True), image())
    assert plan.slices["stem.weight"].shape[0] == 5


@pytest.mark.parametrize("literal", [True, False])
def test_a_literal_slice_stays_and_a_derived_one_follows(literal: bool) -> None:
    """``x[:, :4]`` cannot follow, so channels stay; ``x[:, : x.shape[1] // 2]`` follows: each is exact."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        half = 4 if literal else x.shape[1] // 2
        return m.head((x[:, :half] * x[:, half:]).mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 8, 1), head=nn.Linear(4, 2)))
    masks = dead(model, {"stem": [0, 1, 4, 5]}, bias=True)
    unsafe = engine.not_safe_to_prune(model, image())
    assert list(unsafe) == (["stem"] if literal else [])
    plan = check_exact(model, masks, image(), image(8))
    kept = plan.slices["stem.weight"].shape[0] if "stem.weight" in plan.slices else 8
    assert kept == (8 if literal else 4)


@pytest.mark.parametrize(
    ("taken", "read", "stays"),
    [
        (lambda x: x[:, -1], False, False),
        (lambda x: x[:, 0], False, False),
        (lambda x: x[:, 3], False, True),
        (lambda x: x[:, int("0")], False, True),
        (lambda x: x[:, -1], True, True),
    ],
)
def test_a_channel_that_is_taken_for_its_shape_only(taken: Callable[[Tensor], Tensor], read: bool, stays: bool) -> None:
    """The first and the last are always there; one that is read, that may be gone, or another one, keeps all."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        one = taken(x)
        return m.head(x.mean((2, 3))) * (one.sum() if read else one.shape[-1])

    model = randomised(Net(forward, stem=nn.Conv2d(3, 8, 1), head=nn.Linear(8, 2)))
    plan = check_exact(model, dead(model, {"stem": [0, 1, 7]}, bias=True), image(), image(8))
    assert plan.is_empty == stays


def test_what_nobody_reads_shrinks_along() -> None:
    """A head on the first token that is computed and dropped (BERT's pooler) still runs, and loses its columns."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        m.pooler(x[:, 0]).tanh()
        return m.head(x)

    layers = {"stem": nn.Linear(3, 8), "pooler": nn.Linear(8, 8), "head": nn.Linear(8, 2)}
    model, x = randomised(Net(forward, **layers)), torch.randn(2, 5, 3).double()
    plan = check_exact(model, dead(model, {"stem": [0, 1, 7]}, bias=True), x)
    assert plan.slices["pooler.weight"].shape[1] == 5


def test_an_empty_part_goes_along() -> None:
    """All entries are rotated and none passes: heads go all the same, and the entries of a part without entries."""

    def forward(m: Net, x: Tensor) -> Tensor:
        y = m.stem(x).unflatten(-1, (-1, 2)).transpose(1, 2)
        turned, rest = y[..., : y.shape[-1]].tanh(), y[..., y.shape[-1] :]
        y = torch.cat([turned, rest], -1).transpose(1, 2).flatten(2)
        return m.head(torch.cat([m.tokens.expand(len(y), -1, -1), y], 1))

    tokens = nn.Embedding(0, 8).weight
    model = Net(forward, stem=nn.Linear(3, 8), head=nn.Linear(8, 2))
    model.register_parameter("tokens", nn.Parameter(tokens.detach()[None]))
    model = randomised(model)
    masks = dead(model, {"stem": [0, 1, 6, 7]}, bias=True)
    plan = check_exact(model, masks, torch.randn(2, 5, 3).double(), torch.randn(3, 4, 3).double())
    assert plan.slices["stem.weight"].shape == (4, 3) and plan.slices["tokens"].shape == (1, 0, 4)


def test_uneven_masks_of_halves_are_balanced() -> None:
    """Three dead channels in one half and one in the other: one may go from each."""
    model = randomised(
        Net(
            lambda m, x: m.head(torch.cat(m.stem(x).chunk(2, 1)[::-1], 1).mean((2, 3))),
            stem=nn.Conv2d(3, 8, 1),
            head=nn.Linear(8, 2),
        )
    )
    plan = check_exact(model, dead(model, {"stem": [0, 1, 2, 5]}), image())
    assert plan.slices["stem.weight"].shape[0] == 6
    assert plan.slices["head.weight"].shape == (2, 6)


@pytest.mark.parametrize("part", ["end", "start"])
def test_a_negative_bound_behind_which_nothing_is_kept(part: str) -> None:
    """-0 counts from the other end: no bound can say "nothing from the end", so channels have to stay."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        bound = 0 - x.shape[1] // 4
        return m.head((x[:, :bound] if part == "end" else x[:, bound:]).mean((2, 3)))

    width = 6 if part == "end" else 2
    model = randomised(Net(forward, stem=nn.Conv2d(3, 8, 1), head=nn.Linear(width, 2)))
    check_exact(model, dead(model, {"stem": [0, 2, 3, 5, 6, 7]}), image())


@pytest.mark.parametrize("index", [lambda x: int(x.abs().sum() > 30), lambda x: x.shape[2] // 2])
def test_an_index_that_may_be_another_concerns_its_dimension_alone(index: Callable[[Tensor], int]) -> None:
    """Whichever row is picked, its channels are those of all rows."""
    model = randomised(
        Net(
            lambda m, x: m.head(m.stem(x)[:, :, index(x)].mean(2)),
            stem=nn.Conv2d(3, 8, 1),
            head=nn.Linear(8, 2),
        )
    )
    plan = check_exact(model, dead(model, {"stem": [0, 2, 3]}), image(), torch.randn(3, 3, 9, 5).double())
    assert plan.slices["stem.weight"].shape == (5, 3, 1, 1)

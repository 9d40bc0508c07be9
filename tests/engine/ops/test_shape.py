"""Shape ops against running them: where entries go, what sizes become."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.ops.shape import MOVES
from engine.rule import Demand
from tests.engine.exactness import check_exact, randomised
from tests.engine.nets import Net, dead, image
from tests.engine.ops.brute import check_constants, check_labels, check_use, demands_of

KEEPING: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": torch.clone,
    "contiguous": lambda x: x.transpose(2, 3).contiguous(),
    "flip over space": lambda x: x.flip(2),
    "permute and back": lambda x: x.permute(1, 0, 2, 3).permute(1, 0, 3, 2),
    "squeeze": lambda x: x.unsqueeze(2).squeeze(2),
    "to": lambda x: x.float().double(),
    "transpose": lambda x: x.transpose(2, 3),
    "unsqueeze": lambda x: x.unsqueeze(0).flatten(0, 1),
    "view": lambda x: x.view(x.shape[0], 8, -1).view(x.shape[0], 8, *x.shape[2:]),
    "roll over space": lambda x: x.roll(1, 2),
}


@pytest.mark.parametrize("name", KEEPING)
def test_channels_stay_what_they_are(name: str) -> None:
    """Labels and constants go with the entries, each channel on its own."""
    check_labels(KEEPING[name], classes=8)
    check_constants(KEEPING[name], constant=[0, 1, 2, 3])
    check_use(KEEPING[name], columns=[2, 5], unused=[2, 5])


@pytest.mark.parametrize(
    ("f", "classes"),
    [
        (lambda x: x.flatten(1), 8),
        (lambda x: x.flip(1), 8),
        (lambda x: x.permute(0, 2, 3, 1), 8),
        (lambda x: x.repeat(1, 2, 1, 1), 8),
        (lambda x: x.reshape(2, 2, 4, 4, 4), 8),
        (lambda x: x.view(2, 4, 2, 4, 4).transpose(1, 2).reshape(2, 8, 4, 4), 8),
        (lambda x: x.mean((2, 3), keepdim=True).expand(-1, -1, 3, 3), 8),
        (lambda x: x.roll(1, 1), 0),
        (lambda x: x.movedim(1, 3), 8),
    ],
)
def test_entries_move_with_their_labels(f: Callable[[Tensor], Tensor], classes: int) -> None:
    """An entry of the output carries the slots of the input entry that it is; the axis of a roll is frozen."""
    check_labels(f, classes)


def test_constants_move_along() -> None:
    """A permutation of channels permutes their constants; a repetition repeats them."""
    check_constants(lambda x: x.flip(1), constant=[4, 5, 6, 7])
    check_constants(lambda x: x.repeat(1, 2, 1, 1), constant=[0, 1, 2, 3, 8, 9, 10, 11])
    check_constants(lambda x: x.view(len(x), 2, 4, *x.shape[2:]).transpose(1, 2).flatten(1, 2), constant=[0, 2, 4, 6])


def test_use_moves_back() -> None:
    """An unread output entry makes the input entry unused that it was."""
    check_use(lambda x: x.flip(1), [0, 2], [5, 7])
    check_use(lambda x: x.repeat(1, 2, 1, 1), [0, 1, 8], [0])
    check_use(lambda x: x.view(len(x), 2, 4, *x.shape[2:]).transpose(1, 2).flatten(1, 2), [0, 1], [0, 4])


@pytest.mark.parametrize(
    ("f", "op", "wanted"),
    [
        (lambda x: x.view(2, 8, 16), "view", [2, 5, 16]),
        (lambda x: x.view(2, -1), "view", [2]),
        (lambda x: x.view(-1, 128), "view", [80]),
        (lambda x: x.reshape(16, 4, 4).mul(1), "view", [10, 4, 4]),
        (lambda x: x.permute(0, 2, 3, 1).reshape(2, 128), "_unsafe_view", [2, 80]),
        (lambda x: x.flatten(1).unflatten(1, (8, 16)), "unflatten", [5, 16]),
        (lambda x: x.mean((2, 3), keepdim=True).expand(2, 8, 4, 4), "expand", [2, 5, 4, 4]),
    ],
)
def test_what_sizes_become(f: Callable[[Tensor], Tensor], op: str, wanted: list[int]) -> None:
    """With five of eight channels kept, each size argument demands what really calling the op then needs."""
    from tests.engine.ops.brute import labels_of, stems

    ops = [n.op for n in labels_of(stems(f)).graph.nodes]
    op = op if op in ops else next(o for o in ops if o in ("reshape", "view", "_unsafe_view"))
    found = demands_of(f, [0, 2, 3, 6, 7], op)
    assert [d.wanted for d in found] == wanted
    assert all(isinstance(d, Demand) for d in found)


def test_a_size_of_the_batch_demands_nothing_new() -> None:
    """What does not depend on channels is demanded as it was given."""
    found = demands_of(lambda x: x.view(2, 8, 16), range(8), "view")
    assert all(d.original == d.wanted for d in found)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.view(x.shape[0], x.shape[1] // 2, 2, *x.shape[2:]).mean(2).repeat_interleave(2, 1),
        lambda x: x.flatten(2).transpose(1, 2).reshape(x.shape[0], *x.shape[2:], -1).permute(0, 3, 1, 2),
        lambda x: x.unflatten(1, (2, -1)).sum(1).repeat(1, 2, 1, 1),
    ],
)
def test_derived_sizes_compact_exactly(f: Callable[[Tensor], Tensor]) -> None:
    """Sizes that the code derives from shapes follow, or their axes stay: either way the result is exact."""
    model = randomised(
        Net(lambda m, x: m.head(f(m.stem(x)).mean((2, 3))), stem=nn.Conv2d(3, 8, 1), head=nn.Linear(8, 2))
    )
    check_exact(model, dead(model, {"stem": [0, 1, 4, 5]}), image(), image(8))


def test_flatten_into_linear_removes_columns_of_positions() -> None:
    """A channel behind a flatten takes all its positions along."""
    model = randomised(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2)))
    masks = dead(model, {"0": [1, 2]}, bias=True)
    plan = check_exact(model, masks, image())
    assert plan.slices["2.weight"].shape == (2, 32)


def test_every_moved_op_has_a_rule() -> None:
    """What can be seen through in a write is also known by itself."""
    assert set(MOVES) <= set(engine.RULES)


def test_expand_over_channels_takes_the_size_of_what_it_meets() -> None:
    """A dimension of size 1 that is made larger gets slots, so that the channels it meets can go."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head((x * x.new_ones(1, 1, 1, 1).expand(1, x.shape[1], 1, 1)).mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 6, 1), head=nn.Linear(6, 2)))
    plan = check_exact(model, dead(model, {"stem": [0, 1]}), image())
    assert plan.slices["stem.weight"].shape[0] == 4


def test_tokens_that_were_not_transposed_stay_whole() -> None:
    """``reshape(b, c, h, w)`` of ``(b, h * w, c)``: which channel an entry ends up in depends on the resolution."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = torch.tanh(m.stem(x))
        tokens = m.mix(x.flatten(2).transpose(1, 2))
        return m.head((x + tokens.reshape(x.shape[0], m.channels, x.shape[2], x.shape[3])).relu())

    model = randomised(Net(forward, stem=nn.Conv2d(3, 8, 1), mix=nn.Linear(8, 8), head=nn.Conv2d(8, 4, 1)))
    model.channels = 8
    x = image(2)
    reasons = [group.reason for group in engine.dependency_groups(model, x)]
    assert any("lays it out along positions" in (reason or "") for reason in reasons)
    everything = {"stem": list(range(4)), "mix": list(range(4))}  # at 2 x 2 positions these would go together
    plan = check_exact(model, dead(model, everything, bias=True), x, image(3), image(5))
    assert "mix.weight" not in plan.slices or plan.slices["mix.weight"].before[0] == plan.slices["mix.weight"].shape[0]

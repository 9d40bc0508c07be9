"""What stays of one tensor."""

from __future__ import annotations

import io

import pytest
import torch

from engine.compaction.slices import Cut, Slice, slice_from_mask
from engine.errors import PlanError


def test_a_slice_keeps_index_sets_along_dimensions() -> None:
    """One cut after the other."""
    tensor = torch.arange(24).view(4, 6)
    cut = Slice((4, 6), (Cut((0,), torch.tensor([0, 3]), (2,)), Cut((1,), torch.tensor([1, 2, 5]), (3,))))
    assert torch.equal(cut.apply(tensor), tensor[[0, 3]][:, [1, 2, 5]])
    assert cut.shape == (2, 3) and cut.apply(tensor).is_contiguous()
    assert Slice.along(1, torch.tensor([4]), (4, 6)).shape == (4, 1)


def test_a_joint_cut_keeps_other_columns_in_each_row() -> None:
    """As a grouped convolution's weight needs it."""
    mask = torch.tensor([[1, 0, 1], [0, 1, 1], [0, 0, 0]]).bool()
    cut = slice_from_mask((3, 3), mask, "w")
    assert cut.shape == (2, 2)
    assert cut.apply(torch.arange(9).view(3, 3)).tolist() == [[0, 2], [4, 5]]
    deep = slice_from_mask((3, 3, 2), mask[..., None], "w")
    assert deep.apply(torch.arange(18).view(3, 3, 2)).tolist() == [[[0, 1], [4, 5]], [[8, 9], [10, 11]]]


@pytest.mark.parametrize("shape", [(5, 1, 1), (1, 4), (5, 4), (1, 1)])
def test_a_product_of_sets_is_cut_along_each_dimension(shape: tuple[int, ...]) -> None:
    """From a compact mask, what masked indexing would keep."""
    before = (5, 4) + (2,) * (len(shape) - 2)
    mask = torch.ones(shape, dtype=torch.bool)
    if shape[0] == 5:
        mask = mask & torch.tensor([1, 0, 1, 1, 0]).bool().view([5] + [1] * (len(shape) - 1))
    if shape[1] == 4:
        mask = mask & torch.tensor([0, 1, 1, 0]).bool()
    tensor = torch.randn(before)
    found = slice_from_mask(before, mask, "w").apply(tensor)
    assert torch.equal(found.flatten(), tensor[mask.expand(before)])


def test_what_is_no_rectangle_is_an_error() -> None:
    """Rows of unequal length cannot be one tensor."""
    with pytest.raises(PlanError, match="fc.weight form no rectangle"):
        slice_from_mask((2, 2), torch.tensor([[True, True], [True, False]]), "fc.weight")
    with pytest.raises(PlanError, match="form no rectangle"):
        slice_from_mask(
            (2, 2, 2), torch.eye(2).bool().expand(2, 2, 2).clone().logical_xor(torch.eye(2).bool()[..., None]), "w"
        )


def test_a_slice_survives_storage() -> None:
    """Through a file that is read with weights_only; indices are stored as int32."""
    cut = Slice((4, 6), (Cut((0, 1), torch.tensor([1, 2, 7, 9]), (2, 2)),))
    file = io.BytesIO()
    torch.save(cut.state_dict(), file)
    file.seek(0)
    again = Slice.from_state_dict(torch.load(file, weights_only=True))
    assert again.before == cut.before and again.shape == cut.shape
    tensor = torch.randn(4, 6)
    assert torch.equal(again.apply(tensor), cut.apply(tensor))
    assert cut.state_dict()["cuts"][0]["index"].dtype == torch.int32


@pytest.mark.parametrize(
    ("dims", "index", "sizes"),
    [
        ([2], [0], [1]),
        ([-1], [0], [1]),
        ([0], [4], [1]),
        ([0], [-1], [1]),
        ([0], [], [0]),
        ([0], [0, 1], [1]),
        ([1, 0], [0], [1, 1]),
        ([0, 1], [24], [1, 1]),
        ([0, 1], [0, 1], [2]),
    ],
)
def test_damaged_slices_are_refused(dims: list[int], index: list[int], sizes: list[int]) -> None:
    """Out of range, of the wrong size, or along what is not there."""
    state = {
        "before": [4, 6],
        "cuts": [{"dims": dims, "index": torch.tensor(index, dtype=torch.int32), "sizes": sizes}],
    }
    with pytest.raises(PlanError, match="does not fit"):
        Slice.from_state_dict(state)


def test_the_memory_format_stays() -> None:
    """A channels-last weight is channels-last afterwards."""
    tensor = torch.randn(4, 6, 3, 3).to(memory_format=torch.channels_last)
    small = Slice.along(1, torch.tensor([0, 2, 3]), (4, 6, 3, 3)).apply(tensor)
    assert small.is_contiguous(memory_format=torch.channels_last) and torch.equal(small, tensor[:, [0, 2, 3]])


@pytest.mark.parametrize("shape", [(4, 6), (4, 1), (1, 6), (1, 1)])
def test_a_compact_array_is_cut_as_the_full_one_is(shape: tuple[int, int]) -> None:
    """Through single cuts, a second cut along the same dimension, and a joint one."""
    plain = Slice((4, 6), (Cut((0,), torch.tensor([0, 2, 3]), (3,)), Cut((1,), torch.tensor([1, 4, 5]), (3,))))
    twice = plain.then(Slice.along(1, torch.tensor([0, 2]), (3, 3)))
    joint = slice_from_mask(
        (4, 6), torch.eye(4, 6, dtype=torch.bool) | torch.eye(4, 6, dtype=torch.bool).roll(1, 1), "w"
    )
    array = torch.randn(shape)
    for cut in (plain, twice, joint):
        found = cut.apply_compact(array)
        assert torch.equal(found.expand(cut.shape), cut.apply(array.expand(4, 6)))


@pytest.mark.parametrize("size", [255, 256, 300, 2048])
def test_many_indices_take_a_bit_each(size: int) -> None:
    """They come back as they were, ascending; a list of few stays a list."""
    index = torch.arange(size)[torch.arange(size) % 3 > 0]
    cut = Slice.along(1, index, (2, size))
    state = cut.state_dict()
    (stored,) = state["cuts"]
    assert ("bits" in stored) is (size >= 256)
    assert torch.equal(Slice.from_state_dict(state).cuts[0].index, index)
    few = Slice.along(1, index[:3], (2, size)).state_dict()["cuts"][0]
    assert few["index"].tolist() == index[:3].tolist()


@pytest.mark.parametrize("damage", [torch.zeros(32, dtype=torch.int8), torch.zeros(2, 16, dtype=torch.uint8)])
def test_damaged_bits(damage: torch.Tensor) -> None:
    """Bits of another type or shape, too few or too many of them, and bits that claim memory, are refused."""
    state = Slice.along(0, torch.arange(200), (256,)).state_dict()
    for bits in (damage, torch.zeros(1, dtype=torch.uint8).expand(10**10), torch.full((33,), 255, dtype=torch.uint8)):
        state["cuts"][0]["bits"] = bits
        with pytest.raises(PlanError):
            Slice.from_state_dict(state)

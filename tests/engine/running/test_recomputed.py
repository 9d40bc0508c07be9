"""Tensors that are made when they are read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from engine.running.recomputed import RecomputedTensor


def counted(kept: bool = False) -> tuple[RecomputedTensor, list[int]]:
    """A stand-in for an identity in float64, and how often it was made."""
    made: list[int] = []

    def make() -> Tensor:
        made.append(1)
        return torch.eye(3, dtype=torch.float64)

    return RecomputedTensor(torch.zeros(3, 3), torch.float64, make, kept), made


@torch.inference_mode()
def test_it_is_made_for_each_op_and_forgotten() -> None:
    """It looks like what it stands for, and is read as that, in lists of arguments as well."""
    weight, made = counted()
    x = torch.rand(2, 3, dtype=torch.float64)
    assert weight.dtype == torch.float64 and weight.shape == (3, 3) and weight.stride() == (3, 1)
    assert torch.equal(nn.functional.linear(x, weight), x) and torch.equal(
        torch.cat([x, weight])[2:], torch.eye(3).double()
    )
    assert len(made) == 2 and type(x @ weight) is Tensor


@torch.inference_mode()
def test_what_is_read_often_is_kept_until_it_is_forgotten() -> None:
    """As for a cell that runs at each step."""
    weight, made = counted(kept=True)
    assert torch.equal(weight @ weight @ weight, torch.eye(3).double()) and len(made) == 1
    weight.forget()
    assert torch.equal(weight + 0, torch.eye(3).double()) and len(made) == 2


@torch.inference_mode()
def test_what_is_written_to_is_kept() -> None:
    """Directly, or through a view."""
    weight, made = counted()
    weight.view(-1)[1] = 5.0
    weight.mul_(2)
    assert (weight + 0).tolist() == [[2, 10, 0], [0, 2, 0], [0, 0, 2]] and len(made) == 1


def test_memory_that_is_not_there_is_not_handed_out() -> None:
    """Foreign code gets an error and no null pointer."""
    weight, _ = counted()
    with pytest.raises(RuntimeError, match="no memory of its own"):
        weight.data_ptr()


@torch.inference_mode()
def test_a_part_and_a_summary_without_the_whole() -> None:
    """A summary is made once, as long as nothing is written; a part is made by itself."""
    whole, parts = torch.arange(9.0).double().view(3, 3), [0]

    def part(first: Tensor, second: Tensor) -> Tensor:
        parts[0] += 1
        return whole.index_select(0, first).index_select(1, second)

    weight = RecomputedTensor(torch.zeros(3, 3), torch.float64, whole.clone, part=part)
    rows, columns = torch.tensor([0, 2]), torch.tensor([1])
    assert float(weight.summary(torch.sum)) == 36 == float(weight.summary(torch.prod))
    assert weight.part(rows, columns).tolist() == [[1.0], [7.0]] and parts == [1]
    weight.zero_()
    assert float(weight.summary(torch.sum)) == 0 and not weight.part(rows, columns).any() and parts == [1]
    weight.forget()
    assert float(weight.summary(torch.sum)) == 36 and weight.part(rows, columns).any()

"""What schemas say."""

from __future__ import annotations

import torch

from engine.program.signature import signature, without_out


def test_in_place_forms_have_the_plain_name() -> None:
    """And say what they write to; an out-of-place op writes to nothing."""
    assert signature(torch.ops.aten.relu_.default).op == "relu" == signature(torch.ops.aten.relu.default).op
    assert signature(torch.ops.aten.relu_.default).writes == ("self",)
    assert signature(torch.ops.aten.relu.default).writes == ()


def test_arguments_by_name_with_defaults() -> None:
    """Those that are given replace the defaults."""
    bound = signature(torch.ops.aten.add.Tensor).bind((1, 2), {})
    assert bound == {"self": 1, "other": 2, "alpha": 1}


def test_device_queries_are_not_recorded() -> None:
    """They are not part of a program."""
    assert not signature(torch.ops.prim.device.default).recorded


def test_bits_read_as_other_numbers_are_another_op() -> None:
    """A view of another dtype takes no size."""
    assert signature(torch.ops.aten.view.dtype).op == "view.dtype"
    assert signature(torch.ops.aten.view.default).op == "view"


def test_the_overload_without_out_arguments() -> None:
    """It has the other arguments, of the same types; what makes a tensor of numbers alone has none."""
    aten = torch.ops.aten
    assert without_out(aten.add.out) is aten.add.Tensor
    assert without_out(aten.add.Scalar_out) is aten.add.Scalar
    assert without_out(aten.sum.IntList_out) is aten.sum.dim_IntList
    assert without_out(aten.full.out) is without_out(aten.add.Tensor) is without_out(aten.add_.Tensor) is None

"""Which widths pay, on a device whose kernels work in blocks of four channels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.errors import InputError


class Blocks(engine.LatencyTable):
    """A layer costs its channels, rounded up to blocks of four."""

    def seconds(self, op: Callable[..., Any], args: Mapping[str, Any], device: torch.device) -> float:
        """Blocks of inputs times blocks of outputs of the weight."""
        out, into = (math.ceil(n / 4) for n in args["weight"].shape[:2])
        assert args["input"].shape[1] == args["weight"].shape[1] * args.get("groups", 1)
        return float(out * into)


def net() -> nn.Sequential:
    """Two groups of 16, the second one through a depthwise convolution."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 5, 1)
    )  # fmt: skip


def test_widths_that_fill_blocks_pay() -> None:
    """Of 16 tried widths those at which a block less is needed; the whole one always pays, the output is no group."""
    found = engine.paying_widths(net(), torch.zeros(1, 3, 6, 6), steps=16, table=Blocks())
    assert found["0"] == (4, 8, 12, 16) and found["2"][-1] == 16 and set(found) == {"0", "2"}


def test_a_gain_that_is_too_small_does_not_pay() -> None:
    """A width has to be faster than all larger ones by the part asked for."""
    found = engine.paying_widths(net(), torch.zeros(1, 3, 6, 6), steps=16, gain=0.4, table=Blocks())
    assert found["0"] == (4, 8, 16)


def test_what_was_measured_is_kept_in_a_file(tmp_path: Path) -> None:
    """A second table with the same file measures nothing."""
    path = tmp_path / "deep" / "table.json"
    first = engine.LatencyTable(path, rounds=1)
    found = engine.paying_widths(net(), torch.zeros(1, 3, 6, 6), steps=2, table=first)
    before = path.read_text()
    assert engine.paying_widths(net(), torch.zeros(1, 3, 6, 6), steps=2, table=engine.LatencyTable(path)) == found
    assert path.read_text() == before and "conv2d" in before


@pytest.mark.parametrize("text", ["[1]", '{"a": "b"}', "{", "null"])
def test_a_file_that_is_no_table(tmp_path: Path, text: str) -> None:
    """Refused, with its name."""
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"table\.json is not a table of latencies"):
        engine.LatencyTable(path)


def test_a_folder_is_no_table(tmp_path: Path) -> None:
    """Refused, with its name."""
    with pytest.raises(InputError, match=f"{tmp_path.name} is not a table of latencies: .*Is a directory"):
        engine.LatencyTable(tmp_path)


@pytest.mark.parametrize("options", [{"steps": 0}, {"gain": 1.0}, {"gain": -0.1}])
def test_numbers_that_make_no_sense(options: dict[str, Any]) -> None:
    """Refused."""
    with pytest.raises(InputError, match=f"`{next(iter(options))}` must be"):
        engine.paying_widths(net(), torch.zeros(1, 3, 6, 6), table=Blocks(), **options)


def test_without_data_nothing_can_be_timed() -> None:
    """A model on meta is refused."""
    with pytest.raises(InputError, match="meta"):
        engine.paying_widths(net().to("meta"), torch.zeros(1, 3, 6, 6, device="meta"))

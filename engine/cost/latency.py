"""Which widths of a layer are fast, measured call by call on the model's device.

Kernels process blocks, so that a layer of 65 channels may take as long as one of 72. A width is worth using if no
larger one is as fast. Measurements are cached, so that layers of the same sizes are measured once per device.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from engine.bounds import check_kinds, check_number
from engine.errors import InputError
from engine.groups import Group, groups_of
from engine.ops import RULES
from engine.program.defaults import own_defaults
from engine.program.graph import Graph, Node, Value
from engine.program.trees import map_tensors
from engine.removal.propagate import Structure
from engine.removal.shrink import Shrunk
from engine.removal.structure import structure_for
from engine.rule import Registry

__all__ = ["LatencyTable", "paying_widths"]


class LatencyTable:
    """Latency in seconds of single calls, by op, sizes, dtype and device.

    Args:
        path: a JSON file that is read if it exists, and written by `save`; None keeps the table in memory.
        rounds: number of timed calls; their median is used.

    Raises:
        InputError: if the file is not such a table.

    Example:
        >>> table = LatencyTable(rounds=3)
        >>> args, cpu = {"input": torch.empty(2, 3, device="meta")}, torch.device("cpu")
        >>> table.seconds(torch.relu, args, cpu) == table.seconds(torch.relu, args, cpu) > 0  # measured once
        True
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, rounds: int = 9) -> None:
        check_kinds(LatencyTable.__init__, locals())
        check_number("rounds", rounds, 1, whole=True)
        self.path, self.rounds = None if path is None else Path(path), rounds
        self._seconds: dict[str, float] = {}
        if self.path is not None and self.path.exists():
            try:
                self._seconds = {str(k): float(v) for k, v in json.loads(self.path.read_text()).items()}
            except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
                raise InputError(
                    f"{self.path} is not a table of latencies: {error}. Remove it, or give another path."
                ) from error

    def seconds(self, op: Callable[..., Any], args: Mapping[str, Any], device: torch.device) -> float:
        """Return the median time of a call on random numbers.

        Args:
            op: function to call; it must not write to its arguments.
            args: arguments by name; a tensor provides size and dtype only, and may be on ``meta``.
            device: device to measure on.
        """
        key = _key(op, args, device)
        if key not in self._seconds:
            real = map_tensors(dict(args), functools.partial(_random, device))
            self._seconds[key] = _measured(functools.partial(op, **real), device, self.rounds)
        return self._seconds[key]

    def save(self) -> None:
        """Write the table to its file, if it has one."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self._seconds, indent=0, sort_keys=True))


def _random(device: torch.device, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator(device).manual_seed(0), device=device).to(like.dtype)


def _key(op: Any, args: Mapping[str, Any], device: torch.device) -> str:
    on_cpu = f"{device}, {torch.get_num_threads()} threads"
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else on_cpu

    def tensor_key(tensor: Tensor) -> str:
        return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

    return f"{place}, torch {torch.__version__}: {op} {map_tensors(dict(args), tensor_key)}"


def _measured(call: Callable[[], Any], device: torch.device, rounds: int) -> float:
    synchronize = torch.get_device_module(device).synchronize
    times = []
    with torch.inference_mode():
        for _ in range(rounds + 2):
            synchronize()
            start = time.perf_counter()
            call()
            synchronize()
            times.append(time.perf_counter() - start)
    return median(times[2:])  # the first two calls are slower


@own_defaults()
def paying_widths(
    model: nn.Module,
    example_inputs: Any,
    *,
    steps: int = 8,
    gain: float = 0.03,
    table: LatencyTable | None = None,
    graph: Graph | None = None,
    rules: Registry = RULES,
) -> dict[str, tuple[int, ...]]:
    """Return, for each dependency group, the widths at which its layers are faster than at any larger one.

    Each convolution and linear layer that produces or consumes a group is timed separately on random numbers, with its
    sizes at ``steps`` evenly spaced widths; the sum over the layers decides.

    Args:
        model: it is only read; its device and dtype are measured.
        example_inputs: a tensor, a tuple of positional arguments, or a mapping of keyword arguments, of the batch size
            and resolution of interest.
        steps: number of widths to try, including the full one.
        gain: fraction of the time by which a width has to be faster than all larger ones.
        table: earlier measurements.
        graph: a graph of this model, to avoid recording it again.
        rules: op rules.

    Returns:
        Group name -> widths in units, ascending, the full one last; frozen groups are omitted. Pass it to
        `ChannelPruning` as ``widths``.

    Raises:
        InputError: for a model without data, or invalid ``steps`` or ``gain``.
        TraceError: if the model rejects the example inputs, or the graph is stale.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        >>> found = paying_widths(net, torch.zeros(1, 3, 16, 16), steps=4)
        >>> list(found), found["0"][-1], set(found["0"]) <= {2, 4, 6, 8}
        (['0'], 8, True)
    """
    check_kinds(paying_widths, locals())
    check_number("steps", steps, 1, whole=True)
    check_number("gain", gain, 0)
    if gain >= 1:
        raise InputError(f"`gain` must be a fraction in [0, 1), got {gain!r}.")
    if any(p.is_meta for p in model.parameters()):
        raise InputError("The model is on the meta device, where nothing can be timed.")
    structure = structure_for(model, example_inputs, graph, rules)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    table = LatencyTable() if table is None else table
    widths = {}
    for group in groups_of(structure, ()):
        if group.reason is None:
            calls, tried = _calls(structure, group), _tried(structure, group, steps)
            costs = {width: _cost(structure, calls, keep, table, device) for width, keep in tried}
            widths[group.name] = tuple(sorted(_paying(costs, gain)))
    table.save()
    return widths


def _tried(structure: Structure, group: Group, steps: int) -> Iterator[tuple[int, Tensor]]:
    """Yield widths, the largest first, with the kept slots; all rows lose equally many units."""
    rows = [group.slots[group.rows == row] for row in group.rows.unique()]
    seen: set[int] = set()
    for step in range(steps, 0, -1):
        keep = torch.ones(len(structure.roots), dtype=torch.bool)
        for row in rows:
            keep[row[max(len(row) * step // steps, 1) :]] = False
        width = int(keep[group.slots].sum())
        if width not in seen:
            seen.add(width)
            yield width, keep


def _paying(costs: Mapping[int, float], gain: float) -> Iterator[int]:
    best = float("inf")
    for width in sorted(costs, reverse=True):
        if costs[width] <= (1 - gain) * best:
            best = costs[width]
            yield width


def _cost(
    structure: Structure, calls: Iterable[Node], keep: Tensor, table: LatencyTable, device: torch.device
) -> float:
    """Latency of some calls after a removal, in seconds."""
    shrunk = Shrunk(structure, keep)
    return sum(table.seconds(node.target, _args(node, shrunk), device) for node in calls)


def _calls(structure: Structure, group: Group) -> list[Node]:
    """Return the contractions that produce or consume the group."""
    mine = torch.zeros(len(structure.roots), dtype=torch.bool)
    mine[group.slots] = True
    calls = []
    for node, c in structure.contractions():
        sides = (structure.along(c.input, c.input_dim), structure.along(c.output, c.output_dim))
        if node.path == "eval" and any(slots is not None and bool(mine[slots].any()) for slots in sides):
            calls.append(node)
    return calls


def _args(node: Node, shrunk: Shrunk) -> dict[str, Any]:
    """Return the arguments of a call in their sizes after a removal, without data."""
    sizes = shrunk.structure.rules.of(node).attributes(node, shrunk.shape)

    def sized(value: Any) -> Any:
        return torch.empty(shrunk.shape(value), dtype=value.dtype, device="meta") if isinstance(value, Value) else value

    return {name: sizes.get(name, sized(value)) for name, value in node.args.items()}

"""Latency of forward passes: the masked and the compacted network, timed in turns on one device."""

from __future__ import annotations

import copy
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from engine.bounds import check_number
from engine.program import why_sharded
from engine.running import call_model, evaluating, resolve_inputs
from lightning_compress.trainer.packages import MisconfigurationException
from lightning_compress.trainer.target import describe

if TYPE_CHECKING:
    from collections.abc import Iterator

Running = Callable[[nn.Module], AbstractContextManager[Any]]

SLOWER = 1.05  # factor from which on a forward pass counts as slower
_WARM_UP = 2
_ENOUGH = 5  # minimum number of passes for meaningful quartiles


@dataclass(frozen=True)
class Spread:
    """Times of one network, in milliseconds.

    Attributes:
        median: the median.
        low: the lower quartile.
        high: the upper quartile.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Spread:
        """Compute the quartiles of times in milliseconds.

        Example:
            >>> Spread.of([1.0, 2.0, 3.0, 4.0, 10.0])
            Spread(median=3.0, low=2.0, high=4.0)
        """
        quartiles = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3
        return cls(quartiles[1], quartiles[0], quartiles[2])

    def __str__(self) -> str:
        return f"{self.median:.3g} ms ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True)
class Comparison:
    """Forward passes of the masked and the compacted network, timed in turns.

    Attributes:
        masked: times of the masked network.
        compacted: times of the compacted network.
        runs: number of passes of each.
        example: shapes of the input.
        device: name of the device.
    """

    masked: Spread
    compacted: Spread
    runs: int
    example: str
    device: str

    @property
    def is_slower(self) -> bool:
        """Whether the compacted network is significantly slower; never with few passes."""
        beyond = self.compacted.low > self.masked.high and self.compacted.median > SLOWER * self.masked.median
        return beyond and self.runs >= _ENOUGH

    @property
    def advice(self) -> str:
        """Advice for a compacted network that is slower."""
        return (
            f"The compacted network is slower than the masked one ({self}): these widths do not suit this device. "
            "Prune to multiples of 8 (`round_to=8`), or to measured widths (`widths=engine.paying_widths(...)`)."
        )

    def __str__(self) -> str:
        return (
            f"masked {self.masked}, compacted {self.compacted}: median (and quartiles) of {self.runs} forward passes "
            f"each, in turns, on {self.device}, input {self.example}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Convert the comparison to primitives."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Comparison:
        """Restore a comparison from its `state_dict`.

        Example:
            >>> comparison = Comparison(Spread(2.0, 1.9, 2.1), Spread(1.0, 0.9, 1.1), 5, "1×3", "CPU")
            >>> Comparison.from_state_dict(comparison.state_dict()) == comparison
            True
        """
        spreads = {name: Spread(**state[name]) for name in ("masked", "compacted")}
        return cls(**{**state, **spreads})


def compare(masked: nn.Module, compacted: nn.Module, example: Any, runs: int) -> Comparison:
    """Time forward passes of two networks in turns, so that other load on the machine affects both equally.

    Args:
        masked: the masked network.
        compacted: the compacted network, on the same device.
        example: their input, as for ``engine.trace``.
        runs: number of timed passes of each, at least 1.

    Raises:
        TraceError: if one of them rejects the example.

    Example:
        >>> comparison = compare(nn.Linear(512, 512), nn.Linear(512, 2), torch.ones(1, 512), runs=3)
        >>> comparison.runs, comparison.example, comparison.masked.median > 0
        (3, '1×512', True)
    """
    one, two = (_Timed(model, example) for model in (masked, compacted))
    with one.ready(), two.ready():
        for number in range(runs):
            for timed in (one, two) if number % 2 else (two, one):  # no advantage for coming second
                timed.run()
    shapes = re.sub(r"Tensor\[([\d, ]*)\]", lambda match: match[1].replace(", ", "×"), describe(example))
    return Comparison(Spread.of(one.times), Spread.of(two.times), runs, shapes, device_name(compacted))


def latency(model: nn.Module, example: Any, runs: int, running: Running = evaluating) -> float:
    """Measure the median time of a forward pass in eval mode, in milliseconds, after a warm-up.

    Args:
        model: the model; its mode and the random state are preserved.
        example: its input, as for ``engine.trace``.
        runs: number of timed passes, at least 1.
        running: the context in which the model runs in eval mode.

    Raises:
        TraceError: if the model rejects the example.

    Example:
        >>> latency(nn.Linear(2, 2), torch.ones(1, 2), runs=3) > 0
        True
    """
    timed = _Timed(model, example, running)
    with timed.ready():
        for _ in range(runs):
            timed.run()
    return statistics.median(timed.times)


class _Timed:
    """A network whose forward passes are timed."""

    def __init__(self, model: nn.Module, example: Any, running: Running = evaluating) -> None:
        self._running = running
        self.model, (self.args, self.kwargs) = model, resolve_inputs(example)
        self.times: list[float] = []
        self._wait = torch.get_device_module(_device(model)).synchronize
        self._fast_path = torch.backends.mha.get_fastpath_enabled()

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Enter eval mode without gradients, and warm up."""
        with self._running(self.model), torch.no_grad():
            # the fast path is off while tracing, but users run it
            torch.backends.mha.set_fastpath_enabled(self._fast_path)
            for _ in range(_WARM_UP):
                call_model(self.model, self.args, self.kwargs)
            yield

    def run(self) -> None:
        """Time one pass."""
        self._wait()
        start = time.perf_counter()
        call_model(self.model, self.args, self.kwargs)
        self._wait()
        self.times.append(1e3 * (time.perf_counter() - start))


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def device_name(model: nn.Module) -> str:
    """Return the common name of a model's device, for a CPU with the number of threads.

    Example:
        >>> device_name(nn.Linear(1, 1)).partition(",")[0]
        'CPU'
    """
    device = _device(model)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}" if device.type == "cpu" else str(device)


def replica(model: nn.Module) -> tuple[nn.Module | None, str]:
    """Copy a model on its device, to compare it with the compacted model later.

    Args:
        model: the model.

    Returns:
        The copy and ``""``, or None and the reason why it cannot be copied.

    Example:
        >>> replica(nn.Linear(1, 1))
        (Linear(in_features=1, out_features=1, bias=True), '')
    """
    if why_sharded(model) is not None:
        return None, "its parameters are sharded"
    device = _device(model)
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 2 * size:
        return None, "the device lacks memory for the masked network beside the compacted one"
    try:
        return copy.deepcopy(model), ""
    except (torch.OutOfMemoryError, MemoryError):
        return None, "there is not enough memory for the masked network beside the compacted one"
    except (TypeError, RuntimeError, NotImplementedError, AttributeError) as error:
        return None, f"the network cannot be copied ({error})"


def check_runs(runs: int) -> None:
    """Check a number of timed runs.

    Raises:
        MisconfigurationException: unless it is an integer >= 0.

    Example:
        >>> check_runs(3)
    """
    check_number(
        "latency_runs", runs, 0, whole=True, what="a number of forward passes", error=MisconfigurationException
    )

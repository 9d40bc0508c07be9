"""Flags and random states of the process, and several threads that trace at once."""

from __future__ import annotations

import builtins
import contextvars
import logging
import math
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import engine
from engine.alternatives.modes import Switches
from engine.running import process
from engine.running.process import random_state, seed_generators, unchanged_process

VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE", default=0)


def _flags() -> list[Any]:
    return [
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_num_threads(),
        torch.is_anomaly_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.is_autocast_cache_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_rng_state().tolist(),
        random.getstate(),
        repr(np.random.get_state()),
        list(warnings.filters),
        logging.getLogger("torch._subclasses.fake_tensor").level,
        VARIABLE.get(),
        builtins.range,
        dict(vars(math)),
    ]


def _filter() -> None:
    warnings.filterwarnings("ignore", message="nothing")


CHANGES: dict[str, Callable[[], Any]] = {
    "grad mode": lambda: torch.set_grad_enabled(not torch.is_grad_enabled()),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "cudnn": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "cudnn deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "fast path": lambda: torch.backends.mha.set_fastpath_enabled(not torch.backends.mha.get_fastpath_enabled()),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "torch": lambda: torch.manual_seed(5),
    "python": random.random,
    "numpy": lambda: np.random.rand(),
    "warnings": _filter,
    "context": lambda: VARIABLE.set(VARIABLE.get() + 1),
}


class Net(nn.Module):
    """Changes something of the process in each call."""

    def __init__(self, change: Callable[[], Any], fails: bool) -> None:
        super().__init__()
        self.body, self._change, self._fails = nn.Linear(3, 4), change, fails

    def forward(self, x: Tensor) -> Tensor:
        """Return the features, or fail."""
        self._change()
        if self._fails:
            raise ValueError("no")
        return self.body(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("fails", [False, True], ids=["runs", "fails"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_process_is_as_before(change: str, fails: bool) -> None:
    """After a trace, and after a forward that fails."""
    VARIABLE.set(3)
    model, before = Net(CHANGES[change], fails), _flags()
    try:
        engine.trace(model, torch.zeros(2, 3))
    except engine.errors.EngineError:
        assert fails or change == "default dtype"
    assert _flags() == before


def test_the_flags_are_looked_at() -> None:
    """Each change shows without the mechanism."""
    for change in CHANGES.values():
        with unchanged_process(), torch.random.fork_rng(devices=[]):
            before = _flags()
            change()
            assert _flags() != before


def _warn() -> None:
    warnings.warn("shown once", stacklevel=1)


def _warn_by_other_filters() -> None:
    warnings.simplefilter("default")
    _warn()


def test_a_warning_of_a_run_is_shown_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python notes what it has shown, as long as filters do not change."""
    monkeypatch.setattr(warnings, "showwarning", lambda *_: None)
    with unchanged_process():
        _warn_by_other_filters()
    with pytest.raises(UserWarning, match="shown once"):
        _warn()


def test_a_context_variable_that_a_run_sets_first() -> None:
    """It has its default afterwards; Python has no way to unset one that has none."""
    fresh: contextvars.ContextVar[int] = contextvars.ContextVar("fresh", default=4)
    bare: contextvars.ContextVar[int] = contextvars.ContextVar("bare")
    with unchanged_process():
        fresh.set(5)
        bare.set(5)
    assert fresh.get() == 4 and bare.get() == 5


def test_all_is_restored_that_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that cannot be set any more raises, once all others are as before."""

    def fail(value: Any) -> None:
        raise RuntimeError("fixed by now")

    values = iter([1, 2])
    monkeypatch.setattr(process, "_FLAGS", ((lambda: next(values), fail), *process._FLAGS))
    before = _flags()
    with pytest.raises(RuntimeError, match="fixed by now"), unchanged_process(), torch.random.fork_rng(devices=[]):
        for change in CHANGES.values():
            change()
    assert _flags() == before


def test_random_numbers_of_a_gpu_count_once_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its generator is not the CPU's; asking for it would start CUDA."""
    state = torch.zeros(4, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [state])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    before = random_state()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    used = random_state()
    state += 1
    assert len({before, used, random_state()}) == 3


def _network(seed: int) -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.groups = nn.Conv2d(8 + seed, 8 + seed, 3, padding=1), 1

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = x + self.body(x).relu() * math.sqrt(x.shape[1])
            return x.view(x.shape[0], x.shape[1] // self.groups, -1, x.shape[3])

    stem = nn.Conv2d(3, 8 + seed, 1)
    return nn.Sequential(stem, Block(), Block(), nn.Flatten(), nn.LazyLinear(2))


def _summary(model: nn.Module) -> list[Any]:
    graph = engine.trace(model, torch.zeros(2, 3, 6, 6))
    return [(n.op, n.module, [v.shape for v in n.outputs], sorted(n.sizes), len(graph.guards)) for n in graph.nodes]


def test_threads_trace_at_once() -> None:
    """Four threads get the graphs that one gets, of models of their own and of one that they share."""
    models = [_network(seed) for seed in range(4)]
    for model in models:
        model(torch.zeros(2, 3, 6, 6))
    models += [models[0]] * 4
    expected = [_summary(model) for model in models]
    before = _flags()
    results: dict[int, list[Any]] = {}

    def work(place: int) -> None:
        for position in range(place, len(models), 4):
            results[position] = _summary(models[position])

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [results[position] for position in range(len(models))] == expected
    assert _flags() == before


def test_a_thread_that_runs_the_model_is_not_recorded() -> None:
    """It runs as ever, and its calls are not part of the program."""
    model = _network(0)
    images = torch.zeros(2, 3, 6, 6)
    model(images)
    expected, stop, errors = _summary(model), threading.Event(), []

    def work() -> None:
        while not stop.is_set():
            try:
                model[0](images)
            except Exception as error:
                errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert all(_summary(model) == expected for _ in range(3))
    finally:
        stop.set()
        thread.join(60)
    assert not errors


def test_flags_are_read_past_what_watches_them() -> None:
    """A look at the flags is none that the model's code takes, and is told the truth."""
    switches = Switches(nn.ReLU())
    with switches.answering(otherwise="is_autocast_enabled"), unchanged_process():
        torch.set_autocast_enabled("cpu", True)
    assert not switches.asked and not torch.is_autocast_enabled("cpu")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="torch has a generator to seed there")
def test_seeding_asks_no_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would keep a call and its stack for later each time; the numbers are those of torch's function."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("the devices are asked"))
    seed_generators(5)
    assert torch.equal(torch.rand(3), expected)

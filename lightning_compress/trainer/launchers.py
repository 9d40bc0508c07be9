"""Return of compacted weights and callback results from forked or spawned processes.

Under ``ddp_spawn``, ``ddp_fork`` and in notebooks, the fit runs in other processes. Lightning loads the weights into
the module in the main process, which still has its old shapes, and no callback hook runs there. Therefore this module
extends the two methods of Lightning's launcher that send and receive results.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from lightning_compress.trainer.packages import classes
from lightning_compress.trainer.restore import follow_checkpoints

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

KEY = "lightning_compress"


@runtime_checkable
class Returning(Protocol):
    """A callback whose results the main process needs."""

    state_key: str

    def results(self) -> dict[str, Any]:
        """Return primitives and tensors, in the process that ran the fit."""

    def load_results(self, results: dict[str, Any]) -> None:
        """Load the results in the main process."""


def bring_results_back() -> None:
    """Make Lightning's launchers that fork or spawn return compacted weights and the results of callbacks."""
    for launcher in classes("tree.strategies.launchers.multiprocessing", "_MultiProcessingLauncher"):
        _extend(launcher)


@functools.cache
def _extend(launcher: Any) -> None:
    send, receive = launcher.get_extra_results, launcher._recover_results_in_main_process

    @functools.wraps(send)
    def get_extra_results(self: Any, trainer: Trainer) -> dict[str, Any]:
        return {**send(self, trainer), KEY: _packed(trainer.callbacks)}  # type: ignore[attr-defined]

    @functools.wraps(receive)
    def recover_results(self: Any, worker_output: Any, trainer: Trainer) -> None:
        packed = worker_output.extra.pop(KEY, None)
        if packed is not None:
            follow_checkpoints(trainer.lightning_module)
        receive(self, worker_output, trainer)
        if packed is not None:
            _unpack(packed, trainer.callbacks)  # type: ignore[attr-defined]

    launcher.get_extra_results = get_extra_results
    launcher._recover_results_in_main_process = recover_results


def _packed(callbacks: Iterable[Any]) -> bytes:
    # As bytes, because tensors in shared memory do not outlive the process.
    buffer = io.BytesIO()
    torch.save({c.state_key: c.results() for c in callbacks if isinstance(c, Returning)}, buffer)
    return buffer.getvalue()


def _unpack(packed: bytes, callbacks: Iterable[Any]) -> None:
    results = torch.load(io.BytesIO(packed), weights_only=True, map_location="cpu")
    for callback in callbacks:
        if isinstance(callback, Returning) and callback.state_key in results:
            callback.load_results(results[callback.state_key])

"""A recorder for entries, in which values from outside the model vary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from engine.alternatives.mutable_state import MutableState
from engine.errors import TraceError
from engine.limits import ALWAYS_ON_DATA, MOST_TIMES_LARGER
from engine.program.entries import Entry
from engine.program.signature import Signature
from engine.program.trees import map_tensors, tensors_in
from engine.recording.gradients import GRADIENT, GradientRequests
from engine.recording.recorder import Recorder
from engine.running.fakes import Fakes
from engine.running.tensor_backup import TensorBackup

__all__ = ["EntryRecorder", "TooLargeError"]


class TooLargeError(TraceError):
    """Raised for inputs that are too large to run the model on."""


class EntryRecorder(Recorder):
    """Records entries beside forward.

    Other modules, attributes and random numbers are inputs with unknown numbers. Tensors that an entry differentiates
    are outputs. Its writes outside the model are undone.

    Args:
        model, fakes, changing: as those of a `Recorder`.
        literal: the op that creates a tensor from numbers in the code.

    Attributes:
        entries: recorded entries, and the variants in which something else runs.
        on_data: names of the entries that were recorded on real data.
        may_take_data: whether an entry that rejects tensors without data may be recorded on real data.
    """

    def __init__(
        self, model: nn.Module, fakes: Fakes | None, literal: Any = None, changing: MutableState | None = None
    ) -> None:
        self._is_entry, self._literal = False, literal
        self.entries: list[Entry] = []
        self.on_data: set[str] = set()
        self.may_take_data = True
        super().__init__(model, fakes, changing)
        self._fake_maker, self._entries_of_example = fakes, 0
        self._gradients = GradientRequests(self._leave, self._differentiate)

    def run(self, call: Callable[[Any, Any], Any], args: Any, kwargs: Any, stack: list[str], path: str) -> None:
        """Record ``call(args, kwargs)``, the first time on the example.

        A run on data keeps all results in memory until it ends: a batch of 8192, tried because of a number in the code,
        would take gigabytes.
        """
        entries = sum(t.numel() for t in tensors_in((args, kwargs)))
        self._entries_of_example = self._entries_of_example or entries
        if self._maker is None and not self._is_entry:
            if entries > max(MOST_TIMES_LARGER * self._entries_of_example, ALWAYS_ON_DATA):
                raise TooLargeError(f"Inputs with {entries} entries are not run on data.")
        super().run(call, args, kwargs, stack, path)

    def run_entry(
        self, call: Callable[[Any, Any], Any], args: Any, kwargs: Any, stack: list[str], path: str, *, fake: bool
    ) -> None:
        """Record an entry.

        Args:
            call, args, kwargs, stack, path: as those of `run`.
            fake: whether to run it on tensors without data.
        """
        self._is_entry, self._maker = True, self._fake_maker if fake else None
        if self._maker is None:
            self.on_data.add(path)
        self.coverage.begin_entries()
        try:
            with self._gradients.reset():
                self.run(call, args, kwargs, stack, path)
        finally:
            self._is_entry, self._maker = False, self._fake_maker

    @contextmanager
    def on_data_alone(self) -> Iterator[None]:
        """Record the runs in the body on real data."""
        maker, self._maker = self._maker, None
        try:
            yield
        finally:
            self._maker = maker

    @contextmanager
    def without_data(self) -> Iterator[None]:
        """Record no run in the body on real data, because a single process of several would wait for the others."""
        self.may_take_data = False
        try:
            yield
        finally:
            self.may_take_data = True

    @property
    def real(self) -> bool:
        """Whether the recorder only records on real data."""
        return self._fake_maker is None

    def _forget(self) -> None:
        super()._forget()
        self._overwritten = TensorBackup(self._tensors, anything=self._is_entry)
        self._created: dict[int, Tensor] = {}  # real tensors that this run created from nothing that varies

    # ------------------------------------------------------------------ inputs

    def _relevant(self, what: Signature, func: Any, tensors: Sequence[Tensor]) -> bool:
        if super()._relevant(what, func, tensors):
            return True
        if not self._is_entry or func is self._literal:
            return False
        random = torch.Tag.nondeterministic_seeded in func.tags
        return random or any(map(self._varies, tensors))

    def _varies(self, tensor: Tensor) -> bool:
        return self._is_entry and id(tensor) not in self._created

    def _keep_unrecorded(self, out: Any) -> Any:
        if self._is_entry:
            self._created.update((id(tensor), tensor) for tensor in tensors_in(out))
        return out

    # ------------------------------------------------------------------ autograd

    def _leave(self, tensors: Sequence[Tensor]) -> None:
        """Add tensors to the outputs."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            self._outputs += [self._read(self._substitute(t)) for t in tensors]

    def _differentiate(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Record gradients as unknown functions of the tensors that they depend on."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            bound = {"outputs": [self._substitute(t) for t in outputs], "inputs": [self._substitute(t) for t in inputs]}
            values = map_tensors(bound, self._read)
            gradients = [0 * t.detach() + 1 if self._maker is None else self._maker.like(t) for t in bound["inputs"]]
            self._add(GRADIENT, None, bound, values, [], gradients)
        return gradients

"""The recorder of a model that is run in further ways: what enters such a run from outside of the model varies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from engine.program.entries import Entry
from engine.program.trees import map_tensors, tensors_in
from engine.recording.changing import Changing
from engine.recording.fakes import Fakes
from engine.recording.gradients import GRADIENT, GradientRequests
from engine.recording.overwritten import Overwritten
from engine.recording.recorder import Recorder, Signature

__all__ = ["ClosedRecorder"]


class ClosedRecorder(Recorder):
    """Records entries beside forward.

    Other modules, attributes and random numbers are inputs of an entry, about whose numbers nothing is known; what the
    entry differentiates is an output; what it writes outside of the model is taken back.

    Args:
        model, fakes, changing: as those of a `Recorder`.
        literal: the op that makes a tensor of numbers in the code.

    Attributes:
        entries: that were recorded, and the ways in which they run otherwise.
        on_data: names of the entries that were recorded on data.
    """

    def __init__(
        self, model: nn.Module, fakes: Fakes | None, literal: Any = None, changing: Changing | None = None
    ) -> None:
        self._closed, self._literal = False, literal
        self.entries: list[Entry] = []
        self.on_data: set[str] = set()
        super().__init__(model, fakes, changing)
        self._fake_maker = fakes
        self._gradients = GradientRequests(self._leave, self._derive)

    def run_entry(
        self, call: Callable[[Any, Any], Any], args: Any, kwargs: Any, stack: list[str], path: str, *, fake: bool
    ) -> None:
        """Record an entry.

        Args:
            call, args, kwargs, stack, path: as those of `run`.
            fake: whether it runs on tensors without data.
        """
        self._closed, self._maker = True, self._fake_maker if fake else None
        if self._maker is None:
            self.on_data.add(path)
        try:
            with self._gradients.reset():
                self.run(call, args, kwargs, stack, path)
        finally:
            self._closed, self._maker = False, self._fake_maker

    @property
    def real(self) -> bool:
        """Whether it records on data only."""
        return self._fake_maker is None

    def _forget(self) -> None:
        super()._forget()
        self._overwritten = Overwritten(self._tensors, anything=self._closed)
        self._new: dict[int, Tensor] = {}  # real tensors that this run made of nothing that varies

    # ------------------------------------------------------------------ what enters

    def _relevant(self, what: Signature, func: Any, args: Any, kwargs: Any) -> bool:
        if super()._relevant(what, func, args, kwargs):
            return True
        if not self._closed or func is self._literal:
            return False
        random = torch.Tag.nondeterministic_seeded in func.tags
        return random or any(self._varies(tensor) for tensor in tensors_in((args, kwargs)))

    def _varies(self, tensor: Tensor) -> bool:
        return self._closed and id(tensor) not in self._new

    def _aside(self, out: Any) -> Any:
        if self._closed:
            self._new.update((id(tensor), tensor) for tensor in tensors_in(out))
        return out

    # ------------------------------------------------------------------ what it asks of autograd

    def _leave(self, tensors: Sequence[Tensor]) -> None:
        """Note tensors as outputs."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            self._outputs += [self._read(self._substitute(t)) for t in tensors]

    def _derive(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Record gradients, of which nothing is known but what they follow from."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            bound = {"outputs": [self._substitute(t) for t in outputs], "inputs": [self._substitute(t) for t in inputs]}
            values = map_tensors(bound, self._read)
            gradients = [0 * t.detach() + 1 if self._maker is None else self._maker.like(t) for t in bound["inputs"]]
            self._add(GRADIENT, None, bound, values, [], gradients)
        return gradients

"""Base class of the callbacks: the model, its example input, and the Trainer's strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from typing_extensions import override

import engine
from engine.errors import EngineError, InputError
from lightning_compress.selection.amounts import as_patterns
from lightning_compress.selection.evidence import Gatherer
from lightning_compress.trainer.averages import follow_loading
from lightning_compress.trainer.packages import Callback
from lightning_compress.trainer.restore import follow_checkpoints
from lightning_compress.trainer.steps import TRAINING, cannot_follow, forget_steps, step_entries, warn_of_hooks
from lightning_compress.trainer.strategy import check_strategy, parallel
from lightning_compress.trainer.target import find_example, find_model, place_example, to_device

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

    from lightning_compress.selection.amounts import Masks


class CompressionCallback(Callback):
    """Base class for callbacks that compress one model inside the LightningModule.

    Args:
        model: path of the model inside the LightningModule; ``None``: see :func:`find_model`.
        example_input: example input of the model; ``None``: see :func:`find_example`.
        constants: names of arguments, attributes and buffers that keep their value, or patterns of them, as for
            `engine.trace`; they hold for all callbacks on the model.
    """

    traces_at_start = False
    """Whether the callback needs a graph of the model before the first epoch of each fit, and so tries the model."""

    def __init__(
        self, model: str | None = None, example_input: Any = None, constants: str | Sequence[str] | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.example_input = example_input
        self.constants = as_patterns(constants, "constants")
        self._example: Any = None
        self._traced = False  # since the fit began

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        follow_checkpoints(pl_module)
        if stage == "fit":
            check_strategy(trainer, self.why_not_sharded())
            follow_loading(pl_module)
            forget_steps(pl_module)
            for callback in self._alike(trainer):
                callback._example, callback._traced = None, False

    def after_compaction(
        self, trainer: Trainer, pl_module: LightningModule, cuts: Mapping[Tensor, engine.Slice]
    ) -> None:
        """Update the callback's state after a compaction during training. Called on all ranks.

        Args:
            trainer: the Trainer.
            pl_module: the LightningModule.
            cuts: slice of each parameter and buffer that was narrowed; slice tensors of the same shape in the same way.
        """

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the callback's state, for a compaction that fails after `after_compaction`.

        It restores the attributes and gathered statistics, but not the contents of other objects in the attributes:
        `after_compaction` has to set new ones.
        """
        before = dict(vars(self))
        parts = [value.snapshot() for value in before.values() if isinstance(value, Gatherer)]

        def restore() -> None:
            vars(self).clear()
            vars(self).update(before)
            for restore_part in parts:
                restore_part()

        return restore

    def before_masking(
        self, trainer: Trainer, pl_module: LightningModule, path: str, masks: Masks, graph: engine.Graph
    ) -> None:
        """Inspect the model before channels are masked. Called on all ranks.

        Args:
            trainer: the Trainer.
            pl_module: the LightningModule.
            path: path of the model inside the LightningModule.
            masks: repaired masks of this pruning and of earlier ones, relative to the model.
            graph: graph of the current model.
        """

    def during_masking(
        self, trainer: Trainer, pl_module: LightningModule, path: str, masks: Masks, graph: engine.Graph
    ) -> None:
        """Change the model before channels are masked, after `before_masking` of all callbacks. Called on all ranks.

        Args:
            trainer: the Trainer.
            pl_module: the LightningModule.
            path: path of the model inside the LightningModule.
            masks: as in `before_masking`.
            graph: graph of the model before any callback changed it.
        """

    def after_masking(self, trainer: Trainer, pl_module: LightningModule, path: str) -> None:
        """Change the model after channels were masked. Called on all ranks.

        Args:
            trainer: the Trainer.
            pl_module: the LightningModule.
            path: path of the model inside the LightningModule.
        """

    def timed_runs(self) -> int:
        """Number of timed forward passes of the masked and the compacted network that this callback needs."""
        return 0

    def steps(self) -> Sequence[str]:
        """Names of the LightningModule's steps whose results this callback preserves."""
        return ()

    def trace(
        self, trainer: Trainer, pl_module: LightningModule, training: bool = True, ended: bool = False
    ) -> engine.Graph:
        """Trace the model, and the steps whose results the Trainer's callbacks preserve.

        Args:
            trainer: the Trainer.
            pl_module: the LightningModule.
            training: whether to include the training step.
            ended: whether no further step follows in this fit, so that it does not matter what steps leave behind.

        Raises:
            MisconfigurationException: if a step cannot be traced.
        """
        callbacks = [c for c in trainer.callbacks if isinstance(c, CompressionCallback)]  # type: ignore[attr-defined]
        kinds = list(dict.fromkeys(kind for callback in callbacks for kind in callback.steps()))
        path = self.target(pl_module)[0]
        alike = [callback for callback in callbacks if callback.constants and callback.target(pl_module)[0] == path]
        constants = sorted({name for callback in alike for name in callback.constants})
        with self.planning(trainer, pl_module) as (model, example):
            kinds = [kind for kind in kinds if training or kind != TRAINING]
            entries = step_entries(trainer, pl_module, kinds, ended)
            try:
                graph = engine.trace(model, example, entries=entries, constants=constants or None)
            except EngineError as error:
                if entries and not isinstance(error, InputError):  # that names another argument
                    raise cannot_follow(error) from error
                raise
        warn_of_hooks(entries)
        self._traced |= training
        return graph

    def is_tried(self, trainer: Trainer) -> bool:
        """Return whether a callback traces this model before the first epoch, so that it need not be tried again."""
        return any(callback._traced or callback.traces_at_start for callback in self._alike(trainer))

    @contextmanager
    def planning(self, trainer: Trainer, pl_module: LightningModule) -> Iterator[tuple[nn.Module, Any]]:
        """Yield the model in a form that the engine can analyse, and an example input on its device.

        Sharded parameters are replaced by whole parameters without data inside the context.
        """
        self.example(trainer, pl_module)
        with parallel(trainer).planning(pl_module):
            yield self.target(pl_module)[1], self.example(trainer, pl_module)

    def why_not_sharded(self) -> str | None:
        """Return why this callback does not support sharded parameters; None if it does."""
        return f"`{type(self).__name__}` does not work on sharded parameters."

    def target(self, pl_module: LightningModule) -> tuple[str, nn.Module]:
        """Return path and module of the model, looked up anew because modules may be replaced between hooks."""
        return find_model(pl_module, self.model)

    def example(self, trainer: Trainer, pl_module: LightningModule) -> Any:
        """Return the example input on the model's device. A batch is drawn once per fit and model."""
        model = self.target(pl_module)[1]
        if self._example is None:
            examples = (callback._example for callback in self._alike(trainer))
            self._example = next((example for example in examples if example is not None), None)
        if self._example is None:
            strategy, inputs = parallel(trainer), (callback.example_input for callback in self._alike(trainer))
            example_input = next((one for one in inputs if one is not None), None)
            with strategy.planning(pl_module):
                self._example = find_example(trainer, pl_module, model, example_input, placed=False)
            if strategy.shards:  # the batches of the ranks differ
                self._example = trainer.strategy.broadcast(to_device(self._example, "cpu"))
        return place_example(self._example, trainer, model)

    def _alike(self, trainer: Trainer) -> list[CompressionCallback]:
        """Return the Trainer's callbacks that compress the same model on the same example, including this one.

        A callback without an example input takes that of another one.
        """
        others = [c for c in trainer.callbacks if isinstance(c, CompressionCallback) and c is not self]  # type: ignore[attr-defined]
        any_example = self.example_input is None
        return [
            self,
            *(c for c in others if c.model == self.model and (any_example or c.example_input is self.example_input)),
        ]


@contextmanager
def masking_hooks(
    trainer: Trainer, pl_module: LightningModule, path: str, masks: Masks, graph: engine.Graph
) -> Iterator[None]:
    """Call the masking hooks of all callbacks before and after the body, which masks channels.

    Args:
        trainer, pl_module, path, masks, graph: as for `CompressionCallback.before_masking`.
    """
    callbacks = [c for c in trainer.callbacks if isinstance(c, CompressionCallback)]  # type: ignore[attr-defined]
    for callback in callbacks:
        callback.before_masking(trainer, pl_module, path, masks, graph)
    for callback in callbacks:
        callback.during_masking(trainer, pl_module, path, masks, graph)
    yield
    for callback in callbacks:
        callback.after_masking(trainer, pl_module, path)


def timed_runs(trainer: Trainer) -> int:
    """Number of timed forward passes of the masked and the compacted network that the Trainer's callbacks need."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return max((c.timed_runs() for c in callbacks if isinstance(c, CompressionCallback)), default=0)

"""What all callbacks share: which model they work on, with which example input, under which strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from typing_extensions import override

import engine
from engine.errors import EngineError
from lightning_compress.trainer.averages import follow_loading
from lightning_compress.trainer.packages import Callback
from lightning_compress.trainer.restore import follow_checkpoints
from lightning_compress.trainer.steps import TRAINING, Step, cannot_follow, forget_steps, step_entries
from lightning_compress.trainer.strategy import check_strategy, parallel
from lightning_compress.trainer.target import find_example, find_model, place_example, to_device

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

    from lightning_compress.selection.amounts import Masks


class CompressionCallback(Callback):
    """A callback that works on one model inside the LightningModule.

    Args:
        model: path of the model inside the LightningModule; ``None``: see :func:`find_model`.
        example_input: what the model takes; ``None``: see :func:`find_example`.
    """

    def __init__(self, model: str | None = None, example_input: Any = None) -> None:
        super().__init__()
        self.model = model
        self.example_input = example_input
        self._example: Any = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        follow_checkpoints(pl_module)
        if stage == "fit":
            check_strategy(trainer, self.why_not_sharded())
            follow_loading(pl_module)
            forget_steps(pl_module)
            self._example = None

    def compacted(
        self, trainer: Trainer, pl_module: LightningModule, cuts: Mapping[nn.Parameter, engine.Slice]
    ) -> None:
        """Follow the model, which was just compacted while training goes on; called on all ranks.

        Args:
            trainer: the Trainer.
            pl_module: the LightningModule.
            cuts: what stays of each parameter that got smaller; whatever has a parameter's shape is cut like it.
        """

    def before_masking(
        self, trainer: Trainer, pl_module: LightningModule, path: str, masks: Masks, graph: engine.Graph
    ) -> None:
        """Look at a model before some of its channels are masked; called on all ranks.

        Args:
            trainer: the Trainer.
            pl_module: the LightningModule.
            path: path of the model inside it.
            masks: repaired masks, relative to the model, with those of this pruning and of earlier ones.
            graph: the model as it is.
        """

    def during_masking(
        self, trainer: Trainer, pl_module: LightningModule, path: str, masks: Masks, graph: engine.Graph
    ) -> None:
        """Change a model before some of its channels are masked, once all callbacks have looked; called on all ranks.

        Args:
            trainer: the Trainer.
            pl_module: the LightningModule.
            path: path of the model inside it.
            masks: as in `before_masking`.
            graph: the model as it was.
        """

    def after_masking(self, trainer: Trainer, pl_module: LightningModule, path: str) -> None:
        """Change a model after some of its channels were masked; called on all ranks.

        Args:
            trainer: the Trainer.
            pl_module: the LightningModule.
            path: path of the model inside it.
        """

    def timed_runs(self) -> int:
        """How many forward passes of the masked and the compacted network this callback wants timed, in turns."""
        return 0

    def steps(self) -> Sequence[str]:
        """Names of the LightningModule's steps whose results this callback must not change."""
        return ()

    def trace(self, trainer: Trainer, pl_module: LightningModule, training: bool = True) -> engine.Graph:
        """Record the model, and the steps that a callback of the Trainer must not change.

        Args:
            trainer: the Trainer.
            pl_module: the LightningModule.
            training: whether the training step is among them, as training goes on.

        Raises:
            MisconfigurationException: where a step cannot be recorded.
        """
        callbacks = [c for c in trainer.callbacks if isinstance(c, CompressionCallback)]  # type: ignore[attr-defined]
        kinds = list(dict.fromkeys(kind for callback in callbacks for kind in callback.steps()))
        with self.planning(trainer, pl_module) as (model, example):
            kinds = [kind for kind in kinds if training or kind != TRAINING]
            entries = step_entries(trainer, pl_module, kinds)
            try:
                return engine.trace(model, example, entries=entries)
            except EngineError as error:
                hooks = [h for e in entries.values() if isinstance(e.call, Step) for h in e.call.epoch_hooks]
                if hooks:
                    return self._trace_batches(trainer, pl_module, kinds, hooks, error)
                if entries:
                    raise cannot_follow(error) from error
                raise

    def _trace_batches(
        self, trainer: Trainer, pl_module: LightningModule, kinds: Sequence[str], hooks: Sequence[str], error: Exception
    ) -> engine.Graph:
        """Record without the hooks of an epoch, one of which may need more than one batch."""
        with self.planning(trainer, pl_module) as (model, example):
            try:
                graph = engine.trace(model, example, entries=step_entries(trainer, pl_module, kinds, epochs=False))
            except EngineError as other:
                raise cannot_follow(other) from other
        rank_zero_warn(
            f"{' and '.join(hooks)} cannot be recorded, and what it does with the model was not looked at: it does not "
            f"run after a single batch. {error}"
        )
        return graph

    @contextmanager
    def planning(self, trainer: Trainer, pl_module: LightningModule) -> Iterator[tuple[nn.Module, Any]]:
        """The model as the engine looks at it, and an example input on its device.

        Its parameters are whole: themselves, or, where they are spread over processes, without data.
        """
        self.example(trainer, pl_module)
        with parallel(trainer).planning(pl_module):
            yield self.target(pl_module)[1], self.example(trainer, pl_module)

    def why_not_sharded(self) -> str | None:
        """Why it cannot work on parameters that are spread over processes; None where it can."""
        return f"`{type(self).__name__}` does not work on sharded parameters."

    def target(self, pl_module: LightningModule) -> tuple[str, nn.Module]:
        """Path and module of the model, looked up again: modules may be exchanged between the hooks."""
        return find_model(pl_module, self.model)

    def example(self, trainer: Trainer, pl_module: LightningModule) -> Any:
        """The example input, on the model's device. A batch is drawn once per fit."""
        model = self.target(pl_module)[1]
        if self._example is None:
            spread = parallel(trainer)
            with spread.planning(pl_module):
                self._example = find_example(trainer, pl_module, model, self.example_input, placed=False)
            if spread.shards:  # every rank has other batches
                self._example = trainer.strategy.broadcast(to_device(self._example, "cpu"))
        return place_example(self._example, trainer, model)


def timed_runs(trainer: Trainer) -> int:
    """How many forward passes of the masked and the compacted network the callbacks of a Trainer want timed."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return max((c.timed_runs() for c in callbacks if isinstance(c, CompressionCallback)), default=0)

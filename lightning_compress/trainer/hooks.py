"""The hooks behind a backward pass, up to the end of the batch: those of the LightningModule and of callbacks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_compress.trainer.packages import overrides
from lightning_compress.trainer.quiet import quiet

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule

__all__ = ["GradientHooks"]

_OF_MODULES = (
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
)
_OF_CALLBACKS = ("on_after_backward", "on_before_optimizer_step")
_PACKAGES = ("pytorch_lightning.", "lightning.", "lightning_compress.")


class GradientHooks:
    """What runs between a backward pass and the end of the batch; the optimizer's step does nothing.

    Callbacks run as copies, so that they note nothing; those of Lightning and of this package do not run.

    Args:
        pl_module: the LightningModule; it is attached to a Trainer.
        end: runs the hook at the end of the batch.
        moment: tells what the Trainer's counters are then.

    Attributes:
        callbacks: those of the user's that have such hooks.

    Example:
        >>> from pytorch_lightning import LightningModule, Trainer
        >>> class Clamping(LightningModule):
        ...     def on_after_backward(self):
        ...         self.weight.grad.clamp_(-1, 1)
        >>> module = Clamping()
        >>> module.trainer = Trainer(accelerator="cpu", logger=False)
        >>> bool(GradientHooks(module, lambda: None))
        True
    """

    def __init__(
        self, pl_module: LightningModule, end: Callable[[], None], moment: Callable[[], Mapping[str, Any]] = dict
    ) -> None:
        self._module, self._end, self._moment = pl_module, end, moment
        self._parameters = list(pl_module.named_parameters(remove_duplicate=False))
        callbacks: Sequence[Any] = pl_module.trainer.callbacks  # type: ignore[attr-defined]
        self.callbacks = [callback for callback in callbacks if any(_has(callback, name) for name in _OF_CALLBACKS)]

    def __bool__(self) -> bool:
        """Whether there are such hooks."""
        return bool(self.callbacks) or any(overrides(self._module, name) for name in _OF_MODULES)

    def __call__(self) -> None:
        """Run them, for each optimizer."""
        module: Any = self._module
        trainer: Any = module._trainer
        callbacks = list(map(_copied, self.callbacks))
        with quiet(module, trainer, self._moment()) as record:

            def run(name: str, *arguments: Any, **options: Any) -> None:
                for callback in callbacks if name in _OF_CALLBACKS else ():
                    getattr(callback, name)(module._trainer, module, *arguments)
                if overrides(module, name):
                    getattr(module, name)(*arguments, **options)

            run("on_after_backward")
            for optimizer in record.optimizers:
                optimizer.param_groups = self._present(optimizer.param_groups)

                def closure(optimizer: Any = optimizer) -> Tensor:
                    run("on_before_optimizer_step", optimizer)
                    limits = {name: getattr(trainer, name) for name in ("gradient_clip_val", "gradient_clip_algorithm")}
                    run("configure_gradient_clipping", optimizer, **limits)
                    return torch.zeros(())

                if overrides(module, "optimizer_step") and module.automatic_optimization:
                    module.optimizer_step(module.current_epoch, 0, optimizer, closure)
                else:
                    closure()
            self._end()

    def _present(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The groups of an optimizer, of the parameters that the module has in the meantime."""
        present = dict(self._module.named_parameters(remove_duplicate=False))
        names = {id(parameter): name for name, parameter in self._parameters}
        return [{**group, "params": [present[names[id(p)]] for p in group["params"]]} for group in groups]


def _has(callback: Any, name: str) -> bool:
    """Whether a callback, or a class that it comes from, has a hook that is neither Lightning's nor this package's."""
    own = next((kind for kind in type(callback).__mro__ if name in vars(kind)), None)
    return own is not None and not f"{own.__module__}.".startswith(_PACKAGES)


def _copied(callback: Any) -> Any:
    """A copy with containers of its own; what else it holds (a teacher, a writer) is not worth copying."""
    other = copy.copy(callback)
    vars(other).update((n, copy.copy(v)) for n, v in vars(callback).items() if isinstance(v, (dict, list, set)))
    return other

"""The hooks around a step and after its backward pass, of the LightningModule and of the user's callbacks."""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from engine.errors import EngineError, TraceError
from engine.running import NEEDS_DATA
from lightning_compress.trainer.copies import copied
from lightning_compress.trainer.named_tensors import named_tensors
from lightning_compress.trainer.packages import MisconfigurationException, method_of, overrides
from lightning_compress.trainer.quiet import PACKAGES, quiet
from lightning_compress.trainer.training_state import attributes_of, options_of

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule

__all__ = ["GradientHooks", "Hooks", "around"]

_SEARCHES = ("lr_find", "scale_batch_size")  # of `LearningRateFinder` and `BatchSizeFinder`
_ON_GRADIENTS = (
    *("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step"),
    "lr_scheduler_step",
)


def around(kind: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the hooks before and after a step: those of the epoch take no arguments, those of the batch the step's.

    Args:
        kind: name of the step.

    Example:
        >>> around("test_step")[1]
        ('on_test_batch_end', 'on_test_epoch_end', 'on_test_end')
    """
    stage = kind.removesuffix("ing_step").removesuffix("_step")
    last = () if stage == "train" else ("end",)  # hooks that run once, at the end of a fit, write files
    start, end = ("start", "epoch_start", "batch_start"), ("batch_end", "epoch_end", *last)
    return tuple(f"on_{stage}_{part}" for part in start), tuple(f"on_{stage}_{part}" for part in end)


class Hooks:
    """Runs hooks in the Trainer's order: those of callbacks, then that of the LightningModule.

    Copies of the callbacks run, so that the originals do not change; callbacks of Lightning and of this package do not
    run. A hook that raises an error (it may need more than one batch) does not end the run: everything that its code
    names counts as read.

    Args:
        pl_module: the LightningModule; it is attached to a Trainer.
        names: names of the hooks; callbacks without any of them are omitted.

    Attributes:
        callbacks: the user's callbacks.
        failures: errors of hooks, by the name of the hook.
        failed: names of the hooks that failed in this run.

    Example:
        >>> from pytorch_lightning import LightningModule, Trainer
        >>> class Noting(LightningModule):
        ...     def on_train_epoch_end(self):
        ...         self.seen = True
        >>> module = Noting()
        >>> module.trainer = Trainer(accelerator="cpu", logger=False)
        >>> Hooks(module, ("on_train_epoch_end",)).run("on_train_epoch_end")
        []
        >>> module.seen
        True
    """

    def __init__(self, pl_module: LightningModule, names: Collection[str]) -> None:
        callbacks: Sequence[Any] = pl_module.trainer.callbacks  # type: ignore[attr-defined]
        self.callbacks = [callback for callback in callbacks if any(_has(callback, name) for name in names)]
        self.failures: dict[str, BaseException] = {}
        self.failed = set[str]()
        self._module = pl_module
        self._copies: list[Any] = []
        self._ready = False

    def begin(self) -> None:
        """Start a run with fresh copies of the callbacks and without failed hooks."""
        self._ready, self.failed = False, set()

    def has(self, name: str) -> bool:
        """Whether the LightningModule or a callback overrides a hook."""
        return overrides(self._module, name) or any(_has(callback, name) for callback in self.callbacks)

    def run(self, name: str, *arguments: Any, **options: Any) -> list[Tensor]:
        """Run a hook; if it fails, return the tensors that count as read instead.

        Args:
            name: of the hook.
            arguments: positional arguments of the hook.
            options: keyword arguments, which callbacks do not receive.
        """
        if not self._ready:
            self._copies, self._ready = list(map(_without_searches, self.callbacks)), True
        module: Any = self._module
        read: list[Tensor] = []
        for callback in self._copies:
            if _has(callback, name):
                call = functools.partial(getattr(callback, name), module._trainer, module, *arguments)
                read += self._tried(f"{type(callback).__name__}.{name}", callback, name, call)
        if overrides(module, name):
            read += self._tried(name, module, name, functools.partial(getattr(module, name), *arguments, **options))
        return read

    def left(self) -> dict[str, Any]:
        """Return the numbers and tensors in attributes of the LightningModule and of the copies of the callbacks."""
        return attributes_of(self._module, self._copies)

    def _tried(self, label: str, owner: Any, name: str, call: Callable[[], Any]) -> list[Tensor]:
        try:
            call()
        except (*NEEDS_DATA, EngineError, MisconfigurationException):
            raise
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # of any kind, even to end a fit
            if isinstance(error, KeyboardInterrupt) and not _is_raised_by_code(error):
                raise
            if self._has_no_data():
                raise TraceError(f"{label} does not run without data: {type(error).__name__}: {error}") from error
            self.failures[label] = error
            self.failed.add(label)
            return named_tensors(method_of(owner, name), owner, self._module)
        return []

    def _has_no_data(self) -> bool:
        """Whether the recording runs without data, which some functions reject; it is repeated with data then."""
        parameter = next(self._module.parameters(), None)
        return parameter is not None and isinstance(parameter.detach(), FakeTensor)


class GradientHooks:
    """The hooks between a backward pass and the end of the batch; the optimizer's step does nothing.

    Args:
        pl_module: the LightningModule; it is attached to a Trainer.
        end: runs the hooks at the end of the batch.
        moment: returns the Trainer's counters at that time.
        hooks: the hooks of the step; by default only those of the LightningModule.
        options: returns the options of the optimizers at the end of the step.
        ended: whether no further step follows, so that it does not matter what the hooks leave behind.

    Example:
        >>> from pytorch_lightning import LightningModule, Trainer
        >>> class Clamping(LightningModule):
        ...     def on_after_backward(self):
        ...         self.weight.grad.clamp_(-1, 1)
        >>> module = Clamping()
        >>> module.trainer = Trainer(accelerator="cpu", logger=False)
        >>> GradientHooks(module, lambda: None).names()[0]
        'on_after_backward'
    """

    def __init__(
        self,
        pl_module: LightningModule,
        end: Callable[[], Any],
        moment: Callable[[], Mapping[str, Any]] = dict,
        hooks: Hooks | None = None,
        options: Callable[[], Mapping[str, Any]] = dict,
        ended: bool = False,
    ) -> None:
        self._module, self._end, self._moment, self._options = pl_module, end, moment, options
        self._ended = ended
        self._hooks = hooks or Hooks(pl_module, self.names())
        self._parameters = list(pl_module.named_parameters(remove_duplicate=False))

    @staticmethod
    def names() -> tuple[str, ...]:
        """Return the names of the hooks."""
        return (*_ON_GRADIENTS, *around("training_step")[1])

    def __call__(self) -> dict[str, Any]:
        """Run the hooks for each optimizer; return what they and the step leave behind, and errors of hooks."""
        module: Any = self._module
        trainer: Any = module._trainer
        run = self._hooks.run
        with quiet(module, trainer, self._moment()) as record:
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
                    optimizer.step(closure)
            self._end()
            options = {f"{name}, behind the step": value for name, value in options_of(record.optimizers).items()}
        if self._ended:
            return {}
        failures = {f"an error in {label}": 1.0 for label in self._hooks.failed}
        return {**self._options(), **options, **self._hooks.left(), **failures}

    def _present(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the parameter groups of an optimizer, with the parameters that the module has now."""
        present = dict(self._module.named_parameters(remove_duplicate=False))
        names = {id(parameter): name for name, parameter in self._parameters}
        return [{**group, "params": [present[names[id(p)]] for p in group["params"]]} for group in groups]


def _without_searches(callback: Any) -> Any:
    """Return a copy that does not search for a learning rate or batch size: Lightning fits, and restores everything."""
    other = copied(callback)
    modules = {name: getattr(getattr(other, name, None), "__module__", "") for name in _SEARCHES}
    own = [name for name, module in modules.items() if f"{module}.".startswith(PACKAGES)]
    vars(other).update(dict.fromkeys(own, _no_search))
    return other


def _no_search(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def _has(callback: Any, name: str) -> bool:
    """Whether a callback or one of its classes defines a hook, outside of Lightning and this package."""
    own = vars(callback).get(name) or next((kind for kind in type(callback).__mro__ if name in vars(kind)), None)
    return own is not None and not f"{getattr(own, '__module__', None)}.".startswith(PACKAGES)


def _is_raised_by_code(error: BaseException) -> bool:
    """Whether a ``raise`` statement raised an error, and not a signal that arrived there."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]

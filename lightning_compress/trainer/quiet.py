"""A stub Trainer, under which steps are recorded without changing optimizers or logs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torchmetrics import Metric

from lightning_compress.trainer.packages import DUMMY_LOGGER, LIGHTNING_MODULES, LOOPS, MisconfigurationException
from lightning_compress.trainer.ranks import alone
from lightning_compress.trainer.suppressed_writes import suppressing_writes

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule

__all__ = ["PACKAGES", "Logged", "is_quiet", "own_hooks", "quiet", "stage_of"]


PACKAGES = ("pytorch_lightning.", "lightning.", "lightning_compress.")
"""Packages whose callbacks and hooks do not run, because they support a model that becomes smaller."""

_LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
_READS_STATE = (
    "It reads the state of an optimizer, from which a compaction removes entries. Keep what you need in a buffer of "
    "the module."
)


class _Metrics(dict[str, Any]):
    """The Trainer's metrics and newly logged ones; a metric that is not logged yet has an arbitrary value."""

    def __init__(self, present: Mapping[str, Any]) -> None:
        super().__init__(present)
        self._some = torch.tensor(0.5)

    def add(self, name: str, value: Any) -> None:
        """Keep a metric as the Trainer does: without its autograd graph."""
        tensor = value if isinstance(value, Tensor) else self._some
        self[name] = tensor.detach()

    def __missing__(self, name: str) -> Tensor:
        return self._some


@dataclass
class Logged:
    """The values that a step logs, and the optimizers that it uses.

    Attributes:
        values: logged tensors and numbers.
        optimizers: stand-ins for the optimizers.
        metrics: metrics of the Trainer, by name.
    """

    values: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    metrics: _Metrics = field(default_factory=lambda: _Metrics({}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Logged:
        return self  # part of a copy of a LightningModule, whose `log` this is

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Keep what is logged."""
        if isinstance(value, Metric) and any(True for _ in value.parameters()):
            value = value.compute()
        if not isinstance(value, nn.Module):
            self.values.append(value)
            self.metrics.add(name, value)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Keep what is logged."""
        for name, value in dictionary.items():
            self.log(name, value)


class _Delegate:
    """Reads attributes from another object, but keeps writes to itself."""

    def __init__(self, other: Any, **own: Any) -> None:
        vars(self).update(own, _other=other)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_other"], name)

    def __copy__(self) -> _Delegate:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> _Delegate:
        return self  # part of a copy of a LightningModule: there is one Trainer, and it does not run

    @property
    def __class__(self) -> Any:
        """The other object's class, for code that checks the type of a strategy or an optimizer."""
        return type(vars(self)["_other"])

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        """Ignore it: `object.__class__` can be set, so an override has to accept that."""


class _StillLoop(_Delegate):
    """A stand-in for a loop of the Trainer. Neither it nor its inner loops run, and it keeps changes to itself."""

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, LOOPS):
            vars(self)[name] = value = _StillLoop(value)
        return value

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to run: a hook that calls it cannot be recorded (`LearningRateFinder.lr_find`)."""
        raise RuntimeError("The Trainer does not run while a step is recorded.")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Change nothing."""

    def setup_data(self) -> None:
        """Read no data."""


class _Still(_Delegate):
    """An optimizer or a scheduler that does nothing."""

    def step(self, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Call the closure between the user's hooks of an optimizer, and change nothing."""
        before, behind = own_hooks(self)
        for hook in before:
            hook(self, (closure, *args), kwargs)
        out = closure() if callable(closure) else None
        for hook in behind:
            hook(self, (closure, *args), kwargs)
        return out

    @property
    def state(self) -> Any:
        """Refuse to return the state, whose tensors have other sizes after a compaction."""
        raise MisconfigurationException(_READS_STATE)

    def state_dict(self) -> Any:
        """Refuse it for an optimizer, too; the state of a scheduler has no parameters."""
        if hasattr(vars(self)["_other"], "state"):
            raise MisconfigurationException(_READS_STATE)
        return vars(self)["_other"].state_dict()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Change nothing."""

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add the group to this stub only."""
        self.param_groups.append(group)

    def toggle_model(self, *args: Any, **kwargs: Any) -> Any:
        """Change nothing."""
        return nullcontext()


def own_hooks(optimizer: Any) -> tuple[list[Any], list[Any]]:
    """Return the user's hooks before and after steps of an optimizer, without those of Lightning and of this package.

    Args:
        optimizer: an optimizer, or a stub for one.

    Example:
        >>> optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], 0.1)
        >>> _ = optimizer.register_step_post_hook(print)
        >>> [len(hooks) for hooks in own_hooks(optimizer)]
        [0, 1]
    """
    real = vars(optimizer).get("_other", optimizer)
    if not isinstance(real, torch.optim.Optimizer):  # a scheduler
        return [], []
    # Optimizers around another one (Lookahead) may leave the constructor of torch's class out.
    tables = [vars(real).get(f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post")]
    before, behind = (list(filter(_is_users, table.values())) for table in tables)
    return before, behind


def _is_users(hook: Any) -> bool:
    return not f"{getattr(hook, '__module__', None)}.".startswith(PACKAGES)


def _still(optimizer: Any) -> _Still:
    groups = getattr(optimizer, "param_groups", [])
    return _Still(optimizer, param_groups=[copy.copy(group) for group in groups])


def _one_or_all(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else parts


def stage_of(kind: str) -> dict[str, bool]:
    """Return the attributes of a Trainer that depend on its stage, during a step.

    Args:
        kind: name of the step.

    Example:
        >>> [name for name, value in stage_of("validation_step").items() if value]
        ['validating', 'evaluating']
    """
    own = {"training_step": "training", "validation_step": "validating", "test_step": "testing"}.get(kind, "predicting")
    stages = dict.fromkeys(("training", "validating", "testing", "predicting", "sanity_checking"), False)
    return {**stages, own: True, "evaluating": own in ("validating", "testing")}


def _computed_metrics(trainer: Any) -> Mapping[str, Any]:
    """Return the metrics that a Trainer has computed.

    Its ``callback_metrics`` would compute those of the epoch and keep them, but in a recording they are no numbers, and
    with several processes all would have to take part.
    """
    connector = getattr(trainer, "_logger_connector", None)
    return getattr(connector, "_callback_metrics", {})


@contextmanager
def quiet(pl_module: LightningModule, trainer: Any, moment: Mapping[str, Any]) -> Iterator[Logged]:
    """Attach a LightningModule, and those inside, to a stub Trainer, and record what they log."""
    metrics = _Metrics(_computed_metrics(trainer))
    record = Logged(optimizers=[_still(optimizer) for optimizer in trainer.optimizers], metrics=metrics)
    configs = [copy.copy(config) for config in trainer.lr_scheduler_configs]
    for config in configs:
        config.scheduler = _Still(config.scheduler)
    schedulers = [config.scheduler for config in configs]
    idle = dict.fromkeys(("save_checkpoint", "remove_checkpoint", "setup_optimizers"), _nothing)
    strategy = _Delegate(trainer.strategy, optimizers=record.optimizers, lr_scheduler_configs=configs, **idle)
    loggers = [DUMMY_LOGGER() for _ in trainer.loggers]
    still = _Delegate(trainer, logger=loggers[0] if loggers else None, loggers=loggers, optimizers=record.optimizers)
    vars(still).update(
        moment, save_checkpoint=_nothing, print=_nothing, strategy=strategy, lr_scheduler_configs=configs
    )
    vars(still).update(_stub_parts(trainer))
    vars(still).update(dict.fromkeys(("callback_metrics", "logged_metrics", "progress_bar_metrics"), metrics))
    answers = {
        "log": record.log,
        "log_dict": record.log_dict,
        "optimizers": lambda *args, **kwargs: _one_or_all(record.optimizers),
        "lr_schedulers": lambda: _one_or_all(schedulers) if schedulers else None,
        "manual_backward": lambda loss, *args, **kwargs: loss.backward(*args, **kwargs),
        "toggle_optimizer": _nothing,
        "untoggle_optimizer": _nothing,
        "toggled_optimizer": lambda *args, **kwargs: nullcontext(),
        "clip_gradients": _nothing,
        "print": _nothing,
        "all_gather": lambda data, *args, **kwargs: _gathered(data, trainer.world_size),
        "_trainer": still,
    }
    modules = [module for module in pl_module.modules() if isinstance(module, LIGHTNING_MODULES)]
    with ExitStack() as scope:
        scope.enter_context(suppressing_writes())
        for module in modules:
            scope.enter_context(_attached(vars(module), answers))
        for module in pl_module.modules():
            if isinstance(module, AveragedModel):  # it is narrowed with the model, whatever it averages
                averaged = {"update_parameters": _nothing, "forward": _not_read}
                scope.enter_context(_attached(vars(module), averaged))
        if trainer.world_size > 1:  # the other ranks do not run this
            scope.enter_context(alone())
        yield record


def _stub_parts(trainer: Any) -> dict[str, Any]:
    """Return stand-ins for the parts of a Trainer that run its loops, restore its state, and show its progress."""
    loops = {name: _StillLoop(getattr(trainer, name)) for name in _LOOPS}
    active = next((loop for name, loop in loops.items() if trainer._active_loop is getattr(trainer, name)), None)
    bar = trainer.progress_bar_callback
    return {
        **loops,
        **{name: loops[f"{name}_loop"].run for name in ("fit", "validate", "test", "predict")},
        "_active_loop": active,
        "_checkpoint_connector": _Delegate(trainer._checkpoint_connector, restore=_nothing),
        "progress_bar_callback": bar and _Delegate(bar, disable=_nothing, enable=_nothing),
    }


def is_quiet(pl_module: LightningModule) -> bool:
    """Whether a LightningModule is attached to a stub Trainer, so that its steps are being recorded.

    Example:
        >>> from pytorch_lightning import LightningModule
        >>> is_quiet(LightningModule())
        False
    """
    return isinstance(pl_module._trainer, _Delegate)


@contextmanager
def _attached(attributes: dict[str, Any], answers: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes of a module inside the context; other changes of attributes are kept."""
    before = {name: attributes[name] for name in answers if name in attributes}
    attributes.update(answers)
    try:
        yield
    finally:
        for name in answers.keys() - before.keys():
            attributes.pop(name, None)
        attributes.update(before)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def _not_read(*args: Any, **kwargs: Any) -> None:
    """Refuse to run an average, whose channels are not masked."""
    raise MisconfigurationException(
        "It runs an `AveragedModel`, which loses the masked channels although its own weights there are not zero. "
        "Average with a callback (`EMAWeightAveraging`), or keep a plain copy as a teacher inside the compressed model."
    )


def _gathered(data: Any, world_size: int) -> Any:
    if world_size == 1:
        return data
    return apply_to_collection(data, Tensor, lambda tensor: torch.stack([tensor] * world_size))

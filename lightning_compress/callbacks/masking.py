"""Operations on masks, and the base class of callbacks that keep masked weights at zero.

Masks are ``{module name: {parameter name: mask}}``: names are relative to the model, masks have the parameter's shape.
The callback holds them, not the model: `torch.nn.utils.prune` and `parametrize` would reorder the parameters, and
averaging callbacks and optimizer states rely on that order.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

import engine
from engine.program import compact, stored_tensor, stored_tensors
from lightning_compress.callbacks.base import CompressionCallback
from lightning_compress.callbacks.zeroing import Zeroing, zero_gradients, zero_weights
from lightning_compress.selection.amounts import Masks
from lightning_compress.trainer.averages import averages
from lightning_compress.trainer.quiet import is_quiet
from lightning_compress.trainer.strategy import parallel
from lightning_compress.trainer.target import to_device

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


def entries(masks: Mapping[str, Mapping[str, Tensor]]) -> Iterator[tuple[str, str, Tensor]]:
    """Iterate over masks as ``(module, parameter, mask)``.

    Example:
        >>> [(m, p) for m, p, _ in entries({"conv": {"weight": torch.ones(1), "bias": torch.ones(1)}})]
        [('conv', 'weight'), ('conv', 'bias')]
    """
    return ((module, name, mask) for module, own in masks.items() for name, mask in own.items())


def masks_anything(masks: Mapping[str, Mapping[str, Tensor]]) -> bool:
    """Whether any entry is masked.

    Example:
        >>> masks_anything({"conv": {"bias": torch.tensor([1, 0])}}), masks_anything({})
        (True, False)
    """
    return any(not bool(mask.all()) for _, _, mask in entries(masks))


def flags(mask: Tensor, device: torch.device | None = None) -> Tensor:
    """Convert a mask to bool, with stride 0 along dimensions along which it is constant.

    Example:
        >>> flags(torch.tensor([[1.0, 1.0], [0.0, 0.0]])).stride()
        (1, 0)
    """
    return (compact(mask.cpu()) != 0).to(mask.device if device is None else device).expand(mask.shape)


def _both(one: Tensor, other: Tensor) -> Tensor:
    small, other_small = (_without_copies(mask) for mask in (one, other))
    return (small & other_small.to(small.device)).expand(one.shape)


def _without_copies(mask: Tensor) -> Tensor:
    for dim, stride in enumerate(mask.stride()):
        mask = mask.narrow(dim, 0, min(1, mask.size(dim))) if stride == 0 else mask
    return mask


def combine(several: Iterable[Mapping[str, Mapping[str, Tensor]]]) -> Masks:
    """Multiply masks: an entry is kept if all of them keep it.

    Example:
        >>> one, two = {"a": {"w": torch.tensor([1, 0])}}, {"a": {"w": torch.tensor([0, 1])}, "b": {"w": torch.ones(1)}}
        >>> combine([one, two])["a"]["w"]
        tensor([False, False])
    """
    result: Masks = {}
    for masks in several:
        for module, name, mask in entries(masks):
            own = result.setdefault(module, {})
            own[name] = _both(own[name], flags(mask)) if name in own else flags(mask)
    return result


def same(one: Mapping[str, Mapping[str, Tensor]], other: Mapping[str, Mapping[str, Tensor]]) -> bool:
    """Whether two sets of masks name the same parameters and keep the same entries.

    Example:
        >>> same({"a": {"w": torch.ones(2)}}, {"a": {"w": torch.tensor([True, True])}})
        True
    """
    left, right = ({(module, name): mask for module, name, mask in entries(masks)} for masks in (one, other))
    return left.keys() == right.keys() and all(
        torch.equal((mask != 0).cpu(), (right[key] != 0).cpu()) for key, mask in left.items()
    )


def rebase(masks: Mapping[str, Mapping[str, Tensor]], source: str, target: str) -> Masks:
    """Convert masks relative to module ``source`` to masks relative to ``target``, dropping those outside ``target``.

    Example:
        >>> list(rebase({"conv": {"weight": torch.ones(1)}}, "net.body", "net"))
        ['body.conv']
    """
    result: Masks = {}
    for module, own in masks.items():
        full = ".".join(part for part in (source, module) if part)
        if not target or full == target or full.startswith(f"{target}."):
            result[full[len(target) :].removeprefix(".")] = dict(own)
    return result


def place(masks: Mapping[str, Mapping[str, Tensor]], model: nn.Module) -> Masks:
    """Convert masks to bool, and move each to the device of its parameter."""
    return {
        module: {name: flags(mask, _stored(model, module, name)[0].device) for name, mask in own.items()}
        for module, own in masks.items()
    }


def _stored(model: nn.Module, module: str, name: str) -> tuple[Tensor, Tensor | None]:
    # torch.nn.utils.prune stores the parameter as `weight_orig` and its mask as the buffer `weight_mask`.
    owner, plain = model.get_submodule(module), name.removesuffix("_orig")
    pruned = dict(owner.named_buffers(recurse=False)).get(f"{plain}_mask")
    wanted = name if pruned is None else f"{plain}_orig"
    return stored_tensor(owner, wanted if hasattr(owner, wanted) else plain), pruned  # plain once masks are permanent


def zeroings(model: nn.Module, masks: Mapping[str, Mapping[str, Tensor]]) -> list[Zeroing]:
    """Build a `Zeroing` for each mask; weights that `torch.nn.utils.prune` masks are left to its buffer."""
    masked_parameters = [(*_stored(model, module, name), mask) for module, name, mask in entries(masks)]
    return [Zeroing.of(parameter, mask, weights=pruned is None) for parameter, pruned, mask in masked_parameters]


@torch.no_grad()
def write_buffers(model: nn.Module, masks: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write masks to the buffers of `torch.nn.utils.prune`, for parameters that have one."""
    for module, name, mask in entries(masks):
        pruned = _stored(model, module, name)[1]
        if pruned is not None:
            pruned.copy_(mask)
            _refresh(model.get_submodule(module), name.removesuffix("_orig"))


def _refresh(owner: nn.Module, name: str) -> None:
    # Otherwise the masked tensor would only be updated in the next forward pass.
    for hook in owner._forward_pre_hooks.values():
        if isinstance(hook, BasePruningMethod) and hook._tensor_name == name:
            setattr(owner, name, hook.apply_mask(owner))


def active_masks(callbacks: Iterable[Any], pl_module: LightningModule, path: str) -> Masks:
    """Return the active masks of the module at ``path``: those of callbacks times those of `torch.nn.utils.prune`.

    Args:
        callbacks: the Trainer's callbacks.
        pl_module: the LightningModule.
        path: path of the model inside the LightningModule.

    Returns:
        Masks relative to the model; empty if nothing is masked.
    """
    masking = [callback for callback in callbacks if isinstance(callback, MaskingCallback) and callback.masks]
    rebased = [rebase(callback.masks, callback.target(pl_module)[0], path) for callback in masking]
    masks = combine([*rebased, engine.read_masks(pl_module.get_submodule(path))])
    return masks if masks_anything(masks) else {}


def masking_callbacks(trainer: Trainer) -> list[MaskingCallback]:
    """Return the callbacks of a Trainer that can hold masks."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, MaskingCallback)]


class MaskWatch:
    """Detect, at almost no cost, changes of the masks of a Trainer's callbacks.

    Example:
        >>> from types import SimpleNamespace
        >>> watch, trainer = MaskWatch(), SimpleNamespace(callbacks=[MaskingCallback()])
        >>> watch.changed(trainer), watch.changed(trainer)
        (True, False)
    """

    def __init__(self) -> None:
        self._seen: list[Masks] = []

    def changed(self, trainer: Trainer) -> bool:
        """Whether the masks have changed since the last call."""
        masks = [callback.masks for callback in masking_callbacks(trainer)]
        same = len(masks) == len(self._seen) and all(a is b for a, b in zip(masks, self._seen, strict=True))
        self._seen = masks
        return not same


class MaskingCallback(CompressionCallback):
    """Base class for callbacks that hold masks and keep masked entries at zero during training.

    Args:
        model: path of the model inside the LightningModule.
        example_input: example input of the model.
    """

    def __init__(
        self, model: str | None = None, example_input: Any = None, constants: str | Sequence[str] | None = None
    ) -> None:
        super().__init__(model, example_input, constants)
        self._masks: Masks = {}
        self._ended = False  # the model was compacted for good, so the state is only for checkpoints
        self._owner: weakref.ref[nn.Module] | None = None
        # Both refer to parameters, which are different objects in the next fit, in another process and in a copy.
        self._zeroings: list[Zeroing] = []
        self._hooks: list[RemovableHandle] = []

    @property
    def masks(self) -> Masks:
        """Active masks, bool and relative to the model; empty before the first pruning and after a compaction."""
        return {} if self._ended else self._masks

    def first_epoch(self, trainer: Trainer) -> int | None:
        """Return the first epoch in which this callback may add masks; None if it never does.

        Args:
            trainer: the Trainer of the fit.
        """
        return 0

    def forget(self) -> None:
        """Drop all masks, and start anew."""
        self._masks, self._zeroings, self._ended = {}, [], False

    def end(self, pl_module: LightningModule, cuts: Mapping[Tensor, engine.Slice]) -> None:
        """Narrow the state for checkpoints after the compaction at the end of a fit; the next fit starts anew.

        Args:
            pl_module: the LightningModule.
            cuts: slice of each parameter and buffer that was narrowed.
        """
        self._narrow(pl_module, cuts)
        self._zeroings, self._ended = [], True

    def impose(self, pl_module: LightningModule, masks: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Apply masks: masked entries become zero and stay zero, in averaged copies too.

        While a step and its hooks are recorded, nothing is masked: the analysis must see the model as it is.
        """
        if is_quiet(pl_module):
            return
        self._at_rest(pl_module)
        path, model = self.target(pl_module)
        self._masks = place(masks, model)
        write_buffers(model, self._masks)
        self._zeroings = zeroings(model, self._masks)
        zero_weights(self._zeroings)
        for average in averages(_callbacks(pl_module), pl_module, path):
            zero_weights(zeroings(average.module, place(rebase(self._masks, "", average.path), average.module)))

    def enforce(self, pl_module: LightningModule) -> None:
        """Zero masked entries again, and warn if something wrote to them; not while a step is recorded."""
        if is_quiet(pl_module):
            return
        self._at_rest(pl_module)
        model = self.target(pl_module)[1]
        self._zeroings = zeroings(model, self._masks)
        if written := [zeroing.parameter for zeroing in self._zeroings if zeroing.is_undone()]:
            names = [name for name, tensor in stored_tensors(model).items() if any(tensor is w for w in written)]
            rank_zero_warn(
                f"Masked weights of {', '.join(names)} are not zero: code wrote to them after the last optimizer step, "
                "for example to load or average weights. They are set to zero now, which may change what the model "
                "computes. Load weights of an epoch in which these masks applied, or average after they were applied."
            )
        zero_weights(self._zeroings)

    def _at_rest(self, pl_module: LightningModule) -> None:
        if pl_module._trainer is not None:
            parallel(pl_module._trainer).at_rest(pl_module)

    def catch_up(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply masks that are already due. Callbacks call this, repeatedly if need be, before they use the masks."""

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # A fit resumed after the last batch of an epoch starts the next epoch without calling `on_train_epoch_start`.
        self.catch_up(trainer, pl_module)
        self._zero(pl_module)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._zero(pl_module)

    def _zero(self, pl_module: LightningModule) -> None:
        """Zero masked weights, to which something other than an optimizer may have written: noise, slow weights."""
        if not is_quiet(pl_module):
            zero_weights(self._zeroings)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            # Masks belong to one model and to fits until its final compaction. A resumed state is loaded after this.
            if self._ended or (self._owner is not None and self._owner() is not pl_module):
                self.forget()
            self._owner = weakref.ref(pl_module)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Right after each step, not at the end of the batch: averaging callbacks read the weights in between, and with
        # manual optimization so does the next forward pass of the same batch. A hook on each of these optimizers runs
        # before hooks that are registered on it later; the global one covers optimizers created during the fit, or
        # wrapped in another one.
        own = [o for o in trainer.optimizers if "_optimizer_step_post_hooks" in vars(o)]
        self._hooks = [optimizer.register_step_post_hook(self._after_step) for optimizer in own]
        self._hooks.append(register_optimizer_step_post_hook(self._after_step))
        if self._masks:
            self.impose(pl_module, self._masks)

    def _after_step(self, *_: Any) -> None:
        pl_module = None if self._owner is None else self._owner()
        if pl_module is not None:
            self._zero(pl_module)  # type: ignore[arg-type]

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Before gradients are clipped, by Lightning or by the user, and before the gradient scaler checks them for inf.
        zero_gradients(self._zeroings)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove_hooks()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @override
    def after_compaction(
        self, trainer: Trainer, pl_module: LightningModule, cuts: Mapping[Tensor, engine.Slice]
    ) -> None:
        self._narrow(pl_module, cuts)
        self._zeroings = zeroings(self.target(pl_module)[1], self._masks)

    def _narrow(self, pl_module: LightningModule, cuts: Mapping[Tensor, engine.Slice]) -> None:
        """Fit the masks to the compacted model."""
        model = self.target(pl_module)[1]
        narrowed = [
            (module, name, _cut(mask, cuts.get(_stored(model, module, name)[0])))
            for module, name, mask in entries(self._masks)
        ]
        self._masks = {}
        for module, name, mask in narrowed:
            if not mask.all():
                self._masks.setdefault(module, {})[name] = mask

    def __getstate__(self) -> dict[str, Any]:
        # Strategies that spawn processes pickle the callbacks, but weak references cannot be pickled.
        return {**self.__dict__, "_owner": None, "_zeroings": [], "_hooks": []}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Unlike a pickle, a copy can tell whether the next fit is of the same module: of another one, it starts anew.
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        vars(other).update(copy.deepcopy(self.__getstate__(), memo))
        module = None if self._owner is None else self._owner()
        if module is not None:
            other._owner = weakref.ref(memo.get(id(module), module))
        return other

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"masks": to_device(self._masks, "cpu")}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._masks, self._ended = state_dict["masks"], False


def _callbacks(pl_module: LightningModule) -> list[Any]:
    trainer = pl_module._trainer
    return [] if trainer is None else trainer.callbacks  # type: ignore[attr-defined]


def _cut(mask: Tensor, cut: engine.Slice | None) -> Tensor:
    return mask if cut is None else flags(cut.apply(mask))

"""Channel pruning during training."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

import engine
from engine.bounds import check_kinds, check_number
from lightning_compress.callbacks.base import masking_hooks
from lightning_compress.callbacks.masking import MaskingCallback, MaskWatch, active_masks, flags, masks_anything
from lightning_compress.callbacks.repair import MaskConflictRepair
from lightning_compress.callbacks.shrinking import warn_of_earlier_compaction
from lightning_compress.callbacks.timing import Timing, length
from lightning_compress.selection import amounts as selection
from lightning_compress.selection import criteria, schedules, scoring, targets
from lightning_compress.selection.active import Active, survivors
from lightning_compress.selection.evidence import Evidence, Gatherer, unscored_layers
from lightning_compress.selection.selector import Selector
from lightning_compress.trainer.calibration import train_batches
from lightning_compress.trainer.packages import MisconfigurationException
from lightning_compress.trainer.ranks import from_rank_zero
from lightning_compress.trainer.strategy import parallel
from lightning_compress.trainer.target import to_device

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer
    from torch.optim import Optimizer

    from lightning_compress.selection.amounts import Masks

_STATE = ("fraction", "last_event", "reference", "present")


class ChannelPruning(MaskingCallback):
    """Mask the least important channels of dependency groups, with increasing sparsity during training.

    At progress t of the schedule, the fraction ``s(t) * amount`` of the target is masked. Masked channels stay masked.
    Heads, head dimensions and neurons of transformers are channels like any other. Where channels can only be removed
    in equal numbers, such as from each group of a grouped convolution, equally many of each are masked. At least one
    channel is kept. Masked weights are zeroed in place, after each optimizer step too, and so are their gradients.

    Args:
        criterion: scores channels; those with the lowest scores are masked. ``"l1"``, ``"l2"``, ``"fpgm"``,
            ``"bn_scale"``, ``"lamp"``, ``"taylor"``, ``"fisher"``, ``"reconstruction"``, ``"apoz"``,
            ``"mean_activation"``, ``"random"``; several names, or names with factors, for a sum; a function of a group
            and an `Evidence`, or its import path (``"package.module:function"``).
        amount: fraction of the target to remove, in [0, 1]; for channels also fractions by layer name pattern.
        schedule: ``"one_shot"``, ``"linear"``, ``"cubic"``, ``"exponential"``, ``"iterative"``, a list of fractions,
            ``{name: {argument: value}}`` (see `lightning_compress.selection.schedules`), a function from [0, 1] to
            [0, 1], or its import path.
        start: epoch or optimizer step of the first pruning; by default the first, or the second epoch for a criterion
            that collects statistics (by steps: after one epoch, at most 100 steps).
        end: epoch or optimizer step at which the full amount is masked; by default one epoch before the end of the
            fit; in a fit of one epoch, before its first batch.
        unit: ``"epoch"`` prunes at the start of epochs, ``"step"`` after optimizer steps.
        frequency: epochs or steps between two prunings; by default 1 epoch, or a twentieth of the steps.
        layers: name patterns (`fnmatch`) of the layers to prune; by default all that forward reads, except the output.
        exclude: name patterns of layers that are not pruned; neither are layers coupled to them.
        model: path of the model inside the LightningModule.
        example_input: example input of the model.
        seed: seed of ``"random"``.
        scope: where channels are ranked against each other: ``"group"``, ``"global"``, ``"isomorphic"`` (global among
            groups of the same structure), a function from a group to a key, or its import path.
        target: what ``amount`` is a fraction of: ``"channels"``, ``"params"``, ``"macs"``, or ``"latency"``, the time
            of one forward pass on the trainer's device with ``example_input`` as the batch.
        budget: absolute size of the compacted model, instead of ``amount``: parameters, multiply-accumulates per
            sample, or seconds.
        normalize: how to make scores comparable between groups; see `scoring.normalized`.
        max_amount: maximum fraction of its channels that a group may lose, or fractions by layer name pattern.
        round_to: the remaining width is a multiple of this (or the full width), for fast kernels.
        minimum: minimum remaining width.
        cool_down: epochs or steps without pruning at the end of the fit, instead of ``end``.
        gather_every: for criteria that need gradients or activations, collect them every so many batches. Activations
            take an additional forward pass of the batch.
        attention: ``"heads"`` prunes whole heads; ``"dimensions"`` prunes dimensions of queries and keys, and of
            values, in all heads; ``None`` keeps what `engine.set_attention` has set, by default heads. It applies to
            the other callbacks, too.
        samples: number of samples of the train dataloader for ``"reconstruction"``.
        widths: allowed numbers of units by group name, as `engine.paying_widths` measures them; groups without an
            entry may have any.
        uniform: whether groups of the same structure and size keep the same number of units (not the same units), for
            configurations with one number for all layers; see `save_pretrained`.
        constants: names of arguments, attributes and buffers that keep their value, or patterns of them, as for
            `engine.trace`; they hold for all callbacks on the model.

    Raises:
        MisconfigurationException: for an invalid argument.

    Example:
        >>> pruning = ChannelPruning("l1", amount=0.5, exclude="stem.*")
        >>> pruning.masks
        {}
        >>> pruning = ChannelPruning(["taylor", "l2"], 0.4, "exponential", scope="global", target="macs", round_to=8)
    """

    traces_at_start = True

    def __init__(
        self,
        criterion: str | Sequence[str] | Mapping[str, float] | Callable[..., Any] = "l1",
        amount: float | Mapping[str, float] = 0.5,
        schedule: str | Sequence[float] | Mapping[str, Mapping[str, Any] | None] | Callable[[float], float] = "cubic",
        start: int | None = None,
        end: int | None = None,
        unit: str = "epoch",
        frequency: int | None = None,
        layers: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        model: str | None = None,
        example_input: Any = None,
        seed: int = 0,
        scope: str | Callable[[engine.Group], Hashable] = "group",
        target: str = "channels",
        budget: float | None = None,
        normalize: str | Callable[[Tensor], Tensor] | None = None,
        max_amount: float | Mapping[str, float] = 1.0,
        round_to: int = 1,
        minimum: int = 1,
        cool_down: int | None = None,
        gather_every: int = 16,
        attention: str | None = None,
        widths: Mapping[str, Sequence[int]] | None = None,
        samples: int = 1024,
        uniform: bool = False,
        constants: str | Sequence[str] | None = None,
    ) -> None:
        check_kinds(ChannelPruning.__init__, locals(), MisconfigurationException)
        super().__init__(model, example_input, constants)
        if attention not in (None, "heads", "dimensions"):
            raise MisconfigurationException(f"`attention` must be 'heads' or 'dimensions', got {attention!r}.")
        self.attention = attention
        self.criterion, self.amount, self.schedule, self.seed = criterion, amount, schedule, seed
        self.layers, self.exclude = selection.as_patterns(layers), selection.as_patterns(exclude, "exclude")
        self._selector = Selector(
            amount, scope, target, budget, max_amount, round_to, minimum, self.layers, self.exclude, widths, uniform
        )
        self._criterion = scoring.resolve(criterion, seed, normalize)
        self._schedule = schedules.resolve(schedule)
        check_number("gather_every", gather_every, 1, whole=True, error=MisconfigurationException)
        check_number("samples", samples, 2, whole=True, error=MisconfigurationException)
        needed = criteria.needs(self._criterion)
        self.samples, self._reconstructs = samples, "reconstruction" in needed
        kinds = needed - {"reconstruction"}
        self._timing = Timing(start, end, unit, frequency, cool_down, early=int(bool(kinds)))
        self._gatherer = Gatherer(kinds, gather_every)
        self._window, self._training = (0, 0), False
        self._reset()

    def _reset(self) -> None:
        self._fraction, self._reference = 0.0, 0.0
        self._last_event: int | None = None
        self._present: dict[str, Tensor] = {}
        self._groups: list[engine.Group] = []
        self._watch, self._unscored = MaskWatch(), list[str]()
        self._gatherer.load_state_dict({})

    @override
    def why_not_sharded(self) -> str | None:
        kinds = [*self._gatherer.kinds, *(["reconstruction"] if self._reconstructs else [])]
        if kinds:
            return f"This criterion of `ChannelPruning` uses values that training computes ({', '.join(kinds)})."
        latency = self._selector.target == "latency"
        return "`ChannelPruning(target='latency')` measures copies of the model." if latency else None

    @property
    def finished(self) -> bool:
        """Whether the full amount is masked, so that the model is at its final sparsity."""
        return self._fraction >= self._schedule(1.0)

    def too_late(self, trainer: Trainer) -> str | None:
        """Return the epoch or step of the last pruning, as text, if the fit ends before it."""
        end, total = self._timing.window(trainer)[1], length(trainer, self._timing.unit)
        late = total is not None and not self._timing.reached(end, total) and not trainer.fast_dev_run  # type: ignore[attr-defined]
        return f"{self._timing.unit} {end}" if late else None

    @override
    def first_epoch(self, trainer: Trainer) -> int:
        return 0 if self._masks else self._timing.first_epoch(trainer)

    @property
    @override
    def state_key(self) -> str:
        return self._generate_state_key(model=self.model, layers=self.layers, exclude=self.exclude)

    @override
    def state_dict(self) -> dict[str, Any]:
        own = {name: getattr(self, f"_{name}") for name in _STATE}
        return {**super().state_dict(), **own, "gathered": self._gatherer.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for name in _STATE:
            setattr(self, f"_{name}", state_dict[name])
        self._gatherer.load_state_dict(state_dict["gathered"])

    @override
    def forget(self) -> None:
        super().forget()
        self._reset()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Before any callback computes the groups of the model.
        if self.attention is not None:
            engine.set_attention(self.target(pl_module)[1], self.attention)
        super().on_fit_start(trainer, pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Fail before the first epoch, not at the first pruning.
        warn_of_earlier_compaction(pl_module, resumes=bool(self._fraction))
        subject = self._subject(trainer, pl_module)
        self._window = self._timing.window(trainer)
        self._timing.check_reached("ChannelPruning", trainer, self._window)
        self._selector = self._selector.checking(all(present.all() for present in self._present.values()))
        amounts = self._selector.amounts(subject.groups)
        if not self._present:
            self._present = {group.name: torch.ones(group.size, dtype=torch.bool) for group in subject.groups}
        with parallel(trainer).planning(pl_module):
            if self._selector.target != "channels" and not self._reference:
                self._reference = from_rank_zero(trainer, lambda: targets.reference(subject, self._selector.target))
            self._selector.check_reachable(subject, self._reference)
            if not self._fraction:
                self._selector.check_effective(subject, self._schedule(1.0), self._reference)
        self._update_groups(subject)
        if amounts and self._reconstructs:
            from_rank_zero(trainer, lambda: self._losses(trainer, pl_module, subject, samples=8))
        elif amounts and not self._gatherer.kinds:
            self._scores(trainer, subject, self._active(trainer, pl_module))
        self._selector = self._selector.checking(False, amounts)  # a compaction may remove all that a pattern names
        self._training = True

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._advance(trainer, pl_module)

    @override
    def catch_up(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._timing.unit == "epoch":
            self._advance(trainer, pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._gatherer.on_batch_start(trainer, batch_idx)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        if self._gatherer.watching:
            if self._watch.changed(trainer):
                self._gatherer.active = self._active(trainer, pl_module)
            self._gatherer.on_step(self.target(pl_module)[1], optimizer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._gatherer.watching:
            self._gatherer.on_batch_end(trainer, self.target(pl_module)[1])
        # The step count, and with it the schedule, does not advance during gradient accumulation, so gradients that
        # were accumulated under the old masks are never used with new ones.
        if self._timing.unit == "step" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._advance(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._gatherer.close()
        self._warn_if_unfinished()

    def _warn_if_unfinished(self) -> None:
        if self._training and not self.finished:
            self._timing.warn_unfinished(self._window, self._fraction)
        self._training = False

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._gatherer.close()
        if isinstance(exception, KeyboardInterrupt):  # Lightning ends the fit without `on_train_end`
            self._warn_if_unfinished()
        self._training = False

    @override
    def after_compaction(
        self, trainer: Trainer, pl_module: LightningModule, cuts: Mapping[Tensor, engine.Slice]
    ) -> None:
        super().after_compaction(trainer, pl_module, cuts)
        self._update_groups(self._subject(trainer, pl_module))

    @override
    def _narrow(self, pl_module: LightningModule, cuts: Mapping[Tensor, engine.Slice]) -> None:
        super()._narrow(pl_module, cuts)
        kept = survivors(self._groups, self.target(pl_module)[1], cuts)
        self._gatherer.cut(kept)
        for name, present in self._kept_units().items():
            self._present = {**self._present, name: present.masked_scatter(present, kept[name])}

    def _advance(self, trainer: Trainer, pl_module: LightningModule) -> None:
        fast_dev_run = trainer.fast_dev_run  # type: ignore[attr-defined]
        position = trainer.global_step if fast_dev_run else self._timing.position(trainer)
        fraction = self._schedule(self._timing.progress(position, self._window))
        if self._timing.due(position, self._last_event, self._window) and fraction > self._fraction:
            self._prune(trainer, pl_module, fraction)
            self._fraction, self._last_event = fraction, position

    def _subject(self, trainer: Trainer, pl_module: LightningModule) -> targets.Subject:
        graph = self.trace(trainer, pl_module)
        with self.planning(trainer, pl_module) as (model, example):
            groups = self._selector.groups(model, example, graph)
        widths = parallel(trainer).widths(self.target(pl_module)[1], groups)
        context, loggers = trainer.precision_plugin.forward_context, trainer.loggers
        return targets.Subject(model, example, graph, groups, context, (trainer, *loggers), widths)

    def _update_groups(self, subject: targets.Subject) -> None:
        self._groups = list(subject.groups)
        if self._gatherer.kinds:
            chosen = self._selector.amounts(subject.groups)
            self._gatherer.watch(subject.model, subject.graph, [g for g in subject.groups if g.name in chosen])

    def _kept_units(self) -> dict[str, Tensor]:
        """Return, by group, which units of the unpruned model remain; groups whose size does not match are omitted."""
        sizes = {group.name: group.size for group in self._groups}
        return {name: present for name, present in self._present.items() if sizes.get(name) == int(present.sum())}

    def _active(self, trainer: Trainer, pl_module: LightningModule) -> Active:
        # Channels that other callbacks mask are dead, too.
        path, model = self.target(pl_module)
        masks = active_masks(trainer.callbacks, pl_module, path)  # type: ignore[attr-defined]
        return Active(self._groups, masks, next(model.parameters()).device)

    def _prune(self, trainer: Trainer, pl_module: LightningModule, fraction: float) -> None:
        subject = self._subject(trainer, pl_module)
        active = self._active(trainer, pl_module)

        def choose() -> Masks:
            losses = self._losses(trainer, pl_module, subject, self.samples) if self._reconstructs else {}
            return self._choose(trainer, pl_module, subject, active, fraction, losses)

        masks = parallel(trainer).decided(choose)
        # Repair the masks before weights are zeroed, whatever the order of the callbacks.
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, MaskConflictRepair) and masks_anything(masks):
                with callback.planning(trainer, pl_module):
                    masks = callback.repaired(masks, subject.model, subject.example, subject.graph)
        boolean = {module: {name: flags(mask) for name, mask in own.items()} for module, own in masks.items()}
        masks = trainer.strategy.broadcast(to_device(boolean, "cpu"))
        with masking_hooks(trainer, pl_module, self.target(pl_module)[0], masks, subject.graph):
            self.impose(pl_module, masks)

    def _losses(
        self, trainer: Trainer, pl_module: LightningModule, subject: targets.Subject, samples: int
    ) -> dict[str, Tensor]:
        """Return the loss that remains when other units compensate for each unit, on training batches."""
        if not self._selector.amounts(subject.groups):
            return {}
        batches = train_batches(trainer, pl_module, subject.model, subject.example, samples, self.seed)
        with trainer.precision_plugin.forward_context():
            return engine.reconstruction_losses(
                subject.model, subject.example, subject.groups, batches, samples=samples, graph=subject.graph
            )

    def _choose(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        subject: targets.Subject,
        active: Active,
        fraction: float,
        losses: Mapping[str, Tensor],
    ) -> Masks:
        scores = self._scores(trainer, subject, active, losses) if self._selector.amounts(subject.groups) else {}
        dense = {name: len(present) for name, present in self._kept_units().items()}
        with parallel(trainer).planning(pl_module):
            keep = self._selector.choose(subject, scores, active.kept, fraction, self._reference, dense)
        return dict(engine.group_masks(subject.groups, keep))

    def _scores(
        self, trainer: Trainer, subject: targets.Subject, active: Active, losses: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        get = parallel(trainer).reader(subject.model)
        gathered = {**self._gatherer.gathered, "reconstruction": losses or {}}
        evidence = Evidence(get, active.kept, gathered, active.reads, self._kept_units())
        chosen = [group for group in subject.groups if group.name in self._selector.amounts(subject.groups)]
        scores_by_group = {group.name: scoring.score(self._criterion, group, evidence) for group in chosen}
        unscored = [name for name, scores in scores_by_group.items() if scores is None]
        if len(unscored) == len(chosen):
            raise MisconfigurationException(unscored_layers(unscored, bool(self._gatherer.kinds)))
        if unscored and unscored != self._unscored:
            rank_zero_warn(f"The criterion cannot score these layers, so they are not pruned: {', '.join(unscored)}.")
        self._unscored = unscored
        return {name: scores for name, scores in scores_by_group.items() if scores is not None}

"""Pruning during training: which channels are masked, and when."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

import engine
from lightning_compress.callbacks.base import CompressionCallback
from lightning_compress.callbacks.masking import MaskingCallback, MaskWatch, active_masks, flags, masks_anything
from lightning_compress.callbacks.repair import MaskConflictRepair
from lightning_compress.callbacks.timing import Timing, length
from lightning_compress.selection import amounts as selection
from lightning_compress.selection import criteria, schedules, scoring, targets
from lightning_compress.selection.alive import Living, survivors
from lightning_compress.selection.evidence import Evidence, Gatherer, unscored_layers
from lightning_compress.selection.selector import Selector
from lightning_compress.trainer.calibration import train_batches
from lightning_compress.trainer.packages import MisconfigurationException
from lightning_compress.trainer.ranks import from_rank_zero
from lightning_compress.trainer.strategy import parallel
from lightning_compress.trainer.target import to_device

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer
    from torch import nn
    from torch.optim import Optimizer

    from lightning_compress.selection.amounts import Masks


class ChannelPruning(MaskingCallback):
    """Masks the least important channels of whole dependency groups, more and more of them during training.

    At progress t of the schedule the fraction ``s(t) * amount`` of the target is masked; what is masked stays masked.
    Heads, head dimensions and neurons of transformers are channels like any other. Where channels can only go in equal
    numbers (of each group of a grouped convolution, say), equally many of each are masked; one stays at least. Weights
    are zeroed in place, their gradients and whatever the optimizer writes there too.

    Args:
        criterion: which channels go: ``"l1"``, ``"l2"``, ``"fpgm"``, ``"bn_scale"``, ``"lamp"``, ``"taylor"``,
            ``"fisher"``, ``"reconstruction"``, ``"apoz"``, ``"mean_activation"``, ``"random"``; several names, or names
            with factors, to be summed; a function of a group and an `Evidence`, or its import path
            (``"package.module:function"``).
        amount: fraction of the target to remove, in [0, 1]; of channels also fractions by layer name pattern.
        schedule: ``"one_shot"``, ``"linear"``, ``"cubic"``, ``"exponential"``, ``"iterative"``, a list of fractions,
            ``{name: {argument: value}}`` (see `lightning_compress.selection.schedules`), a function from [0, 1] to
            [0, 1], or its import path.
        start: epoch or optimizer step of the first pruning; by default the first, for a criterion that gathers
            statistics the second epoch (by steps: after one epoch, 100 steps at most).
        end: epoch or optimizer step at which the whole amount is masked; by default one epoch before the end of the
            fit, in a fit of one epoch before it starts.
        unit: ``"epoch"``: prunes at the start of epochs; ``"step"``: after optimizer steps.
        frequency: epochs or steps between two prunings; by default 1 epoch, or the steps that make twenty prunings.
        layers: name patterns (`fnmatch`) of the layers to prune; by default all, the output layer excepted.
        exclude: name patterns of layers to leave alone, with all that is coupled to them.
        model: path of the model inside the LightningModule.
        example_input: what the model takes.
        seed: seed of ``"random"``.
        scope: among which channels the least important are sought: ``"group"``, ``"global"``, ``"isomorphic"`` (global
            among groups of the same structure), a function of a group that gives a key, or its import path.
        target: what ``amount`` is a fraction of: ``"channels"``, ``"params"``, ``"macs"``, or ``"latency"``, the time
            of one evaluation on the trainer's device, with ``example_input`` as the batch.
        budget: what is to be left of the target in place of ``amount``: parameters, multiply-accumulates per sample, or
            seconds.
        normalize: how scores are made comparable between groups; see `scoring.normalized`.
        max_amount: fraction of its channels that a group may lose at most, or fractions by layer name pattern.
        round_to: the width that stays is a multiple of it (or the whole width), as fast kernels like it.
        minimum: width that stays at least.
        cool_down: epochs or steps before the end of the fit in which nothing more goes, in place of ``end``.
        gather_every: batches from one look at gradients or activations to the next, for criteria that need them. A look
            at activations is one more evaluation of the batch.
        attention: ``"heads"``: whole heads go; ``"dimensions"``: dimensions of queries and keys, and of values, in all
            heads. ``None`` leaves the model at what `engine.set_attention` has said, which is heads by default. All
            other callbacks go along.
        samples: of the train dataloader, that ``"reconstruction"`` looks at.
        widths: by group name, the numbers of units that may stay, as `engine.paying_widths` measures them; a group that
            is not named may have any.
        uniform: whether groups of the same structure and size keep the same number of units, each its own, as a
            configuration needs it that has one number for all layers; see `save_pretrained`.

    Raises:
        MisconfigurationException: if an argument is none of the above.

    Example:
        >>> pruning = ChannelPruning("l1", amount=0.5, exclude="stem.*")
        >>> pruning.masks
        {}
        >>> pruning = ChannelPruning(["taylor", "l2"], 0.4, "exponential", scope="global", target="macs", round_to=8)
    """

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
    ) -> None:
        super().__init__(model, example_input)
        if attention not in (None, "heads", "dimensions"):
            raise MisconfigurationException(f"`attention` is 'heads' or 'dimensions', got {attention!r}.")
        self.attention = attention
        self.criterion, self.amount, self.schedule, self.seed = criterion, amount, schedule, seed
        self.layers, self.exclude = selection.as_patterns(layers), selection.as_patterns(exclude)
        self._selector = Selector(
            amount, scope, target, budget, max_amount, round_to, minimum, self.layers, self.exclude, widths, uniform
        )
        self._criterion = scoring.resolve(criterion, seed, normalize)
        self._schedule = schedules.resolve(schedule)
        needed = criteria.needs(self._criterion)
        self.samples, self._reconstructs = samples, "reconstruction" in needed
        kinds = needed - {"reconstruction"}
        self._timing = Timing(start, end, unit, frequency, cool_down, early=int(bool(kinds)))
        self._gatherer = Gatherer(kinds, gather_every)
        self._window = (0, 0)
        self._start_anew()

    def _start_anew(self) -> None:
        self._fraction = 0.0
        self._last_event: int | None = None
        self._reference = 0.0
        self._present: dict[str, Tensor] = {}
        self._groups: list[engine.Group] = []
        self._watch = MaskWatch()
        self._unscored: list[str] = []
        self._gatherer.load_state_dict({})

    @override
    def why_not_sharded(self) -> str | None:
        kinds = [*self._gatherer.kinds, *(["reconstruction"] if self._reconstructs else [])]
        if kinds:
            return f"`ChannelPruning` with this criterion looks at what the training computes ({', '.join(kinds)})."
        return "`ChannelPruning(target='latency')` measures copies." if self._selector.target == "latency" else None

    @property
    def finished(self) -> bool:
        """Whether the whole amount is masked, so that the model is at its final sparsity."""
        return self._fraction >= self._schedule(1.0)

    def too_late(self, trainer: Trainer) -> str | None:
        """The epoch or step of the last pruning, as text, where the fit ends before it."""
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
        return {
            **super().state_dict(),
            "fraction": self._fraction,
            "last_event": self._last_event,
            "reference": self._reference,
            "present": self._present,
            "gathered": self._gatherer.state_dict(),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._fraction, self._last_event = state_dict["fraction"], state_dict["last_event"]
        self._reference, self._present = state_dict["reference"], state_dict["present"]
        self._gatherer.load_state_dict(state_dict["gathered"])

    @override
    def forget(self) -> None:
        super().forget()
        self._start_anew()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Before any callback looks at the model for its groups.
        if self.attention is not None:
            engine.set_attention(self.target(pl_module)[1], self.attention)
        super().on_fit_start(trainer, pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # What cannot work fails here, before the first epoch, and not at the first pruning.
        subject = self._subject(trainer, pl_module)
        self._window = self._timing.window(trainer)
        self._timing.check_reached("ChannelPruning", trainer, self._window)
        amounts = self._selector.amounts(subject.groups)
        if not self._present:
            self._present = {group.name: torch.ones(group.size, dtype=torch.bool) for group in subject.groups}
        with parallel(trainer).planning(pl_module):
            if self._selector.target != "channels" and not self._reference:
                self._reference = from_rank_zero(trainer, lambda: targets.reference(subject, self._selector.target))
            self._selector.check_reachable(subject, self._reference)
            if not self._fraction:
                self._selector.check_effective(subject, self._schedule(1.0), self._reference)
        self._look_at(subject)
        if amounts and self._reconstructs:
            from_rank_zero(trainer, lambda: self._losses(trainer, pl_module, subject, samples=8))
        elif amounts and not self._gatherer.kinds:
            self._scores(trainer, subject, self._alive(trainer, pl_module))

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
                self._gatherer.alive = self._alive(trainer, pl_module)
            self._gatherer.on_step(self.target(pl_module)[1], optimizer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._gatherer.watching:
            self._gatherer.on_batch_end(trainer, self.target(pl_module)[1])
        # Within an accumulation the step count stands still, and so does the schedule: gradients gathered under the old
        # masks never meet new ones.
        if self._timing.unit == "step" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._advance(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._gatherer.close()
        if not self.finished:
            rank_zero_warn(
                f"The fit ended before {self._timing.unit} {self._window[1]}, where the schedule of `ChannelPruning` "
                f"ends: {self._fraction:.0%} of the amount is masked."
            )

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._gatherer.close()

    @override
    def compacted(
        self, trainer: Trainer, pl_module: LightningModule, cuts: Mapping[nn.Parameter, engine.Slice]
    ) -> None:
        super().compacted(trainer, pl_module, cuts)
        left = survivors(self._groups, self.target(pl_module)[1], cuts)
        self._gatherer.cut(left)
        for name, present in self._kept_units().items():
            self._present[name] = present.masked_scatter(present, left[name])
        self._look_at(self._subject(trainer, pl_module))

    def _advance(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rehearsal = trainer.fast_dev_run  # type: ignore[attr-defined]
        position = trainer.global_step if rehearsal else self._timing.position(trainer)
        fraction = self._schedule(self._timing.progress(position, self._window))
        if not self._timing.due(position, self._last_event, self._window) or fraction <= self._fraction:
            return
        self._prune(trainer, pl_module, fraction)
        self._fraction, self._last_event = fraction, position

    def _subject(self, trainer: Trainer, pl_module: LightningModule) -> targets.Subject:
        graph = self.trace(trainer, pl_module)
        with self.planning(trainer, pl_module) as (model, example):
            groups = engine.dependency_groups(model, example, graph=graph)
        widths = parallel(trainer).widths(self.target(pl_module)[1], groups)
        context, loggers = trainer.precision_plugin.forward_context, trainer.loggers
        return targets.Subject(model, example, graph, groups, context, (trainer, *loggers), widths)

    def _look_at(self, subject: targets.Subject) -> None:
        self._groups = list(subject.groups)
        if self._gatherer.kinds:
            chosen = self._selector.amounts(subject.groups)
            self._gatherer.watch(subject.model, subject.graph, [g for g in subject.groups if g.name in chosen])

    def _kept_units(self) -> dict[str, Tensor]:
        """Which units of the unpruned model the groups still have, as far as these are the same groups."""
        sizes = {group.name: group.size for group in self._groups}
        return {name: present for name, present in self._present.items() if sizes.get(name) == int(present.sum())}

    def _alive(self, trainer: Trainer, pl_module: LightningModule) -> Living:
        # What other callbacks mask is as dead as what this one does.
        path, model = self.target(pl_module)
        masks = active_masks(trainer.callbacks, pl_module, path)  # type: ignore[attr-defined]
        return Living(self._groups, masks, next(model.parameters()).device)

    def _prune(self, trainer: Trainer, pl_module: LightningModule, fraction: float) -> None:
        subject = self._subject(trainer, pl_module)
        alive = self._alive(trainer, pl_module)

        def choose() -> Masks:
            losses = self._losses(trainer, pl_module, subject, self.samples) if self._reconstructs else {}
            return self._choose(trainer, pl_module, subject, alive, fraction, losses)

        masks = parallel(trainer).decided(choose)
        # Every repair in the Trainer is asked before a weight is zeroed, wherever it stands in the list of callbacks.
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, MaskConflictRepair) and masks_anything(masks):
                with callback.planning(trainer, pl_module):
                    masks = callback.repaired(masks, subject.model, subject.example, subject.graph)
        boolean = {module: {name: flags(mask) for name, mask in own.items()} for module, own in masks.items()}
        self._impose_on_all(trainer, pl_module, trainer.strategy.broadcast(to_device(boolean, "cpu")), subject.graph)

    def _impose_on_all(self, trainer: Trainer, pl_module: LightningModule, masks: Masks, graph: engine.Graph) -> None:
        """Apply masks, and let all callbacks act on the model before and after."""
        path = self.target(pl_module)[0]
        others = [c for c in trainer.callbacks if isinstance(c, CompressionCallback)]  # type: ignore[attr-defined]
        for callback in others:
            callback.before_masking(trainer, pl_module, path, masks, graph)
        for callback in others:
            callback.during_masking(trainer, pl_module, path, masks, graph)
        self.impose(pl_module, masks)
        for callback in others:
            callback.after_masking(trainer, pl_module, path)

    def _losses(
        self, trainer: Trainer, pl_module: LightningModule, subject: targets.Subject, samples: int
    ) -> dict[str, Tensor]:
        """Loss that remains when other units compensate for each unit, on batches of the train dataloader."""
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
        alive: Living,
        fraction: float,
        losses: Mapping[str, Tensor],
    ) -> Masks:
        scores = self._scores(trainer, subject, alive, losses) if self._selector.amounts(subject.groups) else {}
        dense = {name: len(present) for name, present in self._kept_units().items()}
        with parallel(trainer).planning(pl_module):
            keep = self._selector.choose(subject, scores, alive.kept, fraction, self._reference, dense)
        return dict(engine.group_masks(subject.groups, keep))

    def _scores(
        self, trainer: Trainer, subject: targets.Subject, alive: Living, losses: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        get = parallel(trainer).reader(subject.model)
        gathered = {**self._gatherer.gathered, "reconstruction": losses or {}}
        evidence = Evidence(get, alive.kept, gathered, alive.reads, self._kept_units())
        chosen = [group for group in subject.groups if group.name in self._selector.amounts(subject.groups)]
        scores_by_group = {group.name: scoring.score(self._criterion, group, evidence) for group in chosen}
        unscored = [name for name, scores in scores_by_group.items() if scores is None]
        if len(unscored) == len(chosen):
            raise MisconfigurationException(unscored_layers(unscored, bool(self._gatherer.kinds)))
        if unscored != self._unscored:
            rank_zero_warn(f"The criterion has no score for these layers, which stay whole: {', '.join(unscored)}.")
            self._unscored = unscored
        return {name: scores for name, scores in scores_by_group.items() if scores is not None}

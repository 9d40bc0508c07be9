"""Sparse training: penalties that shrink whole channels before they are pruned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

import engine
from engine.bounds import check_kinds, check_number
from engine.compaction import is_compacted
from engine.program import gathered_from, local, spread
from engine.sensitivity import cut, unit_sums
from lightning_compress.callbacks.base import CompressionCallback
from lightning_compress.callbacks.masking import MaskWatch, active_masks
from lightning_compress.callbacks.timing import Timing
from lightning_compress.selection import amounts as selection
from lightning_compress.selection import schedules
from lightning_compress.selection.active import Active
from lightning_compress.selection.criteria import is_shift
from lightning_compress.trainer.packages import MisconfigurationException
from lightning_compress.trainer.strategy import parallel

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

Factors = dict[str, Tensor]


def bn_scale(
    group: engine.Group, parameter: Callable[[str], Tensor], strength: Tensor, active: Active | None = None
) -> Factors:
    r"""Gradient of :math:`\sum_u \lambda_u \sum_{\gamma \in u} |\gamma|`: γ times :math:`\lambda_u / |\gamma|`.

    Args:
        group: the dependency group.
        parameter: returns a parameter by its full name.
        strength: λ of each unit, shape ``(size,)``.
        active: unmasked units; not needed here because the scale of a masked channel is zero.

    Returns:
        Factors by parameter name, broadcastable to the parameter: parameter times factor is the gradient of the
        penalty. Factors of zero scales are 0. Empty for a group without a norm.

    Liu et al., "Learning Efficient Convolutional Networks through Network Slimming", 2017.
    """
    scales = [m for m in group.members if m.role == "norm" and not is_shift(m.parameter)]
    return {m.parameter: _divided(_per_entry(strength, m), parameter(m.parameter).detach().abs()) for m in scales}


def group_lasso(
    group: engine.Group, parameter: Callable[[str], Tensor], strength: Tensor, active: Active | None = None
) -> Factors:
    r"""Gradient of :math:`\sum_u \lambda_u \sqrt{n_u} \, \lVert w_u \rVert_2`, as factors of the weights w.

    Args:
        group: the dependency group; the :math:`n_u` weights of a unit are those of all layers of the group.
        parameter: returns a parameter by its full name.
        strength: λ of each unit, shape ``(size,)``.
        active: unmasked units and weights; weights that read only masked channels do not count. By default all.

    Returns:
        Factors by parameter name, broadcastable to the parameter: parameter times factor is the gradient of the
        penalty. Factors of zero units are 0.

    Wen et al., "Learning Structured Sparsity in Deep Neural Networks", 2016.
    """
    active = active or Active()
    members = [m for m in group.members if m.role == "out" and m.units.ndim > 1]
    norms = _squares(group, members, parameter, active).sqrt()
    factors = _divided(strength.to(norms) * active.weights_per_unit(group) ** 0.5, norms)
    return {m.parameter: active.part(m.parameter, _per_entry(factors, m)) for m in members}


def _squares(
    group: engine.Group, members: Sequence[engine.Member], parameter: Callable[[str], Tensor], active: Active
) -> Tensor:
    """Return the sum of squares of each unit over members, without copying the weights."""
    totals: Tensor | None = None
    for m in members:
        weight, live = parameter(m.parameter).detach(), active.reads.get(m.parameter, m.units)
        free = [d for d in range(weight.ndim) if m.units.shape[d] == live.shape[d] == 1]
        kind = torch.promote_types(weight.dtype, torch.float32)
        norms = torch.linalg.vector_norm(weight, dim=free, keepdim=True, dtype=kind) if free else weight.to(kind)
        sums = unit_sums(active.part(m.parameter, norms.square()), m.units, group.size)
        totals = sums if totals is None else totals + sums
    return torch.zeros(group.size) if totals is None else totals


def _divided(strength: Tensor, size: Tensor) -> Tensor:
    return torch.where(size > 0, strength.to(size) / size, 0.0)


def _per_entry(values: Tensor, member: engine.Member) -> Tensor:
    padded = torch.cat([values, values.new_zeros(1)])  # unit -1 is not in the group
    return padded[member.units.to(values.device)]


PENALTIES: dict[str, Callable[[engine.Group, Callable[[str], Tensor], Tensor, Active], Factors]] = {
    "bn_scale": bn_scale,
    "group_lasso": group_lasso,
}


class SparseTraining(CompressionCallback):
    r"""Add the gradient of a penalty before each optimizer step, so that unimportant channels shrink to zero.

    The strength grows as :math:`\lambda \, s(t)` along a schedule s. With ``amount``, only the currently smallest units
    are penalised, the others train freely (growing regularisation: Wang et al., "Neural Pruning via Growing
    Regularization", 2021). Combine it with :class:`ChannelPruning` by ``"bn_scale"`` or ``"l2"``.

    Args:
        penalty: ``"bn_scale"`` (L1 norm of the norms' scales, network slimming) or ``"group_lasso"`` (L2 norm of all
            weights that produce a channel).
        strength: final λ.
        growth: schedule of the strength, as for :class:`ChannelPruning`.
        start: first epoch or step with a penalty; by default the first of the fit.
        end: epoch or step of full strength; by default one epoch before the end of the fit.
        unit: unit of ``start`` and ``end``, ``"epoch"`` or ``"step"``.
        amount: fraction of the channels of each group to penalise, those with the smallest scales or weights.
        layers: name patterns (`fnmatch`) of the layers; by default all that forward reads, except the output.
        exclude: name patterns of layers that are not penalised; neither are layers coupled to them.
        model: path of the model inside the LightningModule.
        example_input: example input of the model.

    Raises:
        MisconfigurationException: for an invalid argument.

    Example:
        >>> SparseTraining("bn_scale", strength=1e-4, growth="linear").strength
        0.0001
    """

    def __init__(
        self,
        penalty: str = "bn_scale",
        strength: float = 1e-4,
        growth: str | Sequence[float] | Mapping[str, Mapping[str, Any] | None] | Callable[[float], float] = "linear",
        start: int | None = None,
        end: int | None = None,
        unit: str = "step",
        amount: float = 1.0,
        layers: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        model: str | None = None,
        example_input: Any = None,
    ) -> None:
        check_kinds(SparseTraining.__init__, locals(), MisconfigurationException)
        super().__init__(model, example_input)
        if penalty not in PENALTIES:
            raise MisconfigurationException(f"`penalty` must be one of {', '.join(PENALTIES)}, got {penalty!r}.")
        check_number("strength", strength, 0, error=MisconfigurationException)
        selection.check_amount(amount)
        self.penalty, self.strength, self.amount = penalty, strength, amount
        self.layers, self.exclude = selection.as_patterns(layers), selection.as_patterns(exclude, "exclude")
        self._growth = schedules.resolve(growth, "growth")
        self._timing = Timing(start, end, unit)
        self._window = (0, 0)
        self._groups: list[engine.Group] = []
        self._all: list[engine.Group] = []
        self._active, self._watch = Active(), MaskWatch()

    @override
    def why_not_sharded(self) -> str | None:
        return None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._window = self._timing.window(trainer)
        self._timing.check_reached("SparseTraining", trainer, self._window)
        model = self.target(pl_module)[1]
        resumed = bool(trainer.ckpt_path) and is_compacted(pl_module)
        self._update_groups(trainer, pl_module, checks=not resumed)
        parallel(trainer).at_rest(pl_module)
        if not resumed and not any(self._factors(group, model, 1.0) for group in self._groups):
            names = ", ".join(group.name for group in self._groups[:4])
            raise MisconfigurationException(
                f"`SparseTraining({self.penalty!r})` has nothing to penalise: no norm scales the channels of {names}. "
                "Choose `penalty='group_lasso'`, or other layers."
            )

    def _update_groups(self, trainer: Trainer, pl_module: LightningModule, checks: bool) -> None:
        graph = self.trace(trainer, pl_module)
        with self.planning(trainer, pl_module) as (model, example):
            groups = engine.dependency_groups(model, example, graph=graph)
        groups = selection.keep_what_steps_read_alone(groups, graph, self.layers)
        chosen = selection.amounts(groups, 1.0, self.layers, self.exclude, checks)
        self._groups, self._all = [group for group in groups if group.name in chosen], groups
        self._active, self._watch = Active(), MaskWatch()

    def _update_active(self, trainer: Trainer, pl_module: LightningModule) -> None:
        path, model = self.target(pl_module)
        masks = active_masks(trainer.callbacks, pl_module, path)  # type: ignore[attr-defined]
        self._active = Active(self._all, masks, next(model.parameters()).device)

    @override
    def after_compaction(
        self, trainer: Trainer, pl_module: LightningModule, cuts: Mapping[Tensor, engine.Slice]
    ) -> None:
        # All channels that a pattern names may be gone.
        self._update_groups(trainer, pl_module, checks=False)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        # At this point gradients are unscaled and reduced over the ranks, but not clipped yet.
        position = self._timing.position(trainer)
        if position < self._window[0]:
            return
        strength = self.strength * self._growth(self._timing.progress(position, self._window))
        if not strength:
            return
        if self._watch.changed(trainer):
            self._update_active(trainer, pl_module)
        model = self.target(pl_module)[1]
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for group in self._groups:
            for name, factor in self._factors(group, model, strength).items():
                parameter = model.get_parameter(name)
                if parameter.grad is not None and id(parameter) in stepped:
                    factor = local(spread(factor.to(parameter.dtype).expand(parameter.shape), parameter))
                    local(parameter.grad).addcmul_(local(parameter).detach(), factor)

    def _factors(self, group: engine.Group, model: nn.Module, strength: float) -> Factors:
        device = model.get_parameter(group.members[0].parameter).device
        each = torch.full((group.size,), strength, device=device)
        if self.amount < 1.0:
            each *= self._smallest(group, model).to(device)
        return PENALTIES[self.penalty](group, gathered_from(model), each, self._active)

    def _smallest(self, group: engine.Group, model: nn.Module) -> Tensor:
        """Return a mask of the smallest units among those that are not masked."""
        kept = self._active.kept.get(group.name, torch.ones(group.size, dtype=torch.bool))
        smallest_units = torch.zeros(group.size, dtype=torch.bool)
        smallest_units[kept] = ~cut(self._sizes(group, model).cpu()[kept], self.amount, group.rows.cpu()[kept])
        return smallest_units

    def _sizes(self, group: engine.Group, model: nn.Module) -> Tensor:
        role = "norm" if self.penalty == "bn_scale" else "out"
        members = [m for m in group.members if m.role == role and not is_shift(m.parameter)]
        return _squares(group, members, gathered_from(model), self._active)

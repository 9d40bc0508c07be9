"""`ModelSpeedup`: compacts a masked model and verifies the result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from engine.bounds import check_kinds, check_number
from engine.compaction.build import Analysis, analyse, canonical_tensors, exact_in_train
from engine.compaction.compact import OptimizerLike
from engine.compaction.follow import compactable
from engine.compaction.parts import store_certificate
from engine.compaction.plan import Plan
from engine.compaction.sharing import Sharing, separated
from engine.compaction.spreading import candidates
from engine.cost.count import Counter
from engine.errors import InputError, VerificationError
from engine.masks import canonical_masks, load_masks
from engine.ops import rules_of
from engine.program.defaults import own_defaults
from engine.program.graph import Graph
from engine.program.stored import settled
from engine.removal.finite import check_finite
from engine.removal.structure import structure_of
from engine.rule import Registry
from engine.running.evaluation import sharing_contents
from engine.running.inputs import check_model
from engine.surgery.exchange import Exchange, Replace, Undo
from engine.surgery.kinds import joined
from engine.surgery.kinds.norms import NarrowedNorm, is_root_mean_square
from engine.surgery.kinds.replacements import check_functions, opaque_names
from engine.tracer import trace
from engine.verification.certificate import Certificate
from engine.verification.entries import EntryProof
from engine.verification.ordinary import make_ordinary
from engine.verification.proof import Proof
from engine.verification.training import TrainingProof

__all__ = ["ModelSpeedup"]


_LEAVES_CONSTANTS = (
    "Masked channels leave constants behind (the shift of a norm that is not masked, a bias, a sigmoid of zero), which "
    "depend on the batch or are still being trained: removing them now would change what is learned. Mask their norms "
    "and biases too (`fix_mask_conflict`), or compact after training."
)

_SEPARATED = (
    "{} share memory, so that an optimizer's step on one changes the other; they lose different entries, after which "
    "they no longer share it. Make them one parameter (`decoder.weight = encoder.weight`, or "
    "`F.linear(x, encoder.weight.t())` if it is transposed)."
)

_TRAINS_OTHERWISE = "Removing the channels now would change what is learned; compact after training."
_NO_STEP = (
    "No training step and no entry was compared, because several processes take part in them and might wait for each "
    "other: exactness in train mode follows from the rules alone."
)


def _trains_together() -> bool:
    """Whether a training step may wait for other processes, as a synchronised norm does."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


class ModelSpeedup:
    """Physically remove masked channels, so that the model computes what the masked model computed.

    Args:
        model: the model to compact. "Masked" means ``parameter * mask``.
        dummy_input: a tensor, a tuple of positional arguments, or a mapping of keyword arguments, batch first, on the
            model's device.
        masks_file: ``{module: {parameter: 0/1 tensor}}``, or the path of such a file (read with ``weights_only=True``).
            None: whatever is zero in the weights is removed.
        map_location: device for masks from a file, as in `torch.load`.
        batch_dim: index of the batch dimension of the inputs.
        confidence: number of random samples to verify with at the example's resolution, and up to two more at another;
            large ones run one at a time. 0 trusts the rules and runs nothing.
        customized_replace_func: ``{class name: f}`` for modules of that class or a subclass that ``f(module, masks)``
            narrows and the engine does not trace. ``f`` gets a copy of the module with masked parameters, and
            ``(in_mask, out_mask, weight_mask)``: floats, 1 for entries to keep. The first two have the shape of input
            and output (a tuple if there are several tensors; those of the first call), the third is ``{parameter:
            mask}``. It returns the narrowed module, which takes the place of the original. Whether the module works
            channel by channel is measured by running it. If it does not, its inputs only lose channels that are
            constantly zero, and its outputs only lose channels that are unused or zero under the module's own masks.
        graph: a graph of this model with this input, to avoid recording it again.
        rules: op rules; None uses the model's defaults, see `engine.set_attention`.
        reindex: whether a layer may lose channels that are constant in its own output while other branches of a sum
            keep them. Its narrow output is spread again behind it, which is exact but takes time, and is done only
            where it saves much more. Conflicting masks need no repair to benefit from it.
        plain_norms: whether norms that lose channels become ordinary norms over the remaining ones, which are faster
            than norms that keep the statistics of all channels. RMS norms then compute the same, with another eps and
            another scale of the weight; layer norms and group norms are approximate, which the certificate states.
            ``"exact"`` exchanges RMS norms only. While training continues, RMS norms keep their weights and statistics.

    Attributes:
        plan: the applied plan; before `speedup_model`, the plan for the current weights.
        certificate: the verdict, after `speedup_model`.

    Raises:
        InputError, MaskError, TraceError: at construction; nothing is changed.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 3))
        >>> mask = torch.ones_like(net[0].weight)
        >>> mask[:3] = 0
        >>> ModelSpeedup(net, torch.rand(2, 1, 8, 8), {"0": {"weight": mask}}).speedup_model()[0]
        Conv2d(1, 3, kernel_size=(3, 3), stride=(1, 1))

        A custom layer, and the function that narrows it:

        >>> class Scale(nn.Module):
        ...     def __init__(self, scale):
        ...         super().__init__()
        ...         self.scale = nn.Parameter(scale)
        ...     def forward(self, x):
        ...         return x * self.scale[:, None, None]
        >>> def smaller(module, masks):
        ...     in_mask, out_mask, weight_mask = masks
        ...     stays = out_mask[0, :, 0, 0].bool()
        ...     return Scale(module.scale.data[stays])
        >>> net = nn.Sequential(nn.Conv2d(1, 6, 3), Scale(torch.rand(6)), nn.Conv2d(6, 2, 3))
        >>> masks = {"0": {"weight": mask, "bias": mask[:, 0, 0, 0]}}
        >>> speedup = ModelSpeedup(net, torch.rand(2, 1, 8, 8), masks, customized_replace_func={"Scale": smaller})
        >>> speedup.speedup_model()[1].scale.shape
        torch.Size([3])

    NNI: ``nni.compression.pytorch.speedup.ModelSpeedup``.
    """

    @own_defaults()
    def __init__(
        self,
        model: nn.Module,
        dummy_input: Any,
        masks_file: Any = None,
        map_location: Any = None,
        batch_dim: int = 0,
        confidence: int = 8,
        customized_replace_func: Replace | None = None,
        *,
        graph: Graph | None = None,
        rules: Registry | None = None,
        reindex: bool = False,
        plain_norms: bool | str = False,
    ) -> None:
        check_kinds(ModelSpeedup.__init__, locals())
        if plain_norms not in (False, True, "exact"):
            raise InputError(f"`plain_norms` is False, True or 'exact', got {plain_norms!r}.")
        check_number("confidence", confidence, 0, whole=True, what="a number of samples")
        check_number("batch_dim", batch_dim, 0, whole=True)
        check_model(model)
        if confidence and any(p.is_meta for p in model.parameters()):
            raise InputError("The model is on the meta device and cannot be run; pass `confidence=0`.")
        self._model = model
        self._batch_dim = batch_dim
        self._confidence = confidence
        self._reindex, self._plain_norms = reindex, plain_norms
        self._masks: dict[str, Tensor] | None = None
        if masks_file is not None:
            self._masks = canonical_masks(load_masks(masks_file, map_location), model)
        self._functions = check_functions(customized_replace_func)
        opaque = opaque_names(model, self._functions)
        if graph is None or set(graph.opaque) != set(opaque):
            example = dummy_input if graph is None else graph.kwargs or graph.args
            ways: Any = {} if graph is None else {"constants": graph.constants, "entries": graph.entries}
            graph = trace(model, example, opaque=opaque, **ways)
        if batch_dim and graph.inputs and graph.inputs[0].ndim <= batch_dim:
            raise InputError(f"`batch_dim` is {batch_dim}, but the first input has the shape {graph.inputs[0].shape}.")
        self._graph = graph
        self._rules: Registry = rules_of(graph) if rules is None else rules
        self._done: Plan | None = None
        self.certificate = Certificate()

    @property
    @own_defaults()
    def plan(self) -> Plan:
        """The applied plan; before `speedup_model`, the plan for the current weights."""
        return self._decided()[0].plan if self._done is None else self._done

    @own_defaults()
    def check_training(self, training: bool = True) -> bool:
        """Return whether the compaction is exact in train mode, too: no removed channel leaves a constant behind.

        Args:
            training: whether training continues, so that it has to be exact.

        Raises:
            VerificationError: if it has to be exact and is not.
        """
        return self._in_train(*self._decided(), training)

    def _in_train(self, analysis: Analysis, exact: bool, training: bool) -> bool:
        pairs = self._separated(analysis.plan)
        if training and pairs:
            raise VerificationError(f"{_SEPARATED.format(pairs[0])} Then compact, or compact after training.")
        in_train = exact and not pairs and exact_in_train(analysis, self._model, self._masks)
        if training and not in_train:
            raise VerificationError(_LEAVES_CONSTANTS)
        return in_train

    def _separated(self, plan: Plan) -> list[Sharing]:
        return separated(self._model, plan.slices, plan.masks, plan.folds)

    @own_defaults()
    def speedup_model(self, optimizer: OptimizerLike = None, *, training: bool = False) -> nn.Module:
        """Compact the model in place.

        Args:
            optimizer: an optimizer, or several, that trains the model; its state is narrowed as well.
            training: whether training continues. The compaction then has to be exact in train mode too, including
                gradients: no removed channel may leave a constant behind.

        Returns:
            The model.

        Raises:
            VerificationError: if the result differs from the masked model, naming where, or would differ from it in
                train mode while training continues; the model is left unchanged.
            PlanError: if an optimizer's state cannot be narrowed, or `customized_replace_func` fails or would leave an
                optimizer with stale parameters; the model is left unchanged.
        """
        with self.compacting(optimizer, training=training):
            return self._model

    @contextmanager
    def compacting(self, optimizer: OptimizerLike = None, *, training: bool = False) -> Iterator[None]:
        """Compact the model as `speedup_model` does, and restore it if the body of the ``with`` statement fails.

        The body is for what has to follow the compaction or prevent it: copies of the model, other processes.

        Args:
            optimizer: see `speedup_model`.
            training: see `speedup_model`.

        Raises:
            VerificationError, PlanError: see `speedup_model`.

        Example:
            >>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
            >>> masks = {"0": {"weight": torch.tensor([[1.0], [0.0], [1.0], [0.0]]).expand(4, 2)}}
            >>> masks["0"]["bias"] = masks["0"]["weight"][:, 0]
            >>> try:
            ...     with ModelSpeedup(net, torch.rand(2, 2), masks).compacting():
            ...         assert net[0].out_features == 2
            ...         raise OSError("no room for the checkpoint")
            ... except OSError:
            ...     print(net[0].out_features)
            4
        """
        undo = self._compact(optimizer, training)
        try:
            yield
        except BaseException:
            undo()
            self._done, self.certificate = None, Certificate()
            raise
        if not self.plan.is_empty:
            compactable(self._model)

    @sharing_contents()
    def _compact(self, optimizer: OptimizerLike, training: bool) -> Undo:
        """Compact and verify; return a function that undoes the compaction."""
        with settled(self._model):
            analysis, exact = self._decided()
            in_train = self._in_train(analysis, exact, training)
        plan = analysis.plan
        notes = ("Nothing was removed, so nothing was compared.",) if plan.is_empty else ()
        notes = (*notes, *(_SEPARATED.format(pair) for pair in self._separated(plan)))
        verify = self._confidence > 0 and not plan.is_empty
        if verify and (in_train or self._graph.entries) and _trains_together():
            notes = (*notes, _NO_STEP)
        certificate = Certificate(exact_in_train=in_train, exact=exact, notes=(*notes, *plan.notes))
        proof = Proof(self._model, analysis, self._masks or {}, self._batch_dim, self._confidence) if verify else None
        compares = in_train and not _trains_together()
        step = self._step(analysis, proof) if compares and proof is not None else None
        entries = self._entries(analysis, in_train) if verify and exact and not _trains_together() else None
        change = plan.prepare(self._model, optimizer, self._functions)
        with ExitStack() as undo:
            undo.callback(change.rollback)
            change.commit()
            if proof is not None:
                certificate = proof.conclude(certificate)
            if step is not None:
                certificate = step.conclude(certificate)
            if training and not certificate.exact_in_train:
                raise VerificationError(f"{certificate.notes[-1]} {_TRAINS_OTHERWISE}")
            if entries is not None:
                certificate = entries.conclude(certificate)
            if not plan.is_empty:
                store_certificate(self._model, certificate.state_dict())
            if self._plain_norms and not training:
                plan, certificate = self._with_ordinary_norms(plan, certificate, undo)
            self._done, self.certificate = plan, certificate
            return undo.pop_all().close

    def _with_ordinary_norms(self, plan: Plan, certificate: Certificate, undo: ExitStack) -> tuple[Plan, Certificate]:
        """Exchange norms for ordinary ones, also those of earlier compactions."""
        compare, everything = self._confidence > 0, self._plain_norms is True
        exchanges, certificate, undo_exchanges = make_ordinary(
            self._model, self._graph, self._batch_dim, certificate, compare, everything
        )
        undo.callback(undo_exchanges)
        return replace(plan, exchanges=joined(plan.exchanges, exchanges)), certificate

    def _step(self, analysis: Analysis, proof: Proof) -> TrainingProof:
        return TrainingProof(self._model, analysis, self._masks, self._batch_dim, proof.dtype)

    def _entries(self, analysis: Analysis, in_train: bool) -> EntryProof | None:
        """Run the masked model's entries, if there are any."""
        return EntryProof(self._model, analysis, self._masks or {}, in_train) if self._graph.entries else None

    def _decided(self) -> tuple[Analysis, bool]:
        """Return the analysis, and whether its plan is exact: ordinary norms are not."""
        analysis = self._analysed()
        plan = analysis.plan
        if self._plain_norms is not True or not any(map(self._centres, plan.exchanges)):
            return analysis, True
        exchanges = [replace(e, plain=True, fill=None) if self._centres(e) else e for e in plan.exchanges]
        return replace(analysis, plan=replace(plan, exchanges=tuple(exchanges))), False

    def _centres(self, exchange: Exchange) -> TypeGuard[NarrowedNorm]:
        """Whether a norm subtracts a mean, so that no ordinary norm computes the same."""
        return isinstance(exchange, NarrowedNorm) and not is_root_mean_square(
            type(self._model.get_submodule(exchange.module))
        )

    def _analysed(self) -> Analysis:
        """Analyse the model, and again if it pays to separate some layers from the sums they feed."""
        graph = self._graph
        check_finite(structure_of(graph, self._rules), canonical_tensors(self._model, graph), self._masks or {})
        analysis = analyse(self._model, graph, self._rules, self._masks)
        spread = candidates(analysis) if self._reindex else {}
        if not spread:
            return analysis
        ways: Any = {"constants": graph.constants, "entries": graph.entries}
        graph = trace(self._model, graph.kwargs or graph.args, opaque=graph.opaque, spread=spread, **ways)
        other = analyse(self._model, graph, self._rules, self._masks)
        costs = zip(self._costs(other), self._costs(analysis), strict=True)
        return other if all(new <= old for new, old in costs) else analysis

    def _costs(self, analysis: Analysis) -> tuple[float, int]:
        """Multiply-accumulates and parameters after compaction."""
        structure, shrunk = analysis.structure, analysis.kept.shrunk
        counter = Counter(structure.graph, structure.rules, shrunk, "default", self._batch_dim)
        return counter.total(), counter.parameters(self._model)

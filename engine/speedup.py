"""`ModelSpeedup`: masks in, a small and verified network out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from engine.build import analyse, exact_in_train
from engine.certify import Certificate
from engine.compact import OptimizerLike
from engine.errors import InputError
from engine.graph import Graph
from engine.masks import canonical_masks, load_masks
from engine.ops import RULES
from engine.plan import Plan
from engine.proof import Proof
from engine.rule import Registry
from engine.tracer import trace

__all__ = ["ModelSpeedup"]


class ModelSpeedup:
    """Physically remove what masks remove, so that the model computes what the masked one computed.

    Args:
        model: the model to make small. "Masked" means ``parameter * mask``.
        dummy_input: a tensor, a tuple of positional arguments, or a mapping of keyword arguments, batch first, on the
            model's device.
        masks_file: ``{module: {parameter: 0/1 tensor}}``, or the path of such a file (read with ``weights_only=True``).
            None: whatever is zero in the weights is removed.
        map_location: where to put masks from a file, as in `torch.load`.
        batch_dim: index of the batch dimension of the inputs.
        confidence: number of random samples to verify with; 0 trusts the rules and runs nothing.
        customized_replace_func: not supported yet; anything but None is an error.
        graph: a graph of this model with this input, to save recording it.
        rules: what is known of ops.

    Attributes:
        plan: what was done, after `speedup_model`.
        certificate: the verdict, after `speedup_model`.

    Raises:
        InputError, MaskError, TraceError: at construction; nothing is changed.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 3))
        >>> mask = torch.ones_like(net[0].weight)
        >>> mask[:3] = 0
        >>> ModelSpeedup(net, torch.rand(2, 1, 8, 8), {"0": {"weight": mask}}).speedup_model()[0]
        Conv2d(1, 3, kernel_size=(3, 3), stride=(1, 1))

    NNI: ``nni.compression.pytorch.speedup.ModelSpeedup``.
    """

    def __init__(
        self,
        model: nn.Module,
        dummy_input: Any,
        masks_file: Any = None,
        map_location: Any = None,
        batch_dim: int = 0,
        confidence: int = 8,
        customized_replace_func: Mapping[str, Callable[..., nn.Module]] | None = None,
        *,
        graph: Graph | None = None,
        rules: Registry = RULES,
    ) -> None:
        if not isinstance(confidence, int) or confidence < 0:
            raise InputError(f"`confidence` is a number of samples, 0 or more; got {confidence!r}.")
        if customized_replace_func is not None:
            raise InputError("`customized_replace_func` is not supported yet; register a rule for the op instead.")
        if confidence and any(p.is_meta for p in model.parameters()):
            raise InputError("The model is on the meta device and cannot be run; pass `confidence=0`.")
        self._model = model
        self._batch_dim = batch_dim
        self._confidence = confidence
        self._rules = rules
        self._masks: dict[str, Tensor] | None = None
        if masks_file is not None:
            self._masks = canonical_masks(load_masks(masks_file, map_location), model)
        self._graph = trace(model, dummy_input) if graph is None else graph
        self.plan = Plan()
        self.certificate = Certificate()

    def speedup_model(self, optimizer: OptimizerLike = None) -> nn.Module:
        """Make the model small, in place.

        Args:
            optimizer: an optimizer, or several, that trains the model; its state shrinks along.

        Returns:
            The model.

        Raises:
            VerificationError: where the result differs from the masked model, with the place; the model is as before.
            PlanError: where an optimizer's state cannot be cut; the model is as before.
        """
        analysis = analyse(self._model, self._graph, self._rules, self._masks)
        plan = analysis.plan
        in_train = exact_in_train(analysis, self._model, self._masks)
        notes = ("Nothing was removed, so nothing was compared.",) if plan.is_empty else ()
        certificate = Certificate(exact_in_train=in_train, notes=(*notes, *plan.notes))
        verify = self._confidence > 0 and not plan.is_empty
        proof = Proof(self._model, analysis, self._masks or {}, self._batch_dim, self._confidence) if verify else None
        change = plan.prepare(self._model, optimizer)
        try:
            change.commit()
            if proof is not None:
                certificate = proof.conclude(certificate)
        except BaseException:
            change.rollback()
            raise
        self.plan, self.certificate = plan, certificate
        return self._model

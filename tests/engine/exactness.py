"""Compare a compacted model with the masked one by means of its own, independent of the engine's certificate."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import engine
from engine.program.graph import Graph
from engine.program.trees import tensors_in

Masks = dict[str, dict[str, Tensor]]
CONTRACTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = nn.modules.batchnorm._BatchNorm


def randomised(model: nn.Module, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Give a model random statistics, affine parameters, biases and zeros, so that no constant hides; in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    model = model.to(dtype).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, NORMS):
                if module.running_mean is not None:
                    module.running_mean.normal_(0, 0.3, generator=generator)
                    module.running_var.uniform_(0.5, 2, generator=generator)
                if module.affine:
                    module.weight.uniform_(0.5, 1.5, generator=generator)
                    module.bias.normal_(0, 0.3, generator=generator)
            elif isinstance(getattr(module, "bias", None), nn.Parameter):
                module.bias.normal_(0, 0.3, generator=generator)
        for parameter in model.parameters():  # a head of zeros hides all errors behind it
            if parameter.is_floating_point() and not parameter.any():
                parameter.normal_(0, 0.3 / max(1, parameter.numel() // len(parameter)) ** 0.5, generator=generator)
    return model


def layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that have output channels, and a weight of their own."""
    for name, module in model.named_modules():
        if isinstance(module, CONTRACTIONS) and "weight" in module._parameters:
            yield name, module


def out_dim(module: nn.Module) -> int:
    """The dimension of the weight that counts output channels (per group, where transposed)."""
    return 1 if "Transpose" in type(module).__name__ else 0


def channel_masks(model: nn.Module, seed: int, amount: float = 0.5, norms: bool = False) -> Masks:
    """Mask output channels of each layer independently, so that coupled layers contradict each other."""
    generator = torch.Generator().manual_seed(seed)
    masks: Masks = {}
    for name, module in layers(model):
        dim = out_dim(module)
        channels = module.weight.shape[dim]
        kept = torch.rand(channels, generator=generator, dtype=torch.float64) >= amount
        shape = [-1 if d == dim else 1 for d in range(module.weight.ndim)]
        masks[name] = {"weight": kept.double().view(shape).expand(module.weight.shape)}
        if module.bias is not None and len(module.bias) == channels and torch.rand((), generator=generator) < 0.5:
            masks[name]["bias"] = kept.double()
    return masks


def element_masks(model: nn.Module, seed: int, amount: float = 0.7) -> Masks:
    """Mask single entries of every parameter, but of no direction of a weight norm, which must not become zero."""
    generator = torch.Generator().manual_seed(seed)
    masks: Masks = {}
    for name, parameter in model.named_parameters():
        module, _, key = name.rpartition(".")
        if key != "original1":
            masks.setdefault(module, {})[key] = (torch.rand(parameter.shape, generator=generator) >= amount).float()
    return masks


def column_masks(model: nn.Module, seed: int) -> Masks:
    """Mask input columns, so that channels are unused."""
    generator = torch.Generator().manual_seed(seed)
    masks: Masks = {}
    for name, module in layers(model):
        dim = 1 - out_dim(module)
        kept = torch.rand(module.weight.shape[dim], generator=generator) >= 0.5
        masks[name] = {
            "weight": kept.view([-1 if d == dim else 1 for d in range(module.weight.ndim)]).expand_as(module.weight)
        }
    return masks


KINDS: dict[str, Callable[[nn.Module, int], Masks]] = {
    "channels": channel_masks,
    "elements": element_masks,
    "columns": column_masks,
    "everything": lambda model, seed: channel_masks(model, seed, amount=1.0),
    "nearly everything": lambda model, seed: channel_masks(model, seed, amount=0.9),
}


def masked(model: nn.Module, masks: Masks) -> nn.Module:
    """Return a copy whose parameters are multiplied by the masks."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for module, entries in masks.items():
            for key, mask in entries.items():
                getattr(model.get_submodule(module), key).mul_(mask)
    return model


def run(model: nn.Module, *inputs: Any) -> list[Tensor]:
    """Return the outputs in eval mode as a list."""
    model.eval()
    with torch.no_grad():
        return list(tensors_in(model(*inputs)))


def relative_error(reference: list[Tensor], found: list[Tensor]) -> float:
    """Largest difference, relative to the largest entry of each output."""
    worst = 0.0
    assert len(reference) == len(found)
    for old, new in zip(reference, found, strict=True):
        assert old.shape == new.shape, (old.shape, new.shape)
        if not old.numel():
            continue
        scale = float(old.abs().max())
        difference = float((old - new).abs().max())
        error = difference / scale if scale else difference
        worst = max(worst, error if math.isfinite(error) else math.inf)  # NaN is not agreement
    return worst


def differ(outputs: list[Tensor], others: list[Tensor]) -> bool:
    """Whether any entry, shape or number of outputs differs: where masks change nothing, to be exact means nothing."""
    return len(outputs) != len(others) or not all(map(torch.equal, outputs, others))


def parameters(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in model.parameters())


def norm_outputs(model: nn.Module, *inputs: Any) -> dict[str, Tensor]:
    """Return what every norm puts out, by name."""
    found: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_hook(lambda m, a, out, name=name: found.__setitem__(name, out.detach().clone()))
        for name, module in model.named_modules()
        if isinstance(module, NORMS)
    ]
    run(model, *inputs)
    for hook in hooks:
        hook.remove()
    return found


def check_exact(
    model: nn.Module,
    masks: Masks | None,
    *batches: Tensor,
    tolerance: float = 1e-9,
    rules: engine.Registry = engine.RULES,
    graph: Graph | None = None,
) -> engine.Plan:
    """Compact a copy of a model on the first batch and compare it with the masked model on all of them.

    Also: the counted sizes are the measured ones, and the compacted model trains.

    Args:
        model: in eval mode.
        masks: of its parameters.
        batches: inputs.
        tolerance: largest relative error.
        rules: op rules.
        graph: of the model on the first batch, where several tests need it: to record it takes a quarter of the time.
    """
    graph = engine.trace(model, batches[0]) if graph is None else graph
    reference = masked(model, masks or {})
    compacted = copy.deepcopy(model)
    predicted = engine.count_flops_params(
        model, batches[0], verbose=False, masks=masks if masks is not None else engine.ZEROS, graph=graph, rules=rules
    )
    speedup = engine.ModelSpeedup(compacted, batches[0], masks, confidence=2, graph=graph, rules=rules)
    compacted = speedup.speedup_model()
    for batch in batches:
        error = relative_error(run(reference, batch), run(compacted, batch))
        assert error <= tolerance, error
    measured = engine.count_flops_params(compacted, batches[0], verbose=False)
    assert predicted[:2] == measured[:2]
    if trains(model, batches[0]):
        assert trains(compacted, batches[0])
    return speedup.plan


def trains(model: nn.Module, batch: Any) -> bool:
    """Whether gradients flow back through a model; some ops have no derivative in some versions of torch."""
    model.train()
    try:
        sum(t.sum() for t in tensors_in(model(batch)) if t.is_floating_point()).backward()
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        return False
    return True


def squares_of(features: Tensor, labels: Tensor) -> Tensor:
    """Return the mean square of the features of each row, for rows of the first class; 0 for others."""
    return features.square().mean(1) * (labels == 0)

"""Whether a masked network and its compacted copy agree in uses that the certificate did not see."""

from __future__ import annotations

import copy
import random
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import engine
from engine.errors import EngineError
from engine.program.stored import stored_tensors
from tests.engine.exactness import Masks, masked, parameters
from tests.engine.random_traps.blocks import Block
from tests.engine.random_traps.nets import Inputs, random_masks, random_net

__all__ = ["OUTCOMES", "Result", "examine", "gap", "observed"]

OUTCOMES = ("exact", "refused", "internal", "wrong")
Use = Callable[[nn.Module], Any]
"""Runs a network as a user would, and returns all that is observed of it."""

LEVEL = 1e-2
"""Entries smaller than that are compared as if they were this large: what cancels out is not a size to compare with."""


@dataclass(frozen=True)
class Result:
    """What came of one network.

    Attributes:
        seed: of it.
        outcome: one of `OUTCOMES`.
        detail: what differs, or the error.
        text: the network's blocks and masks.
        shrunk: whether there are fewer parameters.
    """

    seed: int
    outcome: str
    detail: str
    text: str
    shrunk: bool = False


def examine(seed: int) -> Result:
    """Compact the network of a seed, and compare it with the masked one.

    Args:
        seed: any number.

    Returns:
        the outcome; "refused" where the engine raised an error of its own and changed nothing.
    """
    model, inputs, size = random_net(seed)
    style, masks, policy = random_masks(model, seed)
    text = f"{describe(model)}; masks: {style}, {policy or 'raw'}; example: {size}"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compacted, before = copy.deepcopy(model), _left_by(model)
        try:
            graph = engine.trace(compacted, inputs(*size))
            if policy is not None:
                masks = dict(engine.fix_mask_conflict(masks, compacted, inputs(*size), policy, graph=graph))
            speedup = engine.ModelSpeedup(compacted, inputs(*size), masks, confidence=2, graph=graph)
            speedup.speedup_model()
        except EngineError as error:
            same = _same_weights(model, compacted) and gap(before, _left_by(compacted)) == 0.0
            return Result(seed, "refused" if same else "wrong", _shortened(error), text)
        except Exception as error:
            return Result(seed, "internal", f"{_shortened(error)}\n{traceback.format_exc(limit=-6)}", text)
        reference, exact_in_train = masked(model, masks), speedup.certificate.exact_in_train
        detail = _compare(reference, compacted, masks, list(_uses(inputs, size, exact_in_train and not model.noisy())))
    return Result(seed, "wrong" if detail else "exact", detail, text, parameters(compacted) < parameters(model))


def describe(model: nn.Module) -> str:
    """Return the blocks of a network, with what they have drawn."""
    return f"{type(model.stem).__name__}: " + " → ".join(map(_described, (*model.blocks, model.ending)))


def _described(part: nn.Module) -> str:
    drawn = {k: v for k, v in vars(part).items() if isinstance(v, (str, bool, int, float)) and k[0] != "_"}
    shown = [f"{k}={v}" for k, v in drawn.items() if k not in ("training", "out")]
    inner = [_described(child) for child in part.children() if isinstance(child, Block)]
    return f"{type(part).__name__}({', '.join([*shown, *inner])})"


def _same_weights(model: nn.Module, other: nn.Module) -> bool:
    one, two = stored_tensors(model), stored_tensors(other)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def _shortened(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


# ---------------------------------------------------------------- uses


def _compare(reference: nn.Module, compacted: nn.Module, masks: Masks, uses: list[tuple[str, Use]]) -> str:
    """Return how two networks differ in uses; empty where they agree."""
    tolerance = reference.tolerance()
    for name, use in uses:
        pair = copy.deepcopy(reference), copy.deepcopy(compacted)
        for model in pair:
            _mask_gradients(model, masks)
        expected, actual = _outcome(use, pair[0]), _outcome(use, pair[1])
        if isinstance(expected, Exception):
            continue  # a size that the network itself does not take
        if isinstance(actual, Exception):
            return f"{name}: raises {_shortened(actual)}"
        error = gap(_paired(expected, actual), actual)
        if not (error <= tolerance or _is_up_to_rounding(reference, masks, use, tolerance)):
            return f"{name}: differs by {error:.1e}"
    return ""


def _is_up_to_rounding(reference: nn.Module, masks: Masks, use: Use, tolerance: float) -> bool:
    """Whether the masked network alone differs as much where its weights move by a unit in their last place.

    `x > x.mean()` selects what cancels out, or not, by the sign of a rounding error.
    """

    def outcome(seed: int | None) -> Any:
        model = copy.deepcopy(reference)
        if seed is not None:
            _move(model, seed)
        _mask_gradients(model, masks)
        return _outcome(use, model)

    expected = outcome(None)
    moved = map(outcome, range(8))
    return any(isinstance(other, Exception) or not gap(expected, other) <= tolerance for other in moved)


@torch.no_grad()
def _move(model: nn.Module, seed: int) -> None:
    """Move the weights of a network by up to a unit in their last place."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64).sub_(0.5)
        parameter.mul_((1 + 4 * torch.finfo(parameter.dtype).eps * noise).to(parameter))


def _mask_gradients(model: nn.Module, masks: Masks) -> None:
    """Let masked entries have no gradient, as a masked training step has it, where the weight is as large as before."""
    for module, entries in masks.items():
        for key, mask in entries.items():
            parameter = model.get_parameter(f"{module}.{key}".lstrip(".")) if _has(model, module, key) else None
            if parameter is not None and parameter.requires_grad and parameter.shape == mask.shape:
                parameter.register_hook(mask.to(parameter).mul)


def _has(model: nn.Module, module: str, key: str) -> bool:
    return f"{module}.{key}".lstrip(".") in dict(model.named_parameters(remove_duplicate=False))


def _paired(expected: Any, actual: Any) -> Any:
    """Return what is expected; of weights and buffers only those that have the other's shape."""
    if isinstance(expected, Sized):
        both = expected.value.keys() & actual.value.keys()
        both = {name for name in both if expected.value[name].shape == actual.value[name].shape}
        expected.value, actual.value = ({n: s.value[n] for n in sorted(both)} for s in (expected, actual))
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(expected, actual, strict=False):
            _paired(one, other)
    return expected


class Sized:
    """Tensors by name that a network may hold in another size after its compaction.

    The gradient of a bias before a norm is zero but for the rounding of numbers as large as its layer's gradients, of
    which those that change their size count as well.

    Attributes:
        value: the tensors by name.
        sizes: the largest entry of the tensors of each layer, at least 1.
    """

    def __init__(self, value: dict[str, Tensor]) -> None:
        self.value = value
        self.sizes: dict[str, float] = {}
        for name, tensor in value.items():
            layer = name.rpartition(".")[0]
            finite = tensor.double()[tensor.isfinite()]
            self.sizes[layer] = max(self.sizes.get(layer, 1.0), float(finite.abs().max()) if finite.numel() else 0.0)


def _outcome(use: Use, model: nn.Module) -> Any:
    """Return what a use observes, or the error that it raises."""
    torch.manual_seed(5)
    random.seed(5)
    try:
        return use(model)
    except Exception as error:
        return error


def _uses(inputs: Inputs, size: tuple[int, ...], trains: bool) -> Iterator[tuple[str, Use]]:
    batch, *sides = size
    others = [
        (batch, *sides),
        (1, *(s - 1 for s in sides)),
        (batch + 1, *(s + 1 + n for n, s in enumerate(sides))),
        (5, *(2 * s + 1 - n for n, s in enumerate(sides))),
        (2, *(max(1, s // 2) for s in sides)),
    ]
    for number, other in enumerate(others):
        yield f"eval {other}", lambda m, other=other, number=number: _call(m, inputs(*other, seed=number))
    yield "four calls", lambda m: _calls(m, [inputs(*size, seed=n) for n in range(4)])
    row = [inputs(batch, *(s + n for s in sides), seed=n) for n in (0, 2, 1)]
    yield "calls of other sizes", lambda m: _calls(m, [x.clone() for x in row])
    yield "later", lambda m: _later(m, [inputs(*others[n], seed=n) for n in (0, 2)])
    yield "grad mode", lambda m: observed(m.eval()(inputs(*size, seed=7)))
    yield "inference", lambda m: _inference(m, inputs(*size, seed=8))
    if trains:
        yield "train", lambda m: _step(m, inputs(*size, seed=9))
        yield "train, another size", lambda m: _step(m, inputs(*others[2], seed=9))


def _call(model: nn.Module, x: Tensor) -> Any:
    with torch.no_grad():
        return observed(model.eval()(x)), _left_by(model)


def _calls(model: nn.Module, batches: list[Tensor]) -> Any:
    with torch.no_grad():
        return [observed(model.eval()(x)) for x in batches], _left_by(model), _buffers(model)


def _later(model: nn.Module, batches: list[Tensor]) -> Any:
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Block):
                module.later()
    return _calls(model, batches)


def _inference(model: nn.Module, x: Tensor) -> Any:
    with torch.inference_mode():
        return observed(model.eval()(x))


def _step(model: nn.Module, x: Tensor) -> Any:
    """Return outputs and gradients of one training step."""
    model.train().zero_grad()
    if x.is_floating_point():
        x.requires_grad_()
    out = observed(model(x))
    losses = [t.square().mean() for t in _tensors(out) if t.requires_grad]
    if losses:
        sum(losses).backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    with torch.no_grad():
        after = observed(model.eval()(x.detach()))  # with the running statistics that the step has left
    return out, x.grad, _left_by(model), Sized(grads), after


def _buffers(model: nn.Module) -> Sized:
    """Return the buffers of blocks; those of norms may hold anything where a channel has no part in anything."""
    blocks = [(name, module) for name, module in model.named_modules() if isinstance(module, Block)]
    return Sized({f"{name}.{key}": b.clone() for name, m in blocks for key, b in m._buffers.items() if b is not None})


# ---------------------------------------------------------------- what is observed

_OWN = frozenset(vars(nn.Module())) | {"_compactions", "_compacted_part"}
"""What is not a result: torch's tables, and the engine's list of what was compacted."""


def _left_by(model: nn.Module) -> dict[str, Any]:
    """Return the attributes of all modules that hold tensors or numbers."""
    return {
        f"{name}.{key}": observed(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in _OWN and not (isinstance(module, Block) and key in module.derived) and _holds(module, key)
    }


def _holds(module: nn.Module, key: str) -> bool:
    """Whether an attribute is the user's; what layers keep of their sizes is their own."""
    return type(module).__module__.startswith("tests.") or key == "last_output"


def observed(value: Any) -> Any:
    """Return tensors, numbers and texts in containers, of any object."""
    if isinstance(value, (Tensor, int, float, str, bool, type(None))):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {str(key): observed(entry) for key, entry in value.items()} | _fields(value)
    if isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        return [observed(entry) for entry in value]
    if isinstance(value, (type, nn.Module)) or callable(value):
        return str(type(value))
    return _fields(value)


def _fields(value: Any) -> dict[str, Any]:
    if is_dataclass(value):
        return {f.name: observed(getattr(value, f.name)) for f in fields(value)}
    slots = {key: getattr(value, key) for key in getattr(type(value), "__slots__", ())}
    return {key: observed(entry) for key, entry in (slots | getattr(value, "__dict__", {})).items()}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _tensors(entry)


def gap(expected: Any, actual: Any) -> float:
    """Return the largest difference of two trees, relative to the largest entry of each tensor; infinite for others."""
    if isinstance(expected, Sized) and isinstance(actual, Sized):
        return _gap_by_layer(expected, actual)
    if isinstance(expected, float) and isinstance(actual, float):
        return _differ(torch.tensor(expected), torch.tensor(actual))
    if type(expected) is not type(actual) and not (isinstance(expected, Tensor) and isinstance(actual, Tensor)):
        return float("inf")
    if isinstance(expected, Tensor):
        return _differ(expected.detach(), actual.detach())
    if isinstance(expected, dict):
        if expected.keys() != actual.keys():
            return float("inf")
        return max((gap(expected[key], actual[key]) for key in expected), default=0.0)
    if isinstance(expected, (list, tuple)):
        if len(expected) != len(actual):
            return float("inf")
        return max((gap(a, b) for a, b in zip(expected, actual, strict=True)), default=0.0)
    return 0.0 if expected == actual else float("inf")


def _gap_by_layer(expected: Sized, actual: Sized) -> float:
    """Return the largest difference of tensors, relative to their layers."""
    if expected.value.keys() != actual.value.keys():
        return float("inf")
    levels = {name: LEVEL * expected.sizes[name.rpartition(".")[0]] for name in expected.value}
    gaps = (_differ(tensor, actual.value[name], levels[name]) for name, tensor in expected.value.items())
    return max(gaps, default=0.0)


def _differ(expected: Tensor, actual: Tensor, level: float = LEVEL) -> float:
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return float("inf")
    expected, actual = expected.double(), actual.double()
    finite = expected.isfinite()
    if not torch.equal(finite, actual.isfinite()):
        return float("inf")
    expected, actual = expected[finite], actual[finite]
    if not expected.numel():
        return 0.0
    return float((expected - actual).abs().max()) / max(float(expected.abs().max()), level)

"""Traps: numbers that Python reads from tensors, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.recording.recorder import Recorder
from engine.running import provenance
from tests.engine.exactness import Masks
from tests.engine.traps.trap import Ablation, Trap, Use, once

__all__ = ["ABLATIONS", "TRAPS"]

Step = Callable[[Any, Tensor, Tensor], Any]


class _Steps(nn.Module):
    """Two layers and a head; ``step(net, x, h)`` stands between the layers and the head and reads what it likes."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 8), nn.Linear(8, 3)
        self.gate, self.aside = nn.Linear(5, 1), nn.Linear(6, 4)
        self.step, self.scale, self.limit, self.pair = step, 0.5, 2.0, 2

    def forward(self, x: Tensor) -> Any:
        hidden = self.stem(x).relu()
        self.inner = None
        found = self.step(self, x, self.body(hidden))
        return self.head(found) if isinstance(found, Tensor) else (self.head(found[0]), found[1])


def _small(model: nn.Module) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 0.3


def _scaled(factor: float, *shape: int, seed: int = 11) -> Use:
    """Return a use on inputs of another size: what is read differs from what the certificate reads."""

    def use(model: nn.Module) -> Any:
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        with torch.no_grad():
            return model.eval()(noise * factor)

    return use


def _trap(name: str, source: str, step: Step, **more: Any) -> Trap:
    uses = [_scaled(0.2, 3, 5), _scaled(5.0, 6, 5), _scaled(40.0, 2, 5, seed=12), once(1, 5)]
    options: dict[str, Any] = {"shrinks": True, **more}
    return Trap(name, source, lambda: _Steps(step), _small, uses, **options)


# ---------------------------------------------------------------- numbers that come back


def _by_maximum(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return h / (float(x.abs().max()) + 1.0)


def _by_deviation(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return h * x.std(correction=0).item()


def _shifted(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return h + x.sum().item()


def _clamped(net: Any, x: Tensor, h: Tensor) -> Tensor:
    limit = x.abs().max().item()
    return h.clamp(-limit, limit)


def _tensor_of(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return h + torch.tensor(x.mean().item(), dtype=x.dtype)


def _tensor_of_tensors(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return h + torch.tensor([x.mean(), x.max(), x.min(), x.sum()] * 2, dtype=x.dtype)


def _new_tensor(net: Any, x: Tensor, h: Tensor) -> Tensor:
    values = [x.mean().item(), 1.0] * 4
    return h * h.new_tensor(values)


def _full(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return h + torch.full((8,), x.max().item(), dtype=x.dtype)


def _as_array(net: Any, x: Tensor, h: Tensor) -> Tensor:
    mean = np.asarray(x.detach().numpy()).mean(0)
    return h + torch.from_numpy(np.concatenate([mean, mean])[:8].copy())


def _as_list(net: Any, x: Tensor, h: Tensor) -> Tensor:
    top = max(value for row in x.tolist() for value in row)
    return h - top


def _through_text(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return h * float(f"{x.mean().item():.3f}")


def _through_integers(net: Any, x: Tensor, h: Tensor) -> Tensor:
    count = int(x.abs().sum())
    return h * (1 + count % 3) + math.sqrt(count)


def _in_an_attribute(net: Any, x: Tensor, h: Tensor) -> Tensor:
    net.inner = float(x.max())
    return h + net.inner


def _counted(net: Any, x: Tensor, h: Tensor) -> Tensor:
    count = 0
    for value in x.flatten().tolist():
        if value > 0:
            count += 1
    return h + count


def _in_place(net: Any, x: Tensor, h: Tensor) -> Tensor:
    factor = 1 + x.abs().mean().item()
    h *= factor
    h += factor
    return h


def _masked(net: Any, x: Tensor, h: Tensor) -> Tensor:
    low = x.min().item()
    return h.masked_fill(h > 2.5, low) + F.leaky_relu(h, abs(low))


def _equal(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return h + float(torch.equal(x > 1.0, x < -1.0))


def _allclose(net: Any, x: Tensor, h: Tensor) -> Tensor:
    same = torch.allclose(x, torch.zeros_like(x), atol=2.0)
    return h * (2.0 if same else 3.0)


def _truth(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return h + (x.abs().max() > 2.0).item()


def _truth_of_text(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return h + (f"{x.abs().max():.1f}" > "2.0")


def _truth_or_number(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return h + (bool(x.abs().max() > 2.0) and 0.7)


def _with_literals(net: Any, x: Tensor, h: Tensor) -> Any:
    """The literal, the attribute and torch's own layer are constants, though something was read."""
    scale = x.mean().item()
    return net.act(h * 0.5 + net.limit) if hasattr(net, "act") else F.leaky_relu(h * 0.5 + net.limit, 0.1), scale


NUMBERS = [
    _trap("division by the largest entry", "x / float(x.max()), as in image pipelines", _by_maximum),
    _trap("a temperature from the deviation", "x.std().item() in samplers", _by_deviation),
    _trap("a number is added", "h + x.sum().item()", _shifted),
    _trap("a limit from the data", "clamp(-limit, limit), as in dynamic thresholding of Imagen", _clamped),
    _trap("a tensor of a number that was read", "torch.tensor(x.item())", _tensor_of),
    _trap("a tensor of tensors", "torch.tensor([a.mean(), a.max()]), which reads each", _tensor_of_tensors),
    _trap("a new tensor of a list of numbers", "x.new_tensor(values)", _new_tensor),
    _trap("a full tensor of a number that was read", "torch.full(size, value)", _full),
    _trap("back from an array", "NumPy in forward: torch.from_numpy(f(x.numpy()))", _as_array),
    _trap("the largest of a list", "max over x.tolist()", _as_list),
    _trap("a number through text", "float(f'{x.item():.3f}'), as in logging code", _through_text),
    _trap("a number through integers", "int(x.sum()) in arithmetic", _through_integers),
    _trap("a number in an attribute", "self.scale = float(x.max()), read back in the same call", _in_an_attribute),
    _trap("a count in a loop over a list", "counting tokens in Python", _counted),
    _trap("in-place operators with a number", "h *= factor", _in_place),
    _trap("a fill and a slope that were read", "masked_fill(mask, x.min().item())", _masked),
    _trap("equality as a number", "float(torch.equal(a, b))", _equal),
    _trap("a factor chosen by allclose", "torch.allclose in forward", _allclose),
    _trap("a truth value is added", "h + bool(condition): Python counts with truth values", _truth),
    _trap("a truth value of a text is added", "numbers that are rounded by formatting them", _truth_of_text),
    _trap("a truth value or a number is added", "condition and shift, as an inline if", _truth_or_number),
    _trap("literals beside a read", "logging a number changes nothing", _with_literals),
]


# ---------------------------------------------------------------- what was read is used


class _Logged(nn.Module):
    """The only reader of a branch is Python."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.stem, self.branch, self.head, self.read = nn.Linear(5, 6), nn.Linear(6, 8), nn.Linear(6, 3), read

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x).relu()
        return self.head(x), self.read(self.branch(x))


def _logged(name: str, source: str, read: Callable[[Tensor], Any]) -> Trap:
    return Trap(name, source, lambda: _Logged(read), _small, [_scaled(3.0, 4, 5), once(2, 5)], shrinks=True)


def _plain_mean(h: Tensor) -> float:
    return h.mean().item()


USED = [
    _logged("a list as output", ".tolist() of the result", lambda h: h.tolist()),
    _logged("a number as output", "a loss as a float", _plain_mean),
    _logged("an array as output", ".numpy() of the result", lambda h: h.numpy().tolist()),
    _logged("an array made by NumPy", "np.asarray(tensor)", lambda h: np.asarray(h).sum(1).tolist()),
    _logged("text as output", "f'{x:.6f}' in a report", lambda h: f"{h.sum():.6f}"),
    _logged("a comparison as output", "bool(x.mean() > 0)", lambda h: bool(h.mean() > 0)),
    _logged("an index as output", "int(x.argmax())", lambda h: int(h.argmax())),
    _logged("memory shared by DLPack", "np.from_dlpack(tensor)", lambda h: np.from_dlpack(h).tolist()),
]


# ---------------------------------------------------------------- amounts and choices that follow


def _to_length(net: Any, x: Tensor, h: Tensor) -> Tensor:
    length = max(int(x.abs().sum().item()) % x.shape[0], 1)
    return h[:length] * 2.0


def _one_of_the_channels(net: Any, x: Tensor, h: Tensor) -> Tensor:
    best = int(x.abs().sum(0).argmax())
    return h * h[:, best : best + 1].sigmoid()


def _one_of_the_heads(net: Any, x: Tensor, h: Tensor) -> Tensor:
    best = int(x.abs().sum() > 7)
    return h * h.view(len(h), 2, 4)[:, best].repeat(1, 2)


def _one_of_the_rows(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return h * h[int(x.abs().sum()) % len(h)].sigmoid()


def _scanned(net: Any, x: Tensor, h: Tensor) -> Tensor:
    states, state = [], torch.zeros(h.shape[1], dtype=h.dtype)
    for step in range(len(x)):
        state = state * 0.5 + h[step]
        states.append(state)
    return torch.stack(states)


def _rolled(net: Any, x: Tensor, h: Tensor) -> Tensor:
    return h.roll(int(x.abs().sum()) % 7, 1) + h


def _top_tokens(net: Any, x: Tensor, h: Tensor) -> Tensor:
    scores = net.gate(x).sigmoid()[:, 0]
    count = max(int(scores.sum().item()), 1)
    return h[scores.topk(count).indices] * scores.topk(count).values[:, None]


def _halting(net: Any, x: Tensor, h: Tensor) -> Tensor:
    total, steps = 0.0, 0
    while total < 0.9 and steps < 6:
        total += torch.sigmoid(net.gate(x)).mean().item()
        steps += 1
    return h * steps + total


def _rounds(net: Any, x: Tensor, h: Tensor) -> Tensor:
    for _ in range(1 + int(x.abs().max())):
        h = torch.tanh(h)
    return h


def _longest(net: Any, x: Tensor, h: Tensor) -> Tensor:
    lengths = (x > 0).sum(1).clamp(min=1).tolist()
    return torch.stack([row * length for row, length in zip(h, lengths, strict=True)])


def _in_pairs(net: Any, x: Tensor, h: Tensor) -> Tensor:
    net.seen = float(x.mean())
    shape = (*h.shape[:-1], -1, net.pair)
    return h.view(shape).cumsum(-1).flatten(-2)


def _in_parts_of_read_length(net: Any, x: Tensor, h: Tensor) -> Tensor:
    length = min(2 + int(x.abs().max()), 3) // 3 * 2 + 2
    shape = (*h.shape[:-1], -1, length)
    return h.view(*shape).cumsum(-1).flatten(-2)


class _OnMemory(nn.Module):
    """Three layers; the second reads a tensor on the memory of what the first returned."""

    def __init__(self, place: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.body, self.head, self.place = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3), place

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.place(self.stem(x).relu().detach())))  # type: ignore[no-any-return]


def _rebuilt(h: Tensor) -> Tensor:
    rebuild, arguments = h.__reduce_ex__(2)[:2]  # type: ignore[no-untyped-call]
    return rebuild(*arguments)  # type: ignore[no-any-return]


def _set(h: Tensor) -> Tensor:
    return torch.empty(0, dtype=h.dtype).set_(h.untyped_storage(), 0, h.shape, h.stride())


def _of_the_stem(model: nn.Module, seed: int) -> Masks:
    stays = torch.arange(6) < 4 + seed
    return {"stem": {"weight": stays[:, None].expand(6, 5).float(), "bias": stays.float()}}


def _memory(name: str, source: str, place: Callable[[Tensor], Tensor]) -> Trap:
    uses = [_scaled(0.2, 3, 5), _scaled(5.0, 6, 5)]
    return Trap(name, source, lambda: _OnMemory(place), _small, uses, masks=_of_the_stem)


AMOUNTS = [
    _memory("a tensor rebuilt from its pickle", "multiprocessing.reductions, rebuild_tensor", _rebuilt),
    _memory("a tensor on the memory of another", "tensor.set_(storage), caches of memory", _set),
    _trap("pairs in a shape put together after a read", "view(*x.shape[:-1], -1, head_dim) in transformers", _in_pairs),
    _trap("parts of a length that was read", "view(shape) with an estimated number of parts", _in_parts_of_read_length),
    _trap("a slice to a length", "x[: int(length)], as in speech models", _to_length),
    _trap("a channel chosen by the data", "indexing by argmax().item()", _one_of_the_channels),
    _trap("a head chosen by the data", "experts in one layer: x.view(b, experts, -1)[:, best]", _one_of_the_heads),
    _trap("a row chosen by the data", "the last step of a sequence: h[lengths.max() - 1]", _one_of_the_rows),
    _trap("a step per round of a loop", "scans of state-space models: h = a[:, i] * h + b[:, i]", _scanned),
    _trap("a shift by a number that was read", "torch.roll by an estimated offset", _rolled),
    _trap("tokens kept by score", "EViT and DynamicViT with a count from the scores", _top_tokens),
    _trap("a halting sum", "adaptive computation time: while total < 1 - eps", _halting),
    _trap("rows scaled by their lengths", "lengths.tolist(), as for packed sequences", _longest),
]


TRAPS = [*NUMBERS, *USED, *AMOUNTS]


def _no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "read", lambda self, tensor: None)


def _no_uncertainty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "unfixed_numbers", lambda numbers, frame, function: [])


def _no_truths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "booleans_in", lambda arguments: [])


ABLATIONS = [
    Ablation("what Python reads is used", _no_reads, "a list as output"),
    Ablation("numbers that may follow from a read vary", _no_uncertainty, "a number is added"),
    Ablation("truth values may follow from a read as well", _no_truths, "a truth value of a text is added"),
]

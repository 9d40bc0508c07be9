"""Fourier transforms along positions, and complex numbers: of their constants only the zeros are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.analysis.constants import Constants
from engine.analysis.labels import Labels
from engine.analysis.use import Use
from engine.ops.pointwise import broadcast_labels
from engine.ops.shape import through
from engine.program.arrays import align, any_over, uniform, zero_where
from engine.program.graph import Graph, Node
from engine.rule import Rare, Rule, Sample

__all__ = ["RULES"]

_KINDS = "fft ifft rfft irfft hfft ihfft".split()
_TRANSFORMS = [f"fft_{kind}{count}" for kind in _KINDS for count in ("", "2", "n")]
_SHIFTS = ["fft_fftshift", "fft_ifftshift"]
_PARTS = "_conj angle conj_physical imag real resolve_conj".split()


def _dims(node: Node) -> list[int]:
    """The dimensions of a transform."""
    source, dims, sizes = node.inputs[0], node.args.get("dim"), node.args.get("s")
    if isinstance(dims, int):
        return [dims % source.ndim]
    if dims is None:
        dims = range(-len(sizes), 0) if sizes else range(source.ndim)
    return [d % source.ndim for d in dims]


def _labels(node: Node, labels: Labels) -> None:
    """Freeze transformed dimensions; all others stay."""
    labels.claim(node.inputs[0])
    for layer in labels.without(node.inputs[0], _dims(node), f"{node!r} mixes it"):
        labels.add(node.output, layer)


def _constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    """Zero where all transformed entries are zero."""
    return [zero_where(uniform(constants.plain(node.inputs[0]), _dims(node)) == 0)]


def _used(node: Node, use: Use) -> None:
    use.add(node.inputs[0], any_over(use[node.output], _dims(node)))


def _other_dims(node: Node, graph: Graph) -> Mapping[int, int]:
    dims = _dims(node)
    return {d: d for d in range(node.output.ndim) if d not in dims}


# ---------------------------------------------------------------- complex numbers, entry by entry


def _zeros(node: Node, constants: Constants) -> list[Tensor]:
    return [align(constants[value], node.output.ndim) == 0 for value in node.inputs]


def _part(node: Node, constants: Constants) -> Sequence[Tensor]:
    return [zero_where(_zeros(node, constants)[0])]


def _of_two_constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    """Zero where the real and the imaginary part are, or the absolute value is."""
    first, second = _zeros(node, constants)
    return [zero_where(first if "abs" in node.args else first & second)]


def _all_used(node: Node, use: Use) -> None:
    for value in node.inputs:
        use.add(value, use[node.output])


# ---------------------------------------------------------------- a last dimension with the two parts


def _as_real_labels(node: Node, labels: Labels) -> None:
    labels.claim(node.inputs[0])
    for layer in labels.layers(node.inputs[0]):
        labels.add(node.output, layer[..., None])


def _as_real_constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    return [zero_where(constants[node.inputs[0]] == 0)[..., None]]


def _as_real_used(node: Node, use: Use) -> None:
    use.add(node.inputs[0], use[node.output].any(-1))


def _as_complex_labels(node: Node, labels: Labels) -> None:
    source = node.inputs[0]
    labels.claim(source)
    for layer in labels.without(source, [source.ndim - 1], f"{node!r} reads it as real and imaginary parts"):
        labels.add(node.output, layer.squeeze(-1))


def _as_complex_constants(node: Node, constants: Constants) -> Sequence[Tensor]:
    return [zero_where((constants[node.inputs[0]] == 0).all(-1))]


def _as_complex_used(node: Node, use: Use) -> None:
    use.add(node.inputs[0], use[node.output][..., None])


# ---------------------------------------------------------------- samples


def _transform_samples() -> Iterable[Sample]:
    yield through("filtered in two dimensions", lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * 0.5, s=x.shape[-2:]))
    yield through("filtered in one", lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=2), n=x.shape[2], dim=2))
    yield through("all kinds", _of_each_kind)
    yield through("over channels", lambda x: torch.fft.fft(x, dim=1).abs())
    yield through("shifted", lambda x: torch.fft.ifftshift(torch.fft.fftshift(x, (2, 3)) * x, (2, 3)))


def _of_each_kind(x: Tensor) -> Tensor:
    y = torch.fft.ifft2(torch.fft.fft2(x)) + torch.fft.ifftn(torch.fft.fftn(x, dim=(2, 3)), dim=(2, 3))
    y = y + torch.fft.ifft(torch.fft.fft(x)) + torch.fft.hfft(torch.fft.ihfft(x), n=x.shape[-1])
    y = y + torch.fft.irfftn(torch.fft.rfftn(x, dim=(2, 3)), s=x.shape[-2:], dim=(2, 3))
    y = y + torch.fft.hfft2(torch.fft.ihfft2(x), s=x.shape[-2:])
    return y.real + torch.fft.hfftn(torch.fft.ihfftn(x, dim=(2, 3)), s=x.shape[-2:], dim=(2, 3)).abs()


def _part_samples() -> Iterable[Sample]:
    yield through("parts", _parts)


def _parts(x: Tensor) -> Tensor:
    z = torch.fft.fft2(x)
    z = z.conj().resolve_conj() * torch.conj_physical(z) + (z - z.conj()).imag
    return z.real + z.angle()


def _whole_samples() -> Iterable[Sample]:
    yield through("from two parts", lambda x: (torch.complex(x, x.flip(2)) * torch.polar(x.abs(), x)).real)


def _as_real_samples() -> Iterable[Sample]:
    yield through("two parts in a row", _there_and_back)


def _there_and_back(x: Tensor) -> Tensor:
    parts: Any = torch.view_as_real(torch.fft.fft2(x))
    return torch.fft.ifft2(torch.view_as_complex(parts * 2)).real


RULES = [
    Rule(
        (*_TRANSFORMS, *_SHIFTS),
        _labels,
        _constants,
        _used,
        elementwise=1,
        rare=Rare(preserved=_other_dims),
        samples=_transform_samples,
    ),
    Rule(tuple(_PARTS), broadcast_labels, _part, _all_used, elementwise=1, samples=_part_samples),
    Rule(("complex", "polar"), broadcast_labels, _of_two_constants, _all_used, elementwise=1, samples=_whole_samples),
    Rule(("view_as_real",), _as_real_labels, _as_real_constants, _as_real_used, samples=_as_real_samples),
    Rule(("view_as_complex",), _as_complex_labels, _as_complex_constants, _as_complex_used),
]

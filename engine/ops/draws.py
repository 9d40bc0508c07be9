"""Random numbers that do not depend on a network's width, for comparing networks of different widths.

A network with fewer channels draws fewer, and therefore different, random numbers. Under `EvenDraws` all entries of a
draw are the same number: a 0/1 mask holds the probability of a one, so that dropout is the identity, and noise is one
nonzero number, so that noise added to a zero channel does not go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.program.graph import Node
from engine.program.signature import signature
from engine.running.process import seed_generators

__all__ = ["EvenDraws", "draws", "drops_entries", "entrywise"]

_COPIES = frozenset({"detach", "clone", "to", "_to_copy", "contiguous", "alias"})
_FACTORIES = ("new_", "empty", "zeros", "ones", "full", "rand")
_IN_PLACE = ("normal_", "uniform_", "exponential_", "geometric_", "cauchy_", "log_normal_")
_LIKE = {"rand": "uniform_", "rand_like": "uniform_", "randn": "normal_", "randn_like": "normal_"}


def draws(node: Node) -> bool:
    """Whether a call draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and _is_random(node.args)


def _is_random(args: Mapping[str, Any]) -> bool:
    """Whether an op that may draw does so: attention and recurrent layers draw where they drop something."""
    return args.get("train") is not False and all(args.get(name) != 0 for name in ("dropout", "dropout_p"))


def entrywise(node: Node) -> bool:
    """Whether a call changes entries independently, or creates a tensor to draw such changes into.

    Args:
        node: the call.

    Returns:
        Whether no channel influences another; a created tensor has the shape of another, one entry per sample, or one.
    """
    tags = getattr(node.target, "tags", ())
    if not (node.inputs or node.sizes):  # of literal sizes, which may be the number of channels
        return all(n == 1 for v in node.outputs for n in v.shape)
    if node.op in _COPIES or torch.Tag.pointwise in tags or torch.Tag.nondeterministic_seeded in tags:
        return True
    one = all(n == 1 for v in node.outputs for n in v.shape[1:])
    return node.op.startswith(_FACTORIES) and (one or any(v.shape == node.output.shape for v in node.inputs))


def drops_entries(node: Node) -> bool:
    """Whether a call draws random numbers in the shape of its only input, as dropout does."""
    return draws(node) and [v.shape for v in node.inputs] == [v.shape for v in node.outputs]


def _leave_to_torch(func: Any, args: Any, kwargs: Any) -> None:
    """Return None for each op, so that torch runs it."""


class EvenDraws(TorchDispatchMode):
    """Draw the same number for every entry of a random tensor.

    Integers and permutations are drawn from a fresh seed at each call, so that draws of the same size agree.

    Attributes:
        dropped: whether a 0/1 mask was drawn and replaced by its probability.

    Example:
        >>> with EvenDraws() as draws:
        ...     torch.nn.functional.dropout(torch.ones(3), 0.5), draws.dropped
        (tensor([1., 1., 1.]), True)
    """

    def __init__(self, kernel: Callable[..., Any] = _leave_to_torch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls, self._kernel = 0, kernel
        self.dropped = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op; random ops draw as described above."""
        kwargs = kwargs or {}
        random = torch.Tag.nondeterministic_seeded in func.tags and _is_random(signature(func).bind(args, kwargs))
        if not random:
            output = self._kernel(func, args, kwargs)
            return func(*args, **kwargs) if output is None else output
        with self:  # dropout is one op in inference mode
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        name = func.overloadpacket.__name__
        self._calls += 1
        with _seeded(self._calls):
            if name in _MASKS:
                self.dropped = True
                return _MASKS[name](signature(func).bind(args, kwargs))
            out = func(*args, **kwargs)
        if name in _IN_PLACE or name in _LIKE:
            self._even(out, name, args)
        return out

    def _even(self, out: Tensor, name: str, args: tuple[Any, ...]) -> None:
        one = torch.empty(1, dtype=out.dtype)
        generator = torch.Generator().manual_seed(self._calls)
        numbers = args[1:] if name in _IN_PLACE else ()
        getattr(one, _LIKE.get(name, name))(*numbers, generator=generator)
        out.fill_(one.item())


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    seed_generators(seed)
    yield


def _filled(bound: Mapping[str, Any]) -> Tensor:
    target, p = bound["self"], bound["p"]
    return target.copy_(p.expand_as(target)) if isinstance(p, Tensor) else target.fill_(p)


def _likely(bound: Mapping[str, Any]) -> Tensor:
    target, p = bound["self"], bound.get("p")
    if p is None:
        return target.clone()
    return target.new_zeros(target.shape) + p


def _whole(bound: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    target = bound["input"]
    return target.clone(), torch.ones_like(target, dtype=torch.bool)


_MASKS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "bernoulli_": _filled,
    "bernoulli": _likely,
    "native_dropout": _whole,
}

"""Entries in a state dict for modules whose statistics span removed channels.

The weights of a norm that keeps the statistics of 64 channels while 32 are left have the shapes of an ordinary norm
over 32. A network that somebody narrowed by hand would therefore load them without an error, and compute something
else. Such a module writes the number of channels into its state dict, as torch's extra state: a strict
``load_state_dict`` of an ordinary norm rejects it, and ``from_pretrained`` reports it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import CheckpointError

__all__ = ["SPAN", "Spanning", "check_spans", "is_span", "span_base", "weights_of"]

SPAN = "_extra_state"
"""Last part of the name in a state dict, which torch prescribes."""


class Spanning(nn.Module):
    """Base of classes whose statistics span more channels than remain; state dicts without the number load, too."""

    _engine_spans: tuple[float, ...]

    def get_extra_state(self) -> Tensor:
        """Return how many channels the statistics span."""
        return torch.tensor(type(self)._engine_spans)

    def set_extra_state(self, state: Any) -> None:
        """Do nothing: the number has been compared before."""

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        rest = local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if prefix + SPAN in missing_keys:  # written before this entry existed
            missing_keys.remove(prefix + SPAN)
        error_msgs += _differences(self, prefix, state_dict)


def span_base(cls: type[nn.Module]) -> type[nn.Module] | None:
    """Return the base that puts the number into state dicts; None for a class with an extra state of its own.

    Example:
        >>> span_base(nn.LayerNorm) is Spanning
        True
    """
    return Spanning if cls.get_extra_state is nn.Module.get_extra_state else None


def _differences(module: Spanning, prefix: str, weights: Mapping[str, Any]) -> Iterator[str]:
    """Yield differences between a module's number of channels and that in a state dict."""
    own = module.get_extra_state()
    state = weights.get(prefix + SPAN, own)
    if not isinstance(state, Tensor) or not torch.equal(state.detach().cpu().to(own.dtype), own):
        sizes = ", ".join(f"{size:g}" for size in type(module)._engine_spans)
        yield f"{prefix[:-1]!r} keeps the statistics of {sizes} channels, and {prefix + SPAN!r} says {state}."


def check_spans(model: nn.Module, weights: Mapping[str, Any], strict: bool) -> None:
    """Compare a state dict's entries for norms with the model, as ``load_state_dict`` does after loading the weights.

    Args:
        model: the model, in the shape of the weights.
        weights: the state dict.
        strict: whether no other module may have such an entry.

    Raises:
        CheckpointError: if they differ.
    """
    expected = model.state_dict() if strict else weights
    unexpected = sorted(name for name in weights if is_span(name) and name not in expected)
    if unexpected:
        raise CheckpointError(
            f"The weights have {unexpected[0]!r}, of a norm that keeps the statistics of removed channels, but the "
            "norm here does not. Use another copy of the file, or compact again."
        )
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Spanning):
            for difference in _differences(module, f"{name}." if name else "", weights):
                raise CheckpointError(difference)


def weights_of(model: nn.Module) -> dict[str, Any]:
    """Return a model's state dict without the entries of norms that keep the statistics of removed channels.

    Example:
        >>> list(weights_of(nn.LayerNorm(2)))
        ['weight', 'bias']
    """
    modules = model.named_modules(remove_duplicate=False)
    spans = {f"{name}.{SPAN}".removeprefix(".") for name, module in modules if isinstance(module, Spanning)}
    return {name: value for name, value in model.state_dict().items() if name not in spans}


def is_span(name: str) -> bool:
    """Whether a name in a state dict is that of extra state, which torch compares when it loads.

    Example:
        >>> is_span("norm._extra_state"), is_span("norm.weight")
        (True, False)
    """
    return name.rpartition(".")[2] == SPAN

"""The integers among a module's attributes: alone (``self.heads``), or in a list or tuple (``self.sizes[0]``).

A list or tuple may also hold pairs of a name and an integer, as the layers of einops do for the axes of a pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from engine.errors import PlanError

# Attributes of torch's layers that rules set, or that the layer compares with a size; all others (strides, dimensions,
# numbers of layers) do not change.
_SET_BY_RULES = frozenset(
    """
    d_model groups head_dim hidden_size in_channels in_features input_size num_channels num_features num_heads
    out_channels out_features proj_size
    """.split()
)

__all__ = ["integers", "is_settable", "tagged", "with_integers"]


def integers(module: nn.Module) -> dict[str, int]:
    """Return the integers among a module's attributes by name; those of a list or tuple as ``name[position]``.

    Example:
        >>> class Split(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.heads, self.sizes = 4, (16, 48)
        >>> integers(Split())
        {'heads': 4, 'sizes[0]': 16, 'sizes[1]': 48}
    """
    numbers = {name: int(v) for name, v in vars(module).items() if isinstance(v, int) and not isinstance(v, bool)}
    for name, value in _sequences(module):
        numbers.update({f"{name}[{position}]": int(_number(item)) for position, item in enumerate(value)})
    return numbers


def tagged(module: nn.Module, tag: Callable[[str, int], int]) -> dict[str, Any]:
    """Return a module's public attributes that are or contain integers, with each integer replaced.

    Args:
        module: the module, which is not changed.
        tag: returns the replacement of an integer, given its name and value: an instance of a subclass of ``int``.
    """
    attributes: dict[str, Any] = {
        name: tag(name, value) for name, value in vars(module).items() if type(value) is int and name[0] != "_"
    }
    for name, value in _sequences(module):
        if name[0] != "_" or type(value[0]) is tuple:
            attributes[name] = type(value)(
                [_replaced(item, tag(f"{name}[{i}]", _number(item))) for i, item in enumerate(value)]
            )
    return attributes


def _sequences(module: nn.Module) -> Iterator[tuple[str, list[Any] | tuple[Any, ...]]]:
    """Yield the lists and tuples of integers or named integers; in torch's layers, these are strides and the like."""
    if type(module).__module__.startswith("torch.nn.modules"):
        return
    for name, value in vars(module).items():
        if type(value) in (list, tuple) and value and (all(map(_is_number, value)) or all(map(_is_named, value))):
            yield name, value


def _is_number(item: Any) -> bool:
    return type(item) is int


def _is_named(item: Any) -> bool:
    return type(item) is tuple and len(item) == 2 and type(item[0]) is str and type(item[1]) is int


def _number(item: Any) -> int:
    number: int = item[1] if isinstance(item, tuple) else item
    return number


def _replaced(item: Any, number: int) -> Any:
    """Return an entry of a list with its number replaced."""
    return (item[0], number) if isinstance(item, tuple) else number


def is_settable(module: nn.Module, name: str) -> bool:
    """Whether a plan may set an attribute: one that rules set, or an integer in a class of the user's.

    Example:
        >>> layer = nn.Conv2d(1, 2, 3)
        >>> is_settable(layer, "out_channels"), is_settable(layer, "training")
        (True, False)
    """
    value = vars(module).get(name)
    is_single = isinstance(value, int) and not isinstance(value, bool)
    if not is_single and name not in dict(_sequences(module)):
        return False
    is_torchs = type(module).__module__.startswith("torch.") or any(
        name in vars(base).get(kind, ())
        for base in type(module).__mro__
        if base.__module__.startswith("torch.")
        for kind in ("__annotations__", "__constants__")
    )
    has_names = isinstance(value, (list, tuple)) and bool(value) and type(value[0]) is tuple
    return name in _SET_BY_RULES if is_torchs else name[0] != "_" or has_names


def with_integers(path: str, module: nn.Module, values: Mapping[str, int]) -> dict[str, Any]:
    """Return the attributes to set so that integers get new values, which are positive and not larger than before.

    Args:
        path: name of the module in the model.
        module: the module, which is not changed.
        values: new values by the names that `integers` returns.

    Raises:
        PlanError: if the module has no such integer, or no compaction could have set this value.

    Example:
        >>> class Split(nn.Module):
        ...     pass
        >>> layer = Split()
        >>> layer.sizes = (16, 48)
        >>> with_integers("body", layer, {"sizes[1]": 24})
        {'sizes': (16, 24)}
    """
    attributes: dict[str, Any] = {}
    for key, value in values.items():
        name, _, position = key.rstrip("]").partition("[")
        _check_settable(path, module, name, position, value)
        old = attributes.get(name, getattr(module, name, None))
        if position.isdecimal() and isinstance(old, (list, tuple)) and int(position) < len(old):
            attributes[name] = type(old)(
                [_replaced(item, value) if i == int(position) else item for i, item in enumerate(old)]
            )
        elif not position and isinstance(old, int):
            attributes[name] = value
        else:
            raise PlanError(f"The plan belongs to another model: {path!r} ({type(module).__name__}) has no {key!r}.")
    return attributes


def _check_settable(path: str, module: nn.Module, name: str, position: str, value: int) -> None:
    """Raise an error for a number that no compaction of the module could have set."""
    old = vars(module).get(name)
    if position.isdecimal() and isinstance(old, (list, tuple)) and int(position) < len(old):
        old = _number(old[int(position)])
    if isinstance(old, int) and not (is_settable(module, name) and 0 < value <= old):
        raise PlanError(
            f"The plan sets `{name}` of {path!r} ({type(module).__name__}) from {old} to {value}, which no compaction "
            "does. Take another copy of the file, or compact again."
        )

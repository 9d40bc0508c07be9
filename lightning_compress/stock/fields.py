"""Numbers of a configuration by their path, independent of the package.

A configuration is a mapping of primitives, as in ``config.json``: nested mappings are configurations of parts, and
lists hold one number per stage.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Path", "Shape", "Values", "changed_dims", "generic", "numbers", "set_numbers", "shown"]

_NO_SIZE = re.compile(r"^_|(^|_)ids?$|id2label|label2id|_version$")  # tokens by number, labels

Path = tuple[str | int, ...]
Shape = tuple[int, ...]
Values = Mapping[Path, int | float]


def numbers(config: Mapping[str, Any]) -> dict[Path, int | float | None]:
    """Return the numbers of a configuration, and the fields without a value, which may accept one.

    Example:
        >>> numbers({"width": 8, "sizes": [1, 2], "part": {"eps": 1e-5}, "name": "a", "inner": None})
        {('width',): 8, ('sizes', 0): 1, ('sizes', 1): 2, ('part', 'eps'): 1e-05, ('inner',): None}
    """
    return dict(_numbers(config, ()))


def _numbers(value: Any, path: Path) -> Iterator[tuple[Path, int | float | None]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str) and not _NO_SIZE.search(key):
                yield from _numbers(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            if isinstance(item, (int, float, Mapping)):
                yield from _numbers(item, (*path, place))
    elif value is None or isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value


def set_numbers(config: Mapping[str, Any], values: Values) -> dict[str, Any]:
    """Return a configuration with some numbers replaced.

    Example:
        >>> set_numbers({"width": 8, "sizes": [1, 2]}, {("width",): 4, ("sizes", 1): 3})
        {'width': 4, 'sizes': [1, 3]}
    """
    new = copy.deepcopy(dict(config))
    for path, value in values.items():
        owner: Any = new
        for key in path[:-1]:
            if isinstance(owner[key], tuple):
                owner[key] = list(owner[key])
            owner = owner[key]
        owner[path[-1]] = value
    return new


def shown(path: Path) -> str:
    """Format the path of a field.

    Example:
        >>> shown(("text_config", "hidden_sizes", 2))
        'text_config.hidden_sizes[2]'
    """
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def generic(name: str) -> str:
    """Return the name of a parameter with the indices of layers replaced by ``*``.

    Example:
        >>> generic("layers.0.weight")
        'layers.*.weight'
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def changed_dims(one: Shape | None, other: Shape | None) -> frozenset[int] | None:
    """Return the dimensions in which two shapes differ; None if they differ in length or one is None.

    Example:
        >>> changed_dims((4, 8), (4, 6)), changed_dims((4, 8), None)
        (frozenset({1}), None)
    """
    if one is None or other is None or len(one) != len(other):
        return None
    return frozenset(dim for dim, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)

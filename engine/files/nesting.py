"""Check for containers that contain themselves or are nested too deeply."""

from __future__ import annotations

from typing import Any

__all__ = ["check_nesting"]

_DEEPEST = 100  # levels of nesting


def check_nesting(root: Any) -> None:
    """Reject containers that contain themselves, or are nested too deeply to be traversed.

    Each container is visited once, however often it is referenced.
    """
    heights: dict[int, int] = {}
    path: list[tuple[Any, list[Any]]] = [(root, _children(root))]
    above = {id(root)}
    while path:
        item, children = path[-1]
        if children:
            child = children.pop()
            if id(child) in above or len(path) > _DEEPEST:
                raise ValueError("its containers hold themselves, or are nested too deep")
            if id(child) not in heights:
                above.add(id(child))
                path.append((child, _children(child)))
            continue
        path.pop()
        above.discard(id(item))
        heights[id(item)] = 1 + max((heights.get(id(child), 0) for child in _children(item)), default=0)
        if heights[id(item)] > _DEEPEST:
            raise ValueError("its containers are nested too deep")


def _children(item: Any) -> list[Any]:
    """Return the containers in a container, including the metadata of a state dict."""
    if isinstance(item, dict):
        inside = [*item.values(), *getattr(item, "__dict__", {}).values()]
    else:
        inside = list(item) if isinstance(item, (list, tuple)) else []
    return [value for value in inside if isinstance(value, (dict, list, tuple)) and value]

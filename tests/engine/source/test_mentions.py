"""What methods do with attributes of their module."""

from __future__ import annotations

from typing import Any

from engine.source.mentions import mentions


def _method(self: Any, x: Any) -> Any:
    if self.norm is not None and isinstance(self.act, int):
        x = self.layers[0](x)
    for part in self.children():
        x = part(x)
    self.count = len(self.names)
    return self.table.get(x.ndim, self.stem)(x) + getattr(self, f"head_{x}")(x)


def test_what_is_called_and_what_is_tested() -> None:
    """A call runs a module, a test looks whether it is there; all else may do anything with it."""
    by_path = {mention.path: mention for mention in mentions(_method.__code__)}
    assert by_path["norm",].is_tested and by_path["act",].is_tested and by_path["names",].is_tested
    assert by_path["layers", 0].is_called and by_path["table", "get"].is_called
    stem = by_path["stem",]
    assert not (stem.is_called or stem.is_tested or stem.of_children)


def test_all_children() -> None:
    """Code that iterates over a module may get hold of each part; by a name, of those whose names begin so."""
    prefixes = [mention.prefix for mention in mentions(_method.__code__) if mention.of_children]
    assert prefixes == ["", "head_"]


def test_attributes_that_are_assigned_are_not_mentioned() -> None:
    """Nothing is read there."""
    assert ("count",) not in {mention.path for mention in mentions(_method.__code__)}

"""The numbers of a configuration."""

from __future__ import annotations

from lightning_compress.stock.fields import numbers, set_numbers, shown

CONFIG = {"width": 8, "flag": True, "name": "a", "_hidden": 1, "parts": [{"size": 2}], "sizes": (3, 4), "none": None}


def test_numbers_have_paths() -> None:
    """Flags, texts and private fields are not numbers; a field without a value may take one."""
    expected = {("width",): 8, ("parts", 0, "size"): 2, ("sizes", 0): 3, ("sizes", 1): 4, ("none",): None}
    assert numbers(CONFIG) == expected


def test_a_configuration_is_copied() -> None:
    """Other numbers go into a copy."""
    new = set_numbers(CONFIG, {("parts", 0, "size"): 5, ("sizes", 1): 6})
    assert new["parts"] == [{"size": 5}] and list(new["sizes"]) == [3, 6]
    assert CONFIG["parts"] == [{"size": 2}]


def test_paths_are_written_as_people_do() -> None:
    """With dots and brackets."""
    assert shown(("parts", 0, "size")) == "parts[0].size"

"""Which tests a change touches."""

from __future__ import annotations

from tests.changed import paths_to_test


def test_a_module_has_its_doctests_and_the_test_of_its_name() -> None:
    """A test stands for itself; what has no test and no doctest is left out."""
    changed = [
        "engine/program/graph.py",
        "tests/engine/test_masks.py",
        "tests/engine/nets.py",
        "docs/faq.md",
        "engine/gone.py",
    ]
    beside = "tests/engine/program/test_graph.py"
    assert paths_to_test(changed) == ["engine/program/graph.py", beside, "tests/engine/test_masks.py"]
    assert paths_to_test(["examples/digits.py"]) == ["tests/examples/test_digits.py"]

"""Accuracy against cost."""

from __future__ import annotations

from lightning_compress.report.stages import Point, stages

DENSE, SMALL = (100, 10), (40, 4)


def logged(*values: tuple[int, bool, float]) -> list[Point]:
    """Points with an accuracy each, one step apart."""
    return [Point(step, masked, compacted, {"acc": acc}) for step, (masked, compacted, acc) in enumerate(values)]


def test_a_fit_from_dense_to_compacted() -> None:
    """The last dense epoch, the first and the last at the final sparsity, and the compacted network with its costs."""
    accuracies = ((0, 0.8), (0, 0.9), (4, 0.7), (8, 0.5), (8, 0.6), (8, 0.85))
    points = logged(*((masked, False, accuracy) for masked, accuracy in accuracies))
    table = [(s.name, s.macs, s.params, s.metrics["acc"], s.step) for s in stages(points, DENSE, SMALL)]
    assert table == [
        ("dense", 100, 10, 0.9, 1),
        ("masked", 100, 10, 0.5, 3),
        ("recovered", 100, 10, 0.85, 5),
        ("compacted", 40, 4, 0.85, 5),
    ]


def test_training_after_a_compaction() -> None:
    """It is a stage of its own."""
    points = logged((0, False, 0.9), (8, False, 0.6), (0, True, 0.7), (0, True, 0.95))
    assert [(s.name, s.metrics["acc"]) for s in stages(points, DENSE, SMALL)][-2:] == [
        ("compacted", 0.6),
        ("fine-tuned", 0.95),
    ]


def test_a_network_that_is_not_exact_has_no_accuracy_until_it_is_measured() -> None:
    """Ordinary norms compute something else than what was validated; further training validates it."""
    points = logged((0, False, 0.9), (8, False, 0.6))
    assert [(s.name, dict(s.metrics)) for s in stages(points, DENSE, SMALL, exact=False)][-1] == ("compacted", {})
    points += logged((0, True, 0.7))
    assert [(s.name, dict(s.metrics)) for s in stages(points, DENSE, SMALL, exact=False)][-2:] == [
        ("compacted", {}),
        ("fine-tuned", {"acc": 0.7}),
    ]


def test_what_was_not_seen_is_not_there() -> None:
    """Masked from the first epoch on: no dense row. Nothing compacted: no compacted one. Nothing logged: no metrics."""
    assert [s.name for s in stages(logged((8, False, 0.5)), DENSE, None)] == ["masked"]
    (only,) = stages([], DENSE, SMALL)
    assert (only.name, dict(only.metrics), only.step) == ("compacted", {}, None)
    assert stages([], DENSE, None) == ()

"""The tree of errors."""

from __future__ import annotations

import inspect

from engine import errors


def test_every_error_is_listed_and_belongs_to_the_tree() -> None:
    """One base, sorted names, a docstring each, and each stands in the drawing."""
    classes = {n: c for n, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, Exception)}
    assert sorted(classes) == errors.__all__
    for name, cls in classes.items():
        assert issubclass(cls, errors.EngineError) and cls.__doc__ and name in errors.__doc__


def test_bad_arguments_are_value_errors() -> None:
    """So that callers who know nothing of the engine can catch them; others are not."""
    arguments = {errors.InputError, errors.MaskError, errors.CheckpointError}
    for name in errors.__all__:
        cls = getattr(errors, name)
        assert issubclass(cls, ValueError) == (cls in arguments)


def test_a_stale_graph_is_a_trace_error() -> None:
    """The tree as drawn."""
    assert issubclass(errors.StaleGraphError, errors.TraceError)
    assert not issubclass(errors.PlanError, errors.TraceError)

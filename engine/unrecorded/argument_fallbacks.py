"""Constants that replace arguments which the example omits: other calls pass these arguments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from types import CodeType

from engine.flow.coverage import FunctionCoverage
from engine.flow.omitted_arguments import ends_of_numeric_fallbacks
from engine.observations.assumptions import Assumptions
from engine.observations.dataflow import Dataflow

__all__ = ["assume_fallbacks_vary"]


def assume_fallbacks_vary(
    coverages: Iterable[FunctionCoverage],
    arguments: Callable[[CodeType], Collection[str]],
    parameters: Collection[str],
    dataflow: Dataflow,
    assumptions: Assumptions,
) -> None:
    """Assume that constants and parameters in place of omitted arguments are used and vary.

    The same holds for what ops compute from numbers in place of such an argument.

    Args:
        coverages: the functions that ran.
        arguments: returns, for the code of a function, its arguments that other calls of the model may pass.
        parameters: names of the model's parameters.
        dataflow: of the recorded ops.
        assumptions: is extended.
    """
    for coverage in coverages:
        names = arguments(coverage.function.code)
        for name, held in coverage.fallbacks.items():
            values = [v for kind, recorded in held if kind == "values" for v in recorded] if name in names else []
            constants = list(filter(dataflow.is_constant, values))  # buffers, and what is computed of them, too
            constants += [value for value in values if value.stored and value.name in parameters]
            assumptions.use(constants, f"replaces the argument {name!r}, which the example omits")
            assumptions.vary(constants)
        _assume_numbers_vary(coverage, names, dataflow, assumptions)


def _assume_numbers_vary(
    coverage: FunctionCoverage, names: Collection[str], dataflow: Dataflow, assumptions: Assumptions
) -> None:
    """Do the same for the results of ops that receive a number in place of an omitted argument."""
    ends = ends_of_numeric_fallbacks(coverage.function.tree, frozenset(coverage.omitted.intersection(names)))
    for node in dataflow.nodes if ends else ():
        site = node.site
        if site is not None and site.code is coverage.function.code and site.end in ends:
            assumptions.use(node.outputs, f"is computed without an argument that other calls may pass, at {site}")
            assumptions.vary(node.outputs)

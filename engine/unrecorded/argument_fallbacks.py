"""Constants that replace arguments which the example omits: other calls pass these arguments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from types import CodeType

from engine.flow.coverage import FunctionCoverage
from engine.flow.omitted_arguments import ends_of_numeric_fallbacks
from engine.observations.assumptions import Assumptions
from engine.observations.dataflow import Dataflow
from engine.program.graph import Node

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
    omitted, code = frozenset(coverage.omitted.intersection(names)), coverage.function.code
    nodes = [n for n in dataflow.nodes if n.site is not None and n.site.code is code] if omitted else []
    computed = frozenset(n.site.span for n in nodes if n.site is not None and n.site.end is not None)
    ends = ends_of_numeric_fallbacks(coverage.function.tree, omitted, computed)
    for node in nodes:
        certain = ends.get(node.site.end) if node.site is not None and node.site.end is not None else None
        if certain or certain is not None and _has_number_as_tensor(node):
            assumptions.use(node.outputs, f"is computed without an argument that other calls may pass, at {node.site}")
            assumptions.vary(node.outputs)


def _has_number_as_tensor(node: Node) -> bool:
    """Whether an op got a number where its schema has a tensor."""
    schema = getattr(node.target, "_schema", None)
    tensors = [a.name for a in schema.arguments if str(a.type) == "Tensor"] if schema is not None else []
    return any(type(node.args.get(name)) in (int, float) for name in tensors)

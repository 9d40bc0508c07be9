"""Dimensions along which code indexes tensors: selecting entries along other dimensions leaves channels unaffected."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence

from engine.flow.effects import names_read, names_read_only_by
from engine.observations.dataflow import Dataflow
from engine.program.graph import Value

__all__ = ["IndexedReads"]


class IndexedReads:
    """The places where a part of a function selects entries of tensors by an index.

    Args:
        syntax: all syntax nodes of the part.
        tests: conditions under which that part runs.
        values_of: returns the recorded values that a variable may hold.
        dataflow: of the recorded ops.
    """

    def __init__(
        self,
        syntax: Sequence[ast.AST],
        tests: Sequence[ast.expr],
        values_of: Callable[[str], list[Value]],
        dataflow: Dataflow,
    ) -> None:
        self._syntax, self._tests, self._values_of, self._dataflow = syntax, tests, values_of, dataflow

    def beside_channels(self) -> set[str]:
        """Return the variables that are only indexed, and only along dimensions other than the channels."""
        reads = [
            tensor
            for node in self._syntax
            for tensor, dims in self._indexed(node)
            if all(_is_beside(value.ndim, dims, self._dataflow.channel_dim(value)) for value in self._values(tensor))
        ]
        return names_read_only_by(self._syntax, reads)

    def _indexed(self, node: ast.AST) -> Iterator[tuple[ast.expr, list[int]]]:
        """Yield the tensor that an expression indexes, with the dimensions of the index."""
        if isinstance(node, ast.Subscript):
            dims = self._subscripted_dims(node.slice)
            yield from [] if dims is None else [(node.value, dims)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in self._dataflow.functions.selecting:
                yield from self._selected(node, node.func)

    def _selected(self, call: ast.Call, function: ast.Attribute) -> Iterator[tuple[ast.expr, list[int]]]:
        """Yield what `_indexed` does, for a function such as ``gather`` or ``index_select``."""
        owner = function.value
        args = call.args if isinstance(owner, ast.Name) and owner.id == "torch" else [owner, *call.args]
        keywords = {k.arg: k.value for k in call.keywords}
        spreads = function.attr in self._dataflow.functions.spreading
        dim = keywords.get("dim", args[2 if spreads and len(args) > 2 else 1] if len(args) > 1 else None)
        if isinstance(dim, ast.Constant) and type(dim.value) is int and not spreads:
            yield args[0], [dim.value]
        elif spreads and len(args) > 1 and _ends_with_new_dim(args[1]):
            yield args[0], list(range(max((v.ndim for v in self._values(args[0])), default=1) - 1))

    def _values(self, node: ast.expr) -> list[Value]:
        return self._values_of(node.id) if isinstance(node, ast.Name) else []

    def _subscripted_dims(self, index: ast.expr) -> list[int] | None:
        """Return the dimensions along which a subscript selects entries; None if they are unknown."""
        dims: list[int] = []
        for place, part in enumerate(index.elts if isinstance(index, ast.Tuple) else [index]):
            if isinstance(part, ast.Slice) or (isinstance(part, ast.Constant) and type(part.value) is int):
                dims += [] if isinstance(part, ast.Slice) and part.lower is part.upper is part.step is None else [place]
                continue
            ndim = self._index_ndim(part)
            if ndim is None or (ndim > 1 and place):
                return None
            dims += range(place, place + max(ndim, 1))
        return dims or None

    def _index_ndim(self, index: ast.expr) -> int | None:
        """Return the number of dimensions of an index: as recorded, or as the condition says (``keep.ndim == 2``)."""
        if isinstance(index, ast.Constant):
            return None
        for test in (n for t in self._tests for n in ast.walk(t) if isinstance(n, ast.Compare)):
            if ast.unparse(test.left) == f"{ast.unparse(index)}.ndim" and isinstance(test.ops[0], ast.Eq):
                number = test.comparators[0]
                return number.value if isinstance(number, ast.Constant) and type(number.value) is int else None
        values = [self._values_of(name) for name in names_read(index)]
        return max((value.ndim for own in values for value in own), default=None) if all(values) else None


def _is_beside(ndim: int, dims: Sequence[int], channel_dim: int | None) -> bool:
    """Whether none of the dimensions holds channels; the first of several dimensions holds samples."""
    if channel_dim is None:
        return ndim > 1 and set(dims) == {0}
    return channel_dim not in {dim % ndim for dim in dims if -ndim <= dim < ndim} and max(map(abs, dims)) <= ndim


def _ends_with_new_dim(index: ast.expr) -> bool:
    """Whether the last dimension of an index has size one, and so stands for all entries (``places[..., None]``)."""
    last = index.slice.elts[-1:] if isinstance(index, ast.Subscript) and isinstance(index.slice, ast.Tuple) else []
    return any(isinstance(part, ast.Constant) and part.value is None for part in last)

"""The current value of each tensor, for tensors that share memory and are written to through one another.

Tensors that share storage are versioned: after a write into one of them (``x[:, :4] = …``, ``y.relu_()``) every other
one is updated at its next read, by replaying its view on the new value, or by an explicit ``engine::write`` node if a
view wrote into its base. Otherwise the analysis would miss the write, and the compaction would be wrong.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor

from engine.alternatives.mutable_state import MutableState
from engine.errors import TraceError
from engine.flow.paths_read import NumberRead
from engine.limits import MOST_PICKED_TENSORS
from engine.numbers.sizes import numbers_in
from engine.observations.dataflow import is_inside
from engine.program.entries import TRAIN_PATHS
from engine.program.expressions import Expr, leaves
from engine.program.graph import Node, Value, map_values, walk_values
from engine.program.signature import signature
from engine.program.storages import storage_of
from engine.program.trees import tensors_in
from engine.recording.tape import Tape
from engine.running.fakes import Fakes
from engine.running.held_tensors import holds_nothing_but_tensors, tensors_of_variable
from engine.running.provenance import Provenance
from engine.source.model_code import codes_of

__all__ = ["WRITE", "Versions"]

WRITE = "engine::write"
_OWNED = ("weight", "w_ih", "params")  # arguments whose owner makes the call, also where its hooks are skipped


@dataclass
class _Storage:
    """A piece of memory: how often it was written to, and through which tensors, by identity."""

    version: int = 0
    writes: list[tuple[int, int, Value]] = field(default_factory=list)


@dataclass
class _Home:
    """The storage of a tensor, the version that it was read at, and the view that derives it from its parent."""

    storage: _Storage
    version: int
    node: Node | None = None
    position: int = 0
    parent: int | None = None


_OTHER, _UNREAD = ("other", None), ("unread", None)


class Versions(Tape):
    """A `Tape` that knows the value of each tensor of the current run.

    Args:
        model: gives the names of parameters and buffers, which are known by identity.
        changing: the tensors whose numbers may change between calls.
    """

    _provenance: Provenance
    _maker: Fakes | None

    def __init__(self, model: nn.Module, changing: MutableState | None) -> None:
        super().__init__(model, changing)
        self._stack, self._path = [""], "eval"
        self._own_code: dict[str, frozenset[CodeType] | None] = {}
        self._forget()

    def _forget(self) -> None:
        self._owned: dict[int, str] = {}
        self._current: dict[int, Value] = {}
        self._homes: dict[int, _Home] = {}
        self._storages: dict[int, _Storage] = {}
        self._named: dict[int, str] = {}  # by storage
        self._alive: dict[int, Tensor] = {}  # identities must not be used twice; the only reference to what ops make
        self._leaves: set[int] = set()  # identities of tensors that were there before the run and are stored nowhere
        self._hidden: dict[int, Tensor] = {}

    @property
    def _in_train_mode(self) -> bool:
        """Whether the current run is one of forward in train mode; an entry may have any name."""
        return self._path in TRAIN_PATHS

    def _may_change(self, tensor: Tensor) -> bool:
        """Whether the numbers in a real tensor are unknown."""
        if self._changing is None:
            return False
        return tensor in self._changing or self._names.get(id(tensor)) in self._changing.names

    def _is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, or a table that masks apply to as well, so that its ops are recorded."""
        if isinstance(tensor, nn.Parameter):
            return True
        is_table = self._is_maskable(self._names.get(id(tensor), ""))
        if is_table and self._changing is not None:
            self._changing.read_tables = True
        return is_table

    def _varies(self, tensor: Tensor) -> bool:
        return False

    def _emit(self, op: str, func: Any, args: Any, sizes: Any, inputs: Any, outputs: Any) -> Node:
        module = self._running_part()
        weight = next(walk_values([args.get(name) for name in _OWNED]), None)
        if weight is not None and weight.name is not None:  # a direct .forward() skips the hooks
            owners = self._owners[weight.name]
            module = module if module in owners else owners[0]
        site, callers = self._provenance.site, tuple(filter(None, self._stack))
        node = Node(len(self._nodes), op, func, args, sizes, inputs, outputs, module, self._path, site, callers)
        self._nodes.append(node)
        if self._provenance.uncertain:
            self._uncertain[node.index] = tuple(self._provenance.uncertain)
        return node

    def _running_part(self) -> str:
        """Return the running module, or the part of it whose method other than forward is running.

        An op belongs to that part: what a metric's ``update`` computes does not concern the module that calls it.
        """
        top, site = self._stack[-1], self._provenance.site
        if top not in self._own_code:
            kind = type(self._model.get_submodule(top))
            self._own_code[top] = None if kind.__module__.startswith("torch.") else codes_of(kind)  # type: ignore[arg-type]
        own = self._own_code[top]
        if own is None or site is None or site.code in own:
            return top
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not site.code:
            frame = frame.f_back
        while frame is not None:
            name, is_method = self._running(frame)
            if is_method:
                return name if is_inside(name, top) else top
            frame = frame.f_back
        return top

    def _running(self, frame: FrameType) -> tuple[str, bool]:
        """Return the name of the module that a function runs for, and whether that is its first argument."""
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        name = self._modules.get(id(first)) if isinstance(first, nn.Module) else None
        return (self._stack[-1], False) if name is None else (name, True)

    def _sizes(self, func: Any, values: Mapping[str, Any]) -> dict[tuple[str, int], Expr]:
        """Match the numbers that reached the op, except for dimensions, with those that the user's code passed."""
        expressions: dict[tuple[str, int], Expr] = {}
        if not self._provenance.tagged:
            return expressions
        sizes = signature(func).sizes if hasattr(func, "_schema") else ()
        for name, value in values.items():
            if not isinstance(value, Value) and ("dim" not in name or name in sizes):
                for position, number in enumerate(numbers_in(value)):
                    expr = self._provenance.match(number)
                    if any(True for _ in leaves(expr)):
                        expressions[name, position] = expr
        return expressions

    def _value(self, tensor: Tensor, **what: Any) -> Value:
        value = Value(len(self._values), tuple(map(int, tensor.shape)), tensor.dtype, **what)
        self._values.append(value)
        self._alive[id(tensor)] = tensor
        return value

    def _constants(self, tensor: Tensor, fake: Tensor) -> None:
        """Keep the data of a real tensor that no module registers with its value."""
        self._leaves.add(id(fake))
        self._current[id(fake)] = self._value(fake, data=None if self._may_change(tensor) else tensor.detach())
        self._place(fake)

    def _hold(self, *tensors: Tensor) -> None:
        self._alive.update((id(tensor), tensor) for tensor in tensors)

    def _place(self, tensor: Tensor, node: Node | None = None, position: int = 0, parent: int | None = None) -> None:
        key = storage_of(tensor)
        storage = self._storages.get(key)
        if storage is None or parent is None:
            storage, node, parent = self._storages.setdefault(key, _Storage()), None, None
        self._homes[id(tensor)] = _Home(storage, storage.version, node, position, parent)

    def adopt(self, tensor: Tensor) -> None:
        """Add a tensor that Python built from numbers that may depend on a read: it varies."""
        self._current[id(tensor)] = self._value(tensor)
        self._place(tensor)

    def share(self, tensor: Tensor, twin: Tensor) -> None:
        """Note that another object represents a tensor, with its memory and its sizes.

        Raises:
            DataDependentOutputException: if the run uses tensors without data, which have no class of their own.
        """
        if self._maker is not None:
            raise DataDependentOutputException(Tensor.as_subclass)  # type: ignore[arg-type]
        self._current[id(twin)] = self._read(tensor)
        self._homes[id(twin)] = dataclasses.replace(self._homes[id(tensor)])
        self._hold(twin)

    def _peek(self, tensor: Tensor) -> Value | None:
        name = self._names.get(id(tensor)) or self._owned.get(id(tensor))
        return self._read(tensor) if name is not None or id(tensor) in self._current else None

    def _read(self, tensor: Tensor) -> Value:
        """Return the value that a tensor holds now."""
        if id(tensor) in self._current:
            return self._refresh(id(tensor))
        if id(tensor) in self._hidden:
            raise TraceError(f"{self._stack[-1]!r} reads a tensor that a replaced module computed and did not return.")
        name = self._names.get(id(tensor)) or self._owned.get(id(tensor))
        if name is None:
            varies = isinstance(tensor, FakeTensor) or self._varies(tensor) or self._may_change(tensor)
            value = self._value(tensor, data=None if varies else tensor.detach())
            self._leaves.add(id(tensor))
        elif name in self._stored:
            value = self._stored[name]
        else:
            value = self._stored[name] = self._value(tensor, name=name)
        if name is not None:
            self._named[storage_of(tensor)] = name
        self._current[id(tensor)] = value
        self._place(tensor)
        return value

    def _kept(self, held: Any) -> Any:
        """Return what matters about a variable to code that does not run.

        This is values, a module, None, tensors that no op has read, or something else.
        """
        if held is None:
            return "none", None
        if isinstance(held, nn.Module):
            return ("module", self._modules[id(held)]) if id(held) in self._modules else _OTHER
        if isinstance(held, Tensor) and self._is_weight(held) and id(held) in self._names:
            return "stored", self._names[id(held)]
        if isinstance(held, NumberRead):
            return "inside", held.values
        kind, tensors = tensors_of_variable(held)
        current = [id(t) for t in tensors if id(t) in self._current]
        if current:
            return kind, tuple(map(self._refresh, current))
        return _UNREAD if tensors else _OTHER

    def _contents(self, held: Any) -> tuple[Value, ...] | None:
        """Return the values in a container; None if it contains anything else, or too many."""
        tensors = list(islice(tensors_in(held), MOST_PICKED_TENSORS + 1))
        is_recorded = len(tensors) <= MOST_PICKED_TENSORS and holds_nothing_but_tensors(held)
        is_recorded = is_recorded and all(id(t) in self._current for t in tensors)
        return tuple(self._refresh(id(t)) for t in tensors) if is_recorded else None

    def _write(self, tensor: Tensor, value: Value) -> None:
        home = self._homes[id(tensor)]
        self._written.update(filter(None, [self._named.get(storage_of(tensor))]))
        home.storage.version += 1
        home.version = home.storage.version
        home.storage.writes.append((home.version, id(tensor), value))
        self._current[id(tensor)] = value

    def _refresh(self, key: int) -> Value:
        home, value = self._homes[key], self._current[key]
        if home.version == home.storage.version:
            return value
        if home.node is None or home.parent is None:
            for version, writer, written in list(home.storage.writes):
                if version > home.version:
                    value = written if writer == key else self._write_through(value, written, writer)
        else:
            value = self._replay(home.node, home.position, self._refresh(home.parent))
        home.version = home.storage.version
        self._current[key] = value
        return value

    def _write_through(self, base: Value, written: Value, writer: int) -> Value:
        chain: list[tuple[Node, int]] = []
        home = self._homes[writer]
        while home.node is not None and home.parent is not None:
            chain.insert(0, (home.node, home.position))
            home = self._homes[home.parent]
        return self._emit_write(base, written, tuple(chain))

    def _emit_write(self, base: Value, written: Value, chain: tuple[tuple[Node, int], ...]) -> Value:
        out = Value(len(self._values), base.shape, base.dtype, producer=len(self._nodes))
        self._values.append(out)
        args = {"self": base, "src": written, "chain": chain}
        self._emit(WRITE, None, args, {}, (base, written), (out,))
        return out

    def _copy(self, before: Value, result: Value, tensor: Tensor) -> None:
        """Write a result to an `out` argument, whose size has to stay that of the result, unless torch resized it."""
        fits = before.shape == result.shape
        self._write(tensor, self._emit_write(before, result, ()) if fits else result)

    def _replay(self, node: Node, position: int, parent: Value) -> Value:
        old = node.inputs[0]
        args = {k: map_values(v, {old.index: parent}) for k, v in node.args.items()}
        outputs = tuple(dataclasses.replace(v, index=len(self._values) + i) for i, v in enumerate(node.outputs))
        outputs = tuple(dataclasses.replace(v, producer=len(self._nodes), origin=None) for v in outputs)
        self._values += outputs
        again = self._emit(node.op, node.target, args, node.sizes, (parent, *node.inputs[1:]), outputs)
        if node.index in self._uncertain:
            self._uncertain[again.index] = self._uncertain[node.index]
        return outputs[position]

    def _exit(self, tensor: Tensor, how: str) -> None:
        value = self._read(tensor)
        if all(value is not output for output in self._outputs):
            maker = "" if value.producer is None else f" (output of {self._nodes[value.producer]!r})"
            self._exits[value.index] = how + maker
            self._outputs.append(value)

    def _parent(self, tensor: Tensor, arguments: Sequence[Tensor]) -> int | None:
        """Return the first argument of an op that a tensor is a view of; None for a tensor with new memory."""
        storage = storage_of(tensor)
        if storage not in self._storages:
            return None
        return next((id(t) for t in arguments if storage_of(t) == storage), None)

"""The attributes that the code of a model writes to once the model is built, whether or not that code runs.

An attribute that a method assigns (``self.step += 1``), fills (``self.queue[i] = x``, ``self.scale.copy_(s)``) or
extends (``self.cache.append(x)``) differs in the next call. Code that builds, converts or loads a model does not count.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from engine.program.stored import modules_of
from engine.source.absent import assigned_where_none
from engine.source.computed_names import SETTERS, names_set_by_functions
from engine.source.decorated import functions_behind, is_of_torch
from engine.source.setup_code import called_by_constructors_only, classes_inside, functions_of, is_setup, run_by_forward
from engine.source.static_attributes import table_of

__all__ = [
    "EVERYTHING",
    "assigned_anywhere",
    "assigned_attributes",
    "assigned_where_none_by_class",
    "written_anywhere",
    "written_attributes",
    "written_by_modules",
]

_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL")
EVERYTHING = "*"
"""Stands for all buffers, if code iterates over ``buffers()`` and writes to them."""

_FILLS = frozenset(
    ["add", "append", "appendleft", "clear", "difference_update", "discard", "extend", "extendleft", "insert"]
    + ["intersection_update", "move_to_end", "pop", "popleft", "popitem", "put", "remove", "reverse", "rotate"]
    + ["setdefault", "sort", "symmetric_difference_update", "update", "__delitem__", "__setitem__"]
)
_FILLING_FUNCTIONS = frozenset(
    ["copyto", "delitem", "heapify", "heappop", "heappush", "heappushpop", "heapreplace", "insort", "insort_left"]
    + ["insort_right", "setitem", "shuffle"]
)
"""Functions of Python and NumPy that change their argument in place: ``random.shuffle(self.order)``."""

_DISPLAYS = ("BUILD_LIST", "BUILD_MAP", "BUILD_SET", "BUILD_CONST_KEY_MAP", "LIST_EXTEND", "SET_UPDATE", "DICT_UPDATE")
"""Beginnings of the names of the instructions with which the display of a container ends."""

_NEW = frozenset(["OrderedDict", "defaultdict", "deque", "dict", "list", "set", "sorted"])
"""Functions that return a new container, whatever they are called with."""

ANY_OF_SELF = "self.*"
"""Stands for all attributes of an object, if a method sets one under a computed name."""

_TABLES = frozenset(["__dict__", "vars"])

_ALL_BUFFERS = frozenset(["buffers", "named_buffers", "state_dict"])


class _Names(NamedTuple):
    """Names of attributes that code writes to.

    Attributes:
        own: attributes of ``self`` that are assigned.
        others: attributes of other objects that are assigned.
        filled: attributes of any object whose contents may change.
        own_fills, other_fills: the assigned ones that may no longer be None afterwards if they are None.
    """

    own: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    filled: frozenset[str] = frozenset()
    own_fills: frozenset[str] = frozenset()
    other_fills: frozenset[str] = frozenset()


def written_attributes(model: nn.Module) -> dict[type, frozenset[str]]:
    """Return, for each class of a model's modules, the names of the attributes that some code writes to.

    The code of these classes counts, and all other code in the same Python modules, such as a callback.

    Example:
        >>> class Gate(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.alpha, self.scale = 0.0, 2.0
        ...     def anneal(self):
        ...         self.alpha += 0.1
        >>> written = written_attributes(nn.Sequential(Gate()))[Gate]
        >>> "alpha" in written, "scale" in written
        (True, False)
    """
    return {kind: names.own | names.others | names.filled for kind, names in _names_by_class(model).items()}


def assigned_attributes(model: nn.Module) -> dict[type, frozenset[str]]:
    """Return, for each class of a model's modules, the names of the attributes that some code assigns.

    The contents of a container or a tensor may change without an assignment; a number or a string may not.

    Example:
        >>> class Queue(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.items, self.steps = [], 0
        ...     def add(self, x):
        ...         self.items.append(x)
        ...         self.steps = self.steps + 1
        >>> assigned = assigned_attributes(nn.Sequential(Queue()))[Queue]
        >>> "items" in assigned, "steps" in assigned
        (False, True)
    """
    return {kind: names.own | names.others for kind, names in _names_by_class(model).items()}


def assigned_where_none_by_class(model: nn.Module) -> dict[type, frozenset[str]]:
    """Return what `assigned_attributes` returns, without the attributes that stay None if they are None.

    Example:
        >>> class Net(nn.Module):
        ...     def drop_heads(self, width):
        ...         self.width, self.head = width, None
        ...         self.second = None
        ...         if self.third is not None:
        ...             self.third = nn.Linear(width, 2)
        >>> names = {"width", "head", "second", "third"}
        >>> sorted(names & assigned_attributes(Net())[Net]), sorted(names & assigned_where_none_by_class(Net())[Net])
        (['head', 'second', 'third', 'width'], ['head', 'width'])
    """
    return {kind: names.own_fills | names.other_fills for kind, names in _names_by_class(model).items()}


def written_anywhere(model: nn.Module, *others: type) -> frozenset[str]:
    """Return the names of the attributes, of any object, that some code writes to.

    Args:
        model: the code of its modules' classes counts, and all code in the same Python modules.
        others: further classes whose code counts.

    Example:
        >>> class Switch:
        ...     def flip(self):
        ...         self.on = True
        >>> "on" in written_anywhere(nn.Linear(1, 1), Switch), "on" in written_anywhere(nn.Linear(1, 1))
        (True, False)
    """
    names = _anywhere(model, others)
    return names.own | names.others | names.filled


def assigned_anywhere(model: nn.Module, *others: type | ModuleType) -> frozenset[str]:
    """Return the names of the attributes, of any object, that some code assigns.

    Args:
        model: as for `written_anywhere`.
        others: further classes and Python modules whose code counts.
    """
    names = _anywhere(model, others)
    return names.own | names.others


def _anywhere(model: nn.Module, others: Iterable[type | ModuleType]) -> _Names:
    spaces_beside = {other.__name__ for other in others if isinstance(other, ModuleType)}
    kinds = [*_module_classes(model), *(other for other in others if isinstance(other, type))]
    classes = {base for kind in kinds for base in kind.__mro__ if not is_of_torch(base)}
    setup = _setup_of(classes)
    spaces = [_names_in_python_module(name, setup) for name in spaces_beside | {cls.__module__ for cls in classes}]
    return _union([*spaces, *(_names_in_class(cls, setup) for cls in classes)])


def _module_classes(model: nn.Module) -> set[type]:
    return {type(module) for _, module in modules_of(model)}


def _names_by_class(model: nn.Module) -> dict[type, _Names]:
    kinds = _module_classes(model)
    classes = {base for kind in kinds for base in kind.__mro__ if not is_of_torch(base)}
    setup = _setup_of(classes)
    spaces = [_names_in_python_module(name, setup) for name in {cls.__module__ for cls in classes}]
    anywhere = [names._replace(own=frozenset(), own_fills=frozenset()) for names in spaces]
    unions = {
        kind: _union([*anywhere, *(_names_in_class(b, setup) for b in kind.__mro__ if not is_of_torch(b))])
        for kind in kinds
    }
    for _, module in modules_of(model):
        names = unions[type(module)]
        if ANY_OF_SELF in names.own and not names.own >= vars(module).keys():
            every = names.own | vars(module).keys()
            unions[type(module)] = names._replace(own=every, own_fills=every)
    return unions


def written_by_modules(model: nn.Module) -> frozenset[str]:
    """Return the names of the attributes, of any object, that the classes of a model's modules write to.

    Example:
        >>> class Adapts(nn.Module):
        ...     def forward(self, x):
        ...         self.norm.running_mean = x.mean((0, 2, 3))
        >>> sorted(written_by_modules(Adapts()))
        ['running_mean']
    """
    classes = {base for _, module in modules_of(model) for base in type(module).__mro__ if not is_of_torch(base)}
    names = _union(_names_in_class(cls, _setup_of(classes)) for cls in classes)
    return names.own | names.others | names.filled


@functools.cache
def _names_in_class(cls: type, setup: _Setup) -> _Names:
    """Return the names of the attributes that methods of a class write to, and those of classes inside."""
    inner = (_names_in_methods(other, setup) for other in classes_inside(cls))
    of_others = (names._replace(own=frozenset(), own_fills=frozenset()) for names in inner)
    return _union([_names_in_methods(cls, setup), *of_others])


def _names_in_methods(cls: type, setup: _Setup) -> _Names:
    methods = [(name, code) for name, code in functions_of(cls) if not setup.includes(name)]
    static = {name for name, _ in methods if isinstance(vars(cls)[name], staticmethod)}
    return _union([_names(code, None if name in static else _first_argument(code)) for name, code in methods])


def _first_argument(code: CodeType) -> str | None:
    return code.co_varnames[0] if code.co_argcount else None


@functools.cache
def _names_in_python_module(name: str, setup: _Setup) -> _Names:
    """Return the names of the attributes that the code of a Python module writes to."""
    parts: list[_Names] = []
    for key, item in list(table_of(sys.modules.get(name)).items()):
        if isinstance(item, type):
            parts += [_names_in_class(item, setup)] if item.__module__ == name else []
        elif not setup.includes(key):
            parts += [_names(f.__code__, None) for f in functions_behind(item, name) if f.__module__ == name]
    return _union(parts)


class _Setup(NamedTuple):
    """Names of functions that build a model.

    Attributes:
        beside: private methods that only constructors call.
        run: functions that a forward may run, whatever their names.
    """

    beside: frozenset[str]
    run: frozenset[str]

    def includes(self, name: str) -> bool:
        """Whether a function builds a model, and no forward runs it."""
        return (is_setup(name) or name in self.beside) and name not in self.run


def _setup_of(classes: Iterable[type]) -> _Setup:
    kinds = frozenset(classes)
    return _Setup(called_by_constructors_only(frozenset(cls.__module__ for cls in kinds)), run_by_forward(kinds))


def _union(parts: Iterable[_Names]) -> _Names:
    return _Names(*(frozenset[str]().union(*column) for column in zip(*parts, strict=True)))


@functools.cache
def _names(code: CodeType, self_name: str | None) -> _Names:
    """Return the names of the attributes that a function, its inner functions and methods of its variables write to."""
    constants = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    if code.co_flags & inspect.CO_OPTIMIZED:
        inner = [_names(c, self_name if self_name in c.co_freevars else None) for c in constants]
    else:  # the body of a class
        inner = [_names(c, _first_argument(c)) for c in constants if not is_setup(c.co_name)]
    own = _names_in_code(code, self_name)
    fills = assigned_where_none(code) if own.own or own.others else None
    if fills is not None:
        stored = {i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_ATTR", "DELETE_ATTR")}
        own = own._replace(own_fills=own.own & fills, other_fills=own.others - (stored - fills))
    return _union([own, *inner])


class _Step(NamedTuple):
    """An instruction.

    Attributes:
        kind: name of the opcode.
        about: a name, an operator, or names of arguments.
        effect: change of the height of the stack.
    """

    kind: str
    about: Any
    effect: int


def _names_in_code(code: CodeType, self_name: str | None) -> _Names:
    own, others, held = set[str](), set[str](), set[str]()
    first = _first_argument(code)
    lines = list(_instructions_by_line(code))
    targets = [[step for target in _written_expressions(line) for step in target] for line in lines]
    filled = {step.about for target in targets for step in target if step.kind == "LOAD_FAST"}
    filled |= {step.about for line in lines if _updates_in_place(line) for step in line if step.kind == "STORE_FAST"}
    filled -= {first}
    inside = {t.about for target in targets if len(target) > 1 for t in target if t.kind == "LOAD_FAST"}
    for line, target in zip(lines, targets, strict=True):
        for place, (kind, name, _) in enumerate(line):
            if kind in ("STORE_ATTR", "DELETE_ATTR") and name not in ("data", "grad"):
                holder = line[place - 1]
                is_own = holder.kind in ("LOAD_FAST", "LOAD_DEREF") and holder.about == self_name is not None
                (own if is_own else others).add(name)
            if kind == "STORE_GLOBAL":
                others.add(name)
        aliases = any(
            kind == "STORE_FAST" and name in filled and (name in inside or not _is_new_container(line, place))
            for place, (kind, name, _) in enumerate(line)
        )
        loaded = _attributes_loaded([*target, *(line if aliases else ())])
        held |= loaded
        if loaded & _ALL_BUFFERS:
            others.add(EVERYTHING)
        if loaded & _TABLES:
            own.add(ANY_OF_SELF)
        if any(step.about in SETTERS for step in line if isinstance(step.about, str)):
            others |= {name for kind, name, _ in line if kind == "LOAD_CONST" and isinstance(name, str)}
        if not _TABLES.isdisjoint(step.about for step in target if isinstance(step.about, str)):
            own.add(ANY_OF_SELF)
    if first is not None and not SETTERS.isdisjoint(code.co_names):
        names = names_set_by_functions(code, first) or ({ANY_OF_SELF}, ())
        own, others = own.union(names[0]), others.union(names[1])
    return _Names(frozenset(own), frozenset(others), frozenset(held), frozenset(own), frozenset(others))


def _is_new_container(line: list[_Step], end: int) -> bool:
    """Whether the instructions before a position leave a new container: filling it changes nothing that it holds."""
    if any("JUMP" in step.kind for step in line):  # `self.cache or {}` is one, or the other
        return False
    start = _expression_before(line, end)[0]
    names = [step.about for step in line[start:end] if step.kind in ("LOAD_GLOBAL", "LOAD_NAME")]
    last = line[end - 1].kind if end else ""
    return last.startswith(_DISPLAYS) or (last.startswith("CALL") and not _NEW.isdisjoint(names[:1]))


def _attributes_loaded(steps: Iterable[_Step]) -> set[str]:
    return {name for kind, name, _ in steps if kind in _LOADS and not _is_write(name)}


def _instructions_by_line(code: CodeType) -> Iterator[list[_Step]]:
    """Yield the instructions of each line."""
    line: list[_Step] = []
    for instruction in dis.get_instructions(code):
        if instruction.starts_line is not None and line:
            yield line
            line = []
        arg = instruction.arg if instruction.opcode >= dis.HAVE_ARGUMENT else None
        effect = dis.stack_effect(instruction.opcode, arg, jump=False)
        line.append(_Step(instruction.opname, _operand(instruction, code), effect))
    yield line


def _operand(instruction: dis.Instruction, code: CodeType) -> Any:
    if instruction.opname == "KW_NAMES":
        return code.co_consts[instruction.arg or 0]
    return instruction.argrepr if instruction.opname == "BINARY_OP" else instruction.argval


def _written_expressions(line: list[_Step]) -> Iterator[list[_Step]]:
    """Yield the instructions of the expressions that a line writes into: ``self.queue`` in ``self.queue[i] = x``."""
    for place, (kind, name, _) in enumerate(line):
        if kind in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            yield line[slice(*_expression_before(line, _expression_before(line, place)[0]))]
        elif name == "data" if kind in ("STORE_ATTR", "DELETE_ATTR") else kind in _LOADS and _is_write(name):
            yield line[slice(*_expression_before(line, place))]
        elif kind == "KW_NAMES" and "out" in name:
            yield line
        elif kind in _LOADS and name in _FILLING_FUNCTIONS:
            yield line[place + 1 :]  # what it is given


def _expression_before(line: list[_Step], end: int) -> tuple[int, int]:
    """Return start and end of the instructions that compute the top of the stack at a position."""
    depth, start = 0, end
    while depth < 1 and start > 0:
        start -= 1
        depth += line[start].effect
    return start, end


def _updates_in_place(line: list[_Step]) -> bool:
    """Whether a line updates a variable in place (``x += y``)."""
    return any(step.kind == "BINARY_OP" and step.about.endswith("=") for step in line)


def _is_write(name: Any) -> bool:
    in_place = isinstance(name, str) and name.endswith("_") and not name.endswith("__") and hasattr(Tensor, name)
    return name in _FILLS or (in_place and name != "requires_grad_")

"""What code that no recording reached could touch: it stays whole, or is named.

A branch that the example does not take, and what follows an early return, may read whatever its variables hold there.
What it hands to a module that never ran, gives back, puts in place of something else, or gives a size that stands
in the code counts as used; what it only scales or shifts varies. Of what else it does, the notes name the line.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from engine.program.expressions import Guard
from engine.program.graph import Node, Value
from engine.program.places import shown_place
from engine.program.stored import modules_of
from engine.program.trees import tensors_in
from engine.recording.chosen import through_chosen
from engine.recording.missed import Missed, code_of, methods_of
from engine.source.branches import Part
from engine.source.deciding import attribute_code, is_fixed_property
from engine.source.entrywise import Effect, Functions
from engine.source.omitted import ends_of_numbers
from engine.source.passing import passed_arguments
from engine.source.stepping import Course
from engine.source.writers import assigned_anywhere, assigned_attributes, written_anywhere, written_attributes

__all__ = ["Reach", "Unreached", "arguments_of", "files_of"]

_SETTERS = ("get_", "set_", "reset", "init", "load", "save", "freeze", "unfreeze", "enable", "disable", "from_", "to_")
_MOST_NAMES = 6
_ADVICE = "Give an example, or an entry, that runs it."


@dataclass
class Reach:
    """What parts that did not run could touch.

    Attributes:
        whole: values of which all is used, with the reason.
        varying: values about whose numbers nothing is known; whether a zero in them stays one.
        notes: for the reader.
    """

    whole: dict[int, tuple[Value, str]] = field(default_factory=dict)
    varying: dict[int, tuple[Value, bool]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Unreached:
    """Looks at what the recordings of a model did not reach.

    Args:
        modules: its modules by name.
        courses: what ran.
        nodes, values, guards: what was recorded.
        stored: values of the parameters and buffers that were read, by every name.
        parameters: names of all parameters.
        arguments: names of the arguments of forward.
        options: those that the example gives no tensor.
        declared: tells of an attribute's name whether the user says that it stays as it is.
        functions: of torch, of which it is known what they do.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        courses: Mapping[tuple[CodeType, str], Course],
        nodes: Sequence[Node],
        values: Sequence[Value],
        guards: Iterable[Guard],
        stored: Mapping[str, Value],
        parameters: Collection[str],
        arguments: Collection[str],
        options: Collection[str],
        declared: Callable[[str], bool],
        functions: Functions,
    ) -> None:
        self._declared, self._functions = declared, functions
        self._modules, self._courses, self._arguments = modules, courses, set(arguments)
        self._options = {name for name in options if not declared(name)}
        self._passed = passed_arguments(modules[""], self._options)
        self._sized = {guard.place for guard in guards}
        self._stored, self._values, self._nodes = stored, values, nodes
        idle = {name.rpartition(".")[0] for name in parameters if name not in stored}
        self._idle_owners = sorted(idle)
        self._idle = {n[:end] for n in idle for end in (*(i for i, c in enumerate(n) if c == "."), len(n))}
        self._own = files_of(modules[""])
        self._written, self._assigned = written_attributes(modules[""]), assigned_attributes(modules[""])
        self._one_of_each = list({type(module): module for module in modules.values()}.values())
        self._anywhere: dict[tuple[bool, frozenset[type]], frozenset[str]] = {}
        self._fixed: dict[tuple[Part, str, bool], bool] = {}
        self._computing: set[FunctionType] = set()  # properties that are looked into, which may read each other
        self._contracted: dict[int, int | None] = {}
        self._borders: dict[str, tuple[list[Value], list[Value]]] = {}
        self._others: dict[str, dict[int, Value]] = {}
        self._frozen: dict[str, None] = {}
        self._named: dict[str, None] = {}

    def reach(self) -> Reach:
        """Return what could be touched."""
        reach = Reach()
        names = {id(module): name for name, module in self._modules.items()}
        for course in self._courses.values():
            for part in course.function.missed(course.ran):
                if not part.is_silent:
                    self._follow(Missed(part, course, self._modules, names, self._values, self._functions), reach)
        self._beside(reach)
        self._in_place_of_arguments(reach)
        self._through_any_function(reach)
        if self._idle_owners:
            reach.notes.append(f"Modules that did not run, and stay whole: {_listed(self._idle_owners)}.")
        if methods := sorted(dict.fromkeys(_methods(self._modules.values()))):
            reach.notes.append(
                f"Methods that were not recorded on their own, and read layers: {_listed(methods)}. Record those that "
                "are called from outside as `entries`."
            )
        if self._frozen:
            places = _listed(map(shown_place, self._frozen))
            reach.notes.append(f"Code that did not run, and whose reads stay whole: {places}. {_ADVICE}")
        if named := [shown_place(place) for place in self._named if place not in self._frozen]:
            reach.notes.append(f"Code that did not run, and was not looked at: {_listed(named)}. {_ADVICE}")
        return reach

    def _beside(self, reach: Reach) -> None:
        """Note what modules of a list read and put out, of which others did not run: these would read the same."""
        for name, container in self._modules.items():
            if not isinstance(container, (nn.ModuleList, nn.ModuleDict)):
                continue
            items = {f"{name}.{key}" if name else key for key in container._modules}
            inside = {item: [n for n in self._nodes if _is_in(n.module, item)] for item in items & self._idle}
            idle = sorted(item for item, nodes in inside.items() if not nodes)
            for node in self._nodes if idle else ():
                if any(_is_in(node.module, item) for item in items):
                    reason = f"could be read by {idle[0]!r}, which did not run on the example, or put out in its place"
                    whole = (v for v in (*node.inputs, *node.outputs) if not v.stored)
                    reach.whole.update((v.index, (v, reason)) for v in whole if v.index not in reach.whole)

    def _in_place_of_arguments(self, reach: Reach) -> None:
        """Note constants that stand in for arguments which the example leaves out: other calls pass them."""
        for course in self._courses.values():
            names = self._arguments | self._passed.get(course.function.code, frozenset())
            for name, kept in course.absent.items():
                values = [v for kind, held in kept if kind == "values" for v in held] if name in names else []
                for value in filter(self._is_made_of_nothing, values):
                    reason = f"takes the place of the argument {name!r}, which the example leaves out"
                    reach.whole.setdefault(value.index, (value, reason))
                    reach.varying[value.index] = value, False
            ends = ends_of_numbers(course.function.tree, frozenset(course.missing & names))
            for node in (n for n in self._nodes if n.site is not None) if ends else ():
                if node.site.code is course.function.code and node.site.end in ends:
                    reason = f"is computed with an argument, or without it as in the example, at {node.site}"
                    reach.whole.update((v.index, (v, reason)) for v in node.outputs if v.index not in reach.whole)
                    reach.varying.update((v.index, (v, False)) for v in node.outputs)

    def _through_any_function(self, reach: Reach) -> None:
        """Note what goes through functions that the caller picks by a name, or passes: they may do anything."""
        options: dict[CodeType | None, Collection[str]] = {code: names for code, names in self._passed.items()}  # noqa: C416
        options[code_of(type(self._modules[""]).forward)] = self._options
        passing = through_chosen(self._nodes, self._courses.values(), self._one_of_each, options, self._settled)
        for node, reason in passing:
            whole = (v for v in (*node.inputs, *node.outputs) if not v.stored)
            reach.whole.update((v.index, (v, reason)) for v in whole if v.index not in reach.whole)
            reach.varying.update((v.index, (v, False)) for v in node.outputs)

    def _is_made_of_nothing(self, value: Value) -> bool:
        """Whether neither inputs nor parameters decide what numbers a value holds."""
        if value.index >= len(self._values) or self._values[value.index] is not value or value.stored:
            return False
        if value.producer is None:
            return value.data is not None
        node = self._nodes[value.producer]
        lends = node.op in self._functions.filling  # its first input, if any, lends a shape
        return all(map(self._is_made_of_nothing, node.inputs[lends:]))

    def _follow(self, missed: Missed, reach: Reach) -> None:
        tensors = missed.tensors(self._stored)
        if not tensors:
            return
        whole, how = self._taken(missed, tensors), missed.effects()
        if whole is None:
            return
        self._touch(self._others.pop(missed.where, {}).values(), Effect.USES, missed.where, reach)
        if not whole.isdisjoint(missed.replacing()):
            self._replaced(missed, reach)
        for name, values in tensors.items():
            effect = Effect.USES if name in whole else how.get(name, Effect.KEEPS)
            if effect is Effect.CHANGES and missed.called():
                effect = Effect.KEEPS_ZERO  # what modules that ran put out is masked as well
            if name in whole or effect in (Effect.KEEPS_ZERO, Effect.CHANGES):
                self._frozen[missed.where] = None
                self._touch(values, effect, missed.where, reach)
            elif effect is Effect.USES:
                self._named[missed.where] = None

    def _replaced(self, missed: Missed, reach: Reach) -> None:
        """Note what else stands where variables would that code puts there."""
        for name in missed.part.targets:
            self._touch(missed.values(name, self._stored), Effect.USES, missed.where, reach)
        readers = missed.users()
        for node in self._nodes if readers else ():
            if node.module in readers:
                self._touch((v for v in node.inputs if not v.stored), Effect.USES, missed.where, reach)

    def _exchanged(self, missed: Missed, tensors: Mapping[str, list[Value]]) -> set[str]:
        """Return the variables that modules get which got others where they ran."""
        result: set[str] = set()
        for module, names in missed.calls():
            enter, leave = self._border(module)
            read = {v.index for v in enter}
            strange = {n for n in names if any(v.index not in read for v in tensors.get(n, ()))}
            if strange:
                result |= strange
                self._others.setdefault(missed.where, {}).update((v.index, v) for v in (*enter, *leave))
        return result

    def _border(self, module: str) -> tuple[list[Value], list[Value]]:
        """Return what a module reads and puts out."""
        if module not in self._borders:
            inside = [n for n in self._nodes if _is_in(n.module, module)]
            results = {v.index: v for n in inside for v in n.outputs}
            indices = {n.index for n in inside}
            leave = {v.index for n in self._nodes if n.index not in indices for v in n.inputs} & results.keys()
            enter = {v.index: v for n in inside for v in n.inputs if v.index not in results and not v.stored}
            self._borders[module] = list(enter.values()), [results[index] for index in leave]
        return self._borders[module]

    def _taken(self, missed: Missed, tensors: Mapping[str, list[Value]]) -> frozenset[str] | None:
        """Return the variables of which all counts as used; None where the code cannot run, or others show it."""
        if self._is_fixed(missed, declared=True):
            return None
        if not missed.called().isdisjoint(self._idle):
            return frozenset(tensors)
        if missed.decided_by(self._sized) or missed.impossible():
            return None
        if self._is_fixed(missed):
            return frozenset(missed.sized()) or None
        used = {name for name, effect in missed.effects().items() if effect is Effect.USES}
        if missed.first is None and missed.fixed((), functools.partial(self._settled, self._modules[missed.owner])):
            used -= missed.selected(self._channels)
        return frozenset(
            missed.sized() | missed.replacing() | (used - missed.passed()) | self._exchanged(missed, tensors)
        )

    @functools.cached_property
    def _readers(self) -> Mapping[int, list[Node]]:
        readers: dict[int, list[Node]] = defaultdict(list)
        for node in self._nodes:
            for index in {value.index for value in node.inputs}:
                readers[index].append(node)
        return readers

    def _channels(self, value: Value) -> int | None:
        """Return the dimension of a value along which all that reads it contracts; None where that is not known."""
        if value.index not in self._contracted:
            dims: set[int | None] = set()
            for node in self._readers.get(value.index, ()):
                contracted = self._functions.contracted(node)
                same = contracted is None and all(output.ndim == value.ndim for output in node.outputs)
                further = [self._channels(output) if same else None for output in node.outputs]
                sizes = {o.shape[d] for o, d in zip(node.outputs, further, strict=True) if d is not None}
                own = {contracted[1]} if contracted is not None and contracted[0] is value else set(further)
                dims |= own if all(d is not None and sizes <= {value.shape[d]} for d in own) else {None}
            dim = dims.pop() if len(dims) == 1 else None
            alone = dim is not None and value.shape.count(value.shape[dim]) == 1
            self._contracted[value.index] = dim if alone else None
        return self._contracted[value.index]

    def _touch(self, values: Iterable[Value], effect: Effect, where: str, reach: Reach) -> None:
        for value in values:
            if effect is Effect.USES:
                reason = f"could be read by the code at {shown_place(where)}, which did not run"
                reach.whole.setdefault(value.index, (value, reason))
            else:
                zeros_stay = effect is Effect.KEEPS_ZERO and reach.varying.get(value.index, (value, True))[1]
                reach.varying[value.index] = value, zeros_stay

    def _is_fixed(self, missed: Missed, declared: bool = False) -> bool:
        """Whether the code that is there, or the user by `constants`, decides that it does not run."""
        key = missed.part, missed.owner, declared
        if key not in self._fixed:
            module = self._modules[missed.owner]
            forward = missed.owner == "" and missed.code is code_of(type(self._modules[""]).forward)
            own = missed.arguments()
            open_names = self._arguments | self._passed.get(missed.code, frozenset())
            prefix = f"{missed.owner}." if missed.owner else ""
            names = own if forward or declared else own & open_names
            names = {name for name in names - {missed.first} if not self._declared(prefix + name)}
            elsewhere = missed.code.co_filename not in self._own and not declared
            settled = (lambda p: self._declared(prefix + p)) if declared else functools.partial(self._settled, module)
            kept = settled if declared else functools.partial(self._settled, module, content=False)
            self._fixed[key] = elsewhere or missed.fixed(names, settled, kept)
        return self._fixed[key]

    def _settled(self, module: nn.Module, path: str, content: bool = True) -> bool:
        """Whether no code gives an attribute another value, or, if that counts, another content."""
        *way, name = path.split(".")
        owners: list[Any] = [module]
        for key in way:
            owners.append(getattr(owners[-1], key, _UNKNOWN))
        holders = self._one_of_each if owners[-1] is _UNKNOWN else [owners[-1]]
        if any(_is_looked_up(holder, name) for holder in holders):
            return False
        computed = [c for c in (attribute_code(type(holder), name) for holder in holders) if c is not None]
        if computed:
            return self._computes_the_same(module, ".".join([*way, ""]), computed)
        value = _UNKNOWN if owners[-1] is _UNKNOWN else getattr(owners[-1], name, None)
        plain = not content or isinstance(value, (bool, int, float, str, type(None), nn.Module))
        if not way:
            return name not in (self._assigned if plain else self._written).get(type(module), frozenset())
        return name not in self._somewhere(plain, *map(type, owners))

    def _computes_the_same(self, module: nn.Module, prefix: str, functions: Sequence[FunctionType]) -> bool:
        """Whether properties of a module, or of what it holds, come out the same at all times."""
        if not self._computing.isdisjoint(functions):
            return False
        self._computing.update(functions)
        try:
            return all(is_fixed_property(f, lambda path: self._settled(module, prefix + path)) for f in functions)
        finally:
            self._computing.difference_update(functions)

    def _somewhere(self, assigned: bool, *owners: type) -> frozenset[str]:
        """Return the attributes that some code gives another value, or another content as well, of any object."""
        key = assigned, frozenset(owners)
        if key not in self._anywhere:
            names_of = assigned_anywhere if assigned else written_anywhere
            self._anywhere[key] = names_of(self._modules[""], *owners)
        return self._anywhere[key]


_UNKNOWN = object()


def _is_looked_up(holder: Any, name: str) -> bool:
    """Whether an attribute comes out of a ``__getattr__`` of the user's, not out of where attributes are stored."""
    function = inspect.getattr_static(type(holder), "__getattr__", None)
    if function in (None, nn.Module.__getattr__) or inspect.getattr_static(holder, name, _UNKNOWN) is not _UNKNOWN:
        return False
    tables = (
        [vars(holder).get(key, {}) for key in ("_modules", "_parameters", "_buffers")]
        if hasattr(holder, "__dict__")
        else []
    )
    return not any(name in table for table in tables) and hasattr(holder, name)


def _is_in(module: str, outer: str) -> bool:
    return module == outer or module.startswith(f"{outer}.")


def _listed(items: Iterable[str]) -> str:
    names = list(items)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _methods(modules: Iterable[nn.Module]) -> Iterator[str]:
    """Yield the public methods beside forward that read a layer or a parameter of their module."""
    for module in modules:
        names = {name for name, held in (*module._modules.items(), *module._parameters.items()) if held is not None}
        reading = dict(methods_of(type(module))) if names else {}  # type: ignore[arg-type]
        while more := {method for method, own in reading.items() if method not in names and own & names}:
            yield from (f"{type(module).__name__}.{method}" for method in more if not method.startswith(_PRIVATE))
            names |= more


_PRIVATE = ("_", *_SETTERS)


def files_of(model: nn.Module) -> set[str]:
    """Return the files of the classes of a model's modules."""
    names = {base.__module__ for kind in {type(m) for _, m in modules_of(model)} for base in kind.__mro__}
    return {file for name in names if (file := getattr(sys.modules.get(name), "__file__", None)) is not None}


def arguments_of(model: nn.Module, args: Any, kwargs: Any) -> tuple[set[str], set[str]]:
    """Return the names of the arguments of a model's forward, and of those that an example gives no tensor."""
    try:
        signature = inspect.signature(model.forward)
        bound = signature.bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return set(), set()
    names = set(signature.parameters)
    return names, names - {name for name, value in bound.items() if any(True for _ in tensors_in(value))}

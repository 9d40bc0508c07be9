"""Numbers and flags in attributes that code sets later, recorded with other values as well.

A temperature, a coefficient, a counter or a flag that a method, or a function beside the class, writes to may differ in
later calls. Arguments of ops that differ between values vary, and ops that run only with another value become part of
the program.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from types import CodeType
from typing import Any, NamedTuple

from torch import nn

from engine.alternatives.attribute_choices import is_list_of_numbers, other_lists, record_in_steps
from engine.limits import MOST_ATTRIBUTE_CHOICES, MOST_SETTINGS, MOST_WORDS
from engine.numbers.integers import integers
from engine.numbers.sizes import booleans_in
from engine.program.expressions import Apply, AttributeOf, Expr, Guard, evaluate, leaves
from engine.program.graph import Node, Value
from engine.source.model_code import methods_of, user_classes, words_in
from engine.source.setup_code import functions_of, is_setup

__all__ = [
    "Attribute",
    "Setting",
    "Settings",
    "choices",
    "other_choices",
    "other_reals",
    "run_signature",
    "switches_of",
    "turning_points",
]


_READ_FOR_GRADIENTS = {nn.Embedding.forward.__code__: frozenset({"padding_idx", "scale_grad_by_freq", "sparse"})}
"""Functions of torch that read an attribute which their op only uses for the gradient."""


class Attribute(NamedTuple):
    """An attribute that code writes to.

    Attributes:
        owner: name of its module in the model.
        module: the module.
        name: name of the attribute.
    """

    owner: str
    module: nn.Module
    name: str

    @property
    def value(self) -> Any:
        """The current value."""
        return vars(self.module).get(self.name)

    @contextmanager
    def holding(self, value: Any) -> Iterator[None]:
        """Run the body with another value."""
        table = vars(self.module)
        is_set, before = self.name in table, table.get(self.name)
        table[self.name] = value
        try:
            yield
        finally:
            if is_set:
                table[self.name] = before
            else:
                del table[self.name]

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}" if self.owner else self.name


Setting = Sequence[tuple[Attribute, Any]]
"""Attributes with other values."""


class _ReadObserver:
    """A descriptor that replaces an attribute in a class, and notes which modules it is read from."""

    def __init__(self, name: str, reads: set[tuple[int, str]]) -> None:
        self._name, self._reads = name, reads

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None:
            return self
        if self._name not in _READ_FOR_GRADIENTS.get(sys._getframe(1).f_code, ()):
            self._reads.add((id(module), self._name))
        try:
            return vars(module)[self._name]
        except KeyError:
            raise AttributeError(self._name) from None

    def __set__(self, module: Any, value: Any) -> None:
        vars(module)[self._name] = value

    def __delete__(self, module: Any) -> None:
        vars(module).pop(self._name)


class Settings:
    """The attributes that code writes to, and other values for them.

    Args:
        attributes: attributes of a model that may be set later.
        modules: modules of the model by name.

    Attributes:
        missing: attributes that could not be recorded with other values, by module and name.

    Example:
        >>> gate = nn.Module()
        >>> gate.alpha, gate.unused = 0.0, 0.0
        >>> settings = Settings([Attribute("gate", gate, name) for name in ("alpha", "unused")], {"gate": gate})
        >>> with settings.watching():
        ...     gate.alpha
        0.0
        >>> [[(str(attribute), value) for attribute, value in setting] for setting in settings.others([])]
        [[('gate.alpha', 0.25)], [('gate.alpha', 1.0)]]
    """

    def __init__(self, attributes: Sequence[Attribute], modules: Mapping[str, nn.Module]) -> None:
        self._attributes = attributes
        own = modules if attributes else {}
        self._numbers = {(name, key): n for name, module in own.items() for key, n in integers(module).items()}
        self._read: list[Attribute] = []
        self.missing: set[tuple[str, str]] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note which attributes the body reads; attributes that the class defines count as read."""
        reads: set[tuple[int, str]] = set()
        pairs = {(type(a.module), a.name) for a in self._attributes}
        own = {(kind, name) for kind, name in pairs if any(name in vars(base) for base in kind.__mro__)}
        try:
            for kind, name in pairs - own:
                setattr(kind, name, _ReadObserver(name, reads))
            yield
        finally:
            for kind, name in pairs - own:
                delattr(kind, name)
            self._read = [
                a for a in self._attributes if (id(a.module), a.name) in reads or (type(a.module), a.name) in own
            ]

    @property
    def names(self) -> frozenset[str]:
        """Names of the attributes."""
        return frozenset(attribute.name for attribute in self._attributes)

    def named(self, names: Collection[str]) -> Settings:
        """Return the settings restricted to attributes with certain names, all of which count as read.

        Args:
            names: of the attributes.
        """
        chosen = Settings([], {})
        chosen._numbers = self._numbers
        chosen._read = [attribute for attribute in self._attributes if attribute.name in names]
        return chosen

    def fixed(self) -> list[Attribute]:
        """Return the attributes that are read, and for which no other value is known: None, and strings."""
        return [a for a in self._read if a.value is None or type(a.value) is str]

    def others(self, guards: Iterable[Guard]) -> list[Setting]:
        """Return the settings to record.

        Args:
            guards: comparisons of the run on the example, which show at which values a counter makes a difference.
        """
        real = [a for a in self._read if isinstance(a.value, float)]
        changed = [(a, other_reals(a.value)) for a in real]
        settings: list[Setting] = [
            [(a, others[place]) for a, others in changed if others[place] != a.value] for place in range(3)
        ]
        for group in self._by_name(bool):
            settings.append([(a, not a.value) for a in group])
        compared = [guard for guard in guards if guard.decides]
        for group in self._by_name(int):
            names = {(a.owner, a.name) for a in group}
            settings += [[(a, a.value + 1) for a in group], [(a, a.value - 1) for a in group if a.value > 0]]
            limits = {n for guard in compared for n in turning_points(guard, self._numbers, names)}
            limits |= {n for a in group for n in _layer_counts(a)}
            settings += [[(a, n) for a in group] for n in sorted(limits - {group[0].value + 1, group[0].value - 1})]
        for group in (*self._by_name(list), *self._by_name(tuple)):
            ways = itertools.zip_longest(*(other_lists(a.value) for a in group))
            settings += [[(a, way) for a, way in zip(group, one, strict=True) if way is not None] for one in ways]
        for group in (*self._by_name(str), *self._by_name(Enum)):
            choices = dict.fromkeys(choice for a in group for choice in _choices(a))
            settings += [[(a, choice) for a in group if a.value != choice] for choice in choices]
        return [setting for setting in settings if setting]

    def _by_name(self, kind: type) -> list[list[Attribute]]:
        groups: dict[tuple[type, str], list[Attribute]] = {}
        for attribute in self._read:
            own = type(attribute.value)
            if own is kind or (kind is Enum and issubclass(own, Enum)):
                groups.setdefault((type(attribute.module), attribute.name), []).append(attribute)
        return list(groups.values())

    def record(
        self,
        guards: Iterable[Guard],
        accepts: Callable[[Setting], bool],
        leads_on: Callable[[], bool] = lambda: False,
    ) -> list[str]:
        """Record the other settings; return the attributes that could not be recorded, as ``Class.name``.

        If a setting of several attributes fails, they are recorded one by one. Whole numbers go on step by step.

        Args:
            guards: of the run on the example.
            accepts: records a run with a setting, and returns whether it succeeded.
            leads_on: returns whether the run that was recorded last took a step that none before it took.
        """
        settings, missing = self.others(guards), self.fixed()
        for setting in settings[:MOST_SETTINGS]:
            is_accepted = record_in_steps(setting, accepts, leads_on)
            if not is_accepted and not any(is_list_of_numbers(value) for _, value in setting):
                several = len({a.name for a, _ in setting}) > 1 and len(setting) <= MOST_SETTINGS
                missing += [a for a, value in setting if not (several and accepts([(a, value)]))]
        missing += [a for setting in settings[MOST_SETTINGS:] for a, _ in setting]
        kinds = {type(a.module) for a in self._read if type(a.value) is bool}
        flags = [a for a in self._attributes if type(a.value) is bool and a.name[0] != "_" and type(a.module) in kinds]
        for setting in _all_flags(flags):
            accepts(setting)
        self.missing = {(a.owner, a.name) for a in missing}
        return sorted({f"{type(a.module).__name__}.{a.name}" for a in missing})


def other_reals(number: float) -> tuple[float, float, float]:
    """Return another number, zero and one; the other number is in [0, 1], as a probability, if the number is.

    Example:
        >>> other_reals(0.0), other_reals(0.5)
        ((0.25, 0.0, 1.0), (0.375, 0.0, 1.0))
    """
    between = 0.375 if number == 0.5 else number / 2 + 0.25
    return between if math.isfinite(number) else 1.0, 0.0, 1.0


def _all_flags(flags: Sequence[Attribute]) -> list[Setting]:
    """Return a setting with all flags on and one with all flags off, if that changes more than one flag."""
    settings = [[(a, value) for a in flags if a.value is not value] for value in (True, False)]
    return [setting for setting in settings if len({(type(a.module), a.name) for a, _ in setting}) > 1]


def _layer_counts(attribute: Attribute) -> set[int]:
    """Return the lengths and indices of a module's lists of layers, if an attribute may be one of these."""
    lists = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList)
    most = max((len(child) for child in attribute.module.children() if isinstance(child, lists)), default=-1)
    return set(range(most + 1)) - {attribute.value} if attribute.value <= most <= MOST_ATTRIBUTE_CHOICES else set()


def _choices(attribute: Attribute) -> Iterator[Any]:
    functions = (pair for kind in user_classes(attribute.module) for pair in functions_of(kind))
    codes = [code for name, code in functions if attribute.name in code.co_names and not is_setup(name)]
    return (choice for choice in other_choices(attribute.value, attribute.module, codes) if choice != attribute.name)


def other_choices(value: Any, module: nn.Module, codes: Iterable[CodeType]) -> Iterator[Any]:
    """Yield what `choices` yields; for a string also words in functions that read it, and one that is none of these.

    Args:
        value, module: as for `choices`.
        codes: of the functions.

    Example:
        >>> list(other_choices("avg", nn.Module(), [(lambda pool: pool == "max").__code__]))
        ['max', 'another']
    """
    yield from choices(value, module)
    if isinstance(value, str):
        words = dict.fromkeys(word for code in codes for word in words_in(code) if word != value)
        yield from itertools.islice(words, MOST_WORDS)
        yield "another"


def choices(value: Any, module: nn.Module, *spaces: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the members of an enumeration, or the names that a string may be: keys of tables, and parts of modules.

    Args:
        value: a member or a string.
        module: a module; its tables count, and the global ones of the Python modules that define its classes.
        spaces: further namespaces whose tables count.

    Example:
        >>> net = nn.Module()
        >>> net.head_cars, net.head_cats = nn.Linear(1, 1), nn.Linear(1, 1)
        >>> list(choices("cars", net))
        ['cars', 'cats']
    """
    if isinstance(value, Enum):
        yield from type(value)
        return
    beside = [vars(sys.modules[kind.__module__]) for kind in type(module).__mro__ if kind.__module__ in sys.modules]
    own = [vars(module), dict(module.named_children()), *map(vars, type(module).__mro__)]
    for space in (*own, *(s for s in (*beside, *spaces) if not s.get("__name__", "").startswith(_FOREIGN))):
        for table in list(space.values()):
            if isinstance(table, (Mapping, nn.ModuleDict)) and len(table) <= MOST_ATTRIBUTE_CHOICES and value in table:
                yield from (key for key in table if isinstance(key, str))
    for part in module.modules() if isinstance(value, str) else ():
        yield from part._modules if value in part._modules and part is not module else ()
    yield from _attributes(value, module) if isinstance(value, str) and value else ()


_FOREIGN = ("torch.", "builtins")


def _attributes(value: str, module: nn.Module) -> Iterator[str]:
    """Yield the strings that may replace another one in names of parts and methods (``head_cars``)."""
    names = [*module._modules, *(name for name, _ in methods_of(type(module)))]  # type: ignore[arg-type]
    for name in names:
        before, after = name.removesuffix(value), name.removeprefix(value)
        if before != name and before[-1:] in ("", "_"):
            yield from (n.removeprefix(before) for n in names if n.startswith(before))
        elif after != name and after[0] == "_":
            yield from (n.removesuffix(after) for n in names if n.endswith(after))


def turning_points(guard: Guard, numbers: Mapping[tuple[str, str], int], names: set[tuple[str, str]]) -> list[int]:
    """Return a number that reverses a comparison if some attributes have that value.

    Args:
        guard: the comparison.
        numbers: the current numbers, by module and name.
        names: of these attributes, with their modules.

    Returns:
        The number in a list, which is empty if no number that was tried does.
    """
    if not names & {(leaf.module, leaf.name) for leaf in leaves(guard.expr) if isinstance(leaf, AttributeOf)}:
        return []

    def outcome(number: int) -> Any:
        others = {**numbers, **dict.fromkeys(names, number)}
        return evaluate(guard.expr, lambda value: value.shape, lambda leaf: others[leaf.module, leaf.name])

    near = {int(limit) + step for limit in _numbers(guard.expr, numbers) if math.isfinite(limit) for step in (-1, 0, 1)}
    tries = [*sorted(near), *range(MOST_ATTRIBUTE_CHOICES), *(2**power for power in range(4, 21))]
    return [n for n in tries if n >= 0 and bool(outcome(n)) is not guard.outcome][:1]


def _numbers(expr: Expr, numbers: Mapping[tuple[str, str], int]) -> Iterator[float]:
    """Yield the numbers in an expression, and the values of its attributes."""
    if isinstance(expr, Apply):
        yield from (*_numbers(expr.left, numbers), *_numbers(expr.right, numbers))
    elif isinstance(expr, AttributeOf):
        yield numbers[expr.module, expr.name]
    elif isinstance(expr, (int, float)):
        yield expr


def run_signature(nodes: Sequence[Node], outputs: Sequence[Value]) -> list[Any]:
    """Return a description of the ops and outputs of a run that is equal for runs that compute the same.

    Args:
        nodes, outputs: of the run.
    """
    start = nodes[0].index if nodes else 0

    def key(value: Value) -> tuple[Any, ...]:
        place = None if value.producer is None else (value.producer - start, _output_index(value, nodes, start))
        return value.name, value.shape, value.dtype, place

    calls = [
        (node.op, node.module, switches_of(node), tuple(map(key, node.inputs)), tuple(map(key, node.outputs)))
        for node in nodes
    ]
    return [*calls, tuple(map(key, outputs))]


def switches_of(node: Node) -> tuple[Any, ...]:
    """Return the arguments of a call that are not quantities: booleans, strings and dimensions."""
    args = {name: value for name, value in node.args.items() if not isinstance(value, Value)}
    plain = tuple((name, repr(v)) for name, v in args.items() if isinstance(v, str) or v is None or "dim" in name)
    return *plain, *booleans_in(args)


def _output_index(value: Value, nodes: Sequence[Node], start: int) -> int:
    """Return the position of a value among the outputs of its op."""
    at = (value.producer or 0) - start
    outputs = nodes[at].outputs if 0 <= at < len(nodes) else ()
    return next((n for n, output in enumerate(outputs) if output.index == value.index), -1)

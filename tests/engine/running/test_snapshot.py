"""What lies in containers and objects is put back bit for bit, and what did not change is not touched."""

from __future__ import annotations

import array
import builtins
import functools
import gc
import itertools
import random
import sys
import types
import weakref
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import EngineError, TraceError
from engine.running.snapshot import Snapshot


class Frozen(OrderedDict):  # type: ignore[type-arg]
    """Raises once it is changed, as diffusers' configurations do."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._frozen = True

    def __setitem__(self, key: Any, value: Any) -> None:
        if getattr(self, "_frozen", False):
            raise TypeError("frozen")
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Forbidden."""
        raise TypeError("frozen")


class Log(list):  # type: ignore[type-arg]
    """Notes every write through its methods."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.writes = 0

    def append(self, item: Any) -> None:
        """Add an item, and count it."""
        self.writes += 1
        super().append(item)


class Slots:
    """No table of attributes, and one slot that is empty at first."""

    __slots__ = ("empty", "value")

    def __init__(self) -> None:
        self.value = [1]


@dataclass(frozen=True)
class Point:
    """Frozen, with a list in it."""

    items: list[int] = field(default_factory=lambda: [1, 2])


class Cache:
    """Keys and values by layer, as transformers keep them."""

    def __init__(self) -> None:
        self.keys: list[Any] = [torch.ones(2)]
        self.seen = 0


class Guarded:
    """A property whose getter must not run."""

    def __init__(self) -> None:
        self._value = 1

    @property
    def value(self) -> int:
        """Raise."""
        raise AssertionError("a property was read")


def closure() -> Callable[[], int]:
    """Return a function that counts its calls."""
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


def _change_generator(g: Any) -> None:
    torch.rand(1, generator=g)


def _new_slots(s: Any) -> None:
    s.value, s.empty = 3, 1


def _add_one(t: Tensor) -> None:
    with torch.no_grad():
        t.add_(1)


def _data(t: Any) -> None:
    t.data = torch.zeros(7)


def _attribute(o: Any) -> None:
    o.seen += 1
    o.keys.append(2)
    o.new = True


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "dict": (lambda: {"a": 1, "b": 2}, lambda d: d.pop("a")),
    "dict in another order": (lambda: {"a": 1, "b": 2}, lambda d: d.update(a=d.pop("a"))),
    "nested dict": (lambda: {"a": {"b": [1]}}, lambda d: d["a"]["b"].clear()),
    "OrderedDict": (lambda: OrderedDict(a=1, b=2), lambda d: d.move_to_end("a")),
    "defaultdict": (lambda: defaultdict(list), lambda d: d["new"].append(1)),
    "Counter": (lambda: Counter("abc"), lambda c: c.update("a")),
    "frozen mapping": (lambda: Frozen({"a": [1]}), lambda d: d["a"].append(2)),
    "frozen mapping, forced": (lambda: Frozen({"a": 1}), lambda d: OrderedDict.__setitem__(d, "b", 2)),
    "UserDict": (lambda: UserDict(a=1), lambda d: d.update(b=2)),
    "UserList": (lambda: UserList([1]), lambda d: d.append(2)),
    "ChainMap": (lambda: ChainMap({"a": 1}, {"b": 2}), lambda d: d.update(a=3)),
    "mapping proxy": (lambda: types.MappingProxyType({"a": [1]}), lambda d: d["a"].append(2)),
    "list": (lambda: [1, 2], lambda v: v.reverse()),
    "list that counts": (lambda: Log([1]), lambda v: v.append(2)),
    "tuple of lists": (lambda: ([1], [2]), lambda v: v[1].clear()),
    "set": (lambda: {1, 2}, lambda v: v.add(3)),
    "deque with a limit": (lambda: deque([1, 2, 3], maxlen=3), lambda v: v.append(4)),
    "bytearray": (lambda: bytearray(b"ab"), lambda v: v.append(1)),
    "array": (lambda: array.array("d", [1.0]), lambda v: v.append(2.0)),
    "numpy array": (lambda: np.ones(3), lambda v: v.__setitem__(0, 5)),
    "tensor": (lambda: torch.tensor([1.0, float("nan")]), _add_one),
    "tensor with other memory": (lambda: torch.ones(3), _data),
    "tensor that is trained": (lambda: torch.ones(3), lambda t: t.requires_grad_()),
    "integers in a tensor": (lambda: torch.arange(3), _add_one),
    "tensor in a list": (lambda: [torch.ones(2)], lambda v: _add_one(v[0])),
    "torch generator": (lambda: torch.Generator().manual_seed(1), _change_generator),
    "python generator of random numbers": (lambda: random.Random(1), lambda r: r.random()),
    "numpy generator": (lambda: np.random.default_rng(1), lambda r: r.random()),
    "old numpy generator": (lambda: np.random.RandomState(1), lambda r: r.rand()),
    "namespace": (lambda: types.SimpleNamespace(a=1), lambda o: setattr(o, "b", 2)),
    "frozen dataclass": (Point, lambda o: o.items.append(3)),
    "slots": (Slots, _new_slots),
    "cache": (Cache, _attribute),
    "property": (Guarded, lambda o: setattr(o, "_value", 2)),
    "replaced table": (Cache, lambda o: setattr(o, "__dict__", {})),
    "closure": (closure, lambda f: f()),
    "default argument": (lambda: lambda cache={"a": 1}: cache, lambda f: f().clear()),
    "partial": (lambda: functools.partial(dict, a=[1]), lambda f: f.keywords["a"].append(2)),
    "bound method": (lambda: Cache().__init__, lambda f: _attribute(f.__self__)),  # type: ignore[misc]
    "weak dictionary": (weakref.WeakValueDictionary, lambda d: d.__setitem__("a", KINDS_ALIVE)),
    "cycle": (lambda: [types.SimpleNamespace()], lambda v: setattr(v[0], "me", v)),
}
KINDS_ALIVE = Cache()


def picture(value: Any, depth: int = 6) -> Any:
    """Return everything about a value that could change, as plain data."""
    kind = type(value)
    if isinstance(value, Tensor):
        return value.data_ptr(), value.shape, value.dtype, value.requires_grad, repr(value.tolist())
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, (np.ndarray, array.array)):
        return value.tobytes()
    parts: list[Any] = []
    if depth and isinstance(value, (dict, types.MappingProxyType)):
        parts += [(k, picture(v, depth - 1)) for k, v in value.items()]
    elif depth and isinstance(value, (list, tuple, deque, set)):
        parts += [picture(v, depth - 1) for v in value]
    elif isinstance(value, bytearray):
        parts += bytes(value)
    if isinstance(value, types.FunctionType):
        parts += [picture(c.cell_contents, depth - 1) for c in value.__closure__ or ()]
        parts += [picture(v, depth - 1) for v in value.__defaults__ or ()]
    if isinstance(value, functools.partial):
        parts.append(picture(value.keywords))
    if isinstance(value, types.MethodType):
        parts.append(picture(value.__self__))
    if isinstance(value, Slots):
        parts += [(name, picture(getattr(value, name))) for name in Slots.__slots__ if hasattr(value, name)]
    table = getattr(value, "__dict__", {}) if kind.__module__ != "builtins" and kind is not type else {}
    parts += [(k, picture(v, depth - 1)) for k, v in table.items()] if depth else []
    return (kind, id(value) if kind is not int else value, parts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_is_taken_back(kind: str) -> None:
    """Contents, order, identity, memory and state are as before."""
    make, change = KINDS[kind]
    value = make()
    before = picture(value)
    snapshot = Snapshot([value])
    change(value)
    assert picture(value) != before, "the change is seen at all"
    snapshot.restore()
    assert picture(value) == before


class Holder(nn.Module):
    """Changes what it holds whenever it runs."""

    def __init__(self, value: Any, change: Callable[[Any], Any], fails: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.value, self._change, self._fails, self.count = value, change, fails, itertools.count()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, or fail."""
        self._change(self.value)
        self.steps += 1
        next(self.count)
        self.body.weight.requires_grad_(False)
        self.register_forward_hook(lambda *args: None)
        if self._fails:
            raise RuntimeError("no")
        return self.head(self.body(x).relu())  # type: ignore[no-any-return]


_OUTSIDE = {"tensor in a list", "cycle", "tensor", "integers in a tensor", "tensor with other memory"}
"""What a change of a tensor is while a model is recorded is another test's matter."""


@pytest.mark.parametrize("fails", [False, True], ids=["runs", "fails"])
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - _OUTSIDE))
def test_a_model_is_as_before(kind: str, fails: bool) -> None:
    """After a trace, and after an error in forward: what it holds, its counters, hooks and flags."""
    make, change = KINDS[kind]
    value = make()
    model = Holder(value, change, fails)
    before, table = picture(value), dict(vars(model))
    try:
        engine.trace(model, torch.zeros(2, 3))
    except EngineError:
        assert fails or kind in {"tensor that is trained"}
    assert picture(value) == before
    assert list(vars(model)) == list(table) and all(vars(model)[n] is v for n, v in table.items())
    assert model.steps == 0 and next(model.count) == 0
    assert model.body.weight.requires_grad and not model._forward_hooks


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - _OUTSIDE))
def test_a_refused_model_is_as_before(kind: str) -> None:
    """After a compaction that is refused once the model has run: the masks are of another shape than the weight."""
    make, change = KINDS[kind]
    value = make()
    model = Holder(value, change, fails=False)
    before, table = picture(value), dict(vars(model))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(EngineError):
        engine.ModelSpeedup(model, torch.zeros(2, 3), {"body": {"weight": torch.ones(5, 3)}}).speedup_model()
    assert picture(value) == before
    assert list(vars(model)) == list(table) and all(vars(model)[n] is v for n, v in table.items())
    assert model.steps == 0 and next(model.count) == 0 and not model._forward_hooks
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_an_argument_is_as_before() -> None:
    """A cache that is passed in holds no tensor without data afterwards."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 4)

        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            cache.keys.append(self.body(x))
            cache.seen += 1
            return cache.keys[-1]  # type: ignore[no-any-return]

    cache = Cache()
    before = picture(cache)
    engine.trace(Net(), (torch.zeros(2, 3), cache))
    assert picture(cache) == before


def test_a_generator_is_not_advanced() -> None:
    """It cannot be wound back, so the model is refused by its name, and may still run."""

    class Net(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.steps = (n for n in range(5))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * next(self.steps)

    model = Net()
    with pytest.raises(TraceError, match=r"Net\.steps"):
        engine.trace(model, torch.zeros(2, 3))
    assert next(model.steps) == 0


def test_what_holds_the_model_is_no_part_of_it() -> None:
    """A trainer goes on beside it."""
    model = nn.Sequential(nn.Linear(2, 2))
    trainer = types.SimpleNamespace(loop=types.SimpleNamespace(model=model), steps=[0])
    snapshot = Snapshot([trainer], model)
    trainer.steps.append(1)
    snapshot.restore()
    assert trainer.steps == [0, 1]


def test_what_runs_the_file_of_the_model_is_no_part_of_it() -> None:
    """A runner of tests or of a notebook has the Python module, of which the model is a global."""
    model, module = nn.Sequential(nn.Linear(2, 2)), types.ModuleType("notebook")
    module.model = model  # type: ignore[attr-defined]
    runner = types.SimpleNamespace(module=module, steps=[0])
    snapshot = Snapshot([runner], model)
    runner.steps.append(1)
    snapshot.restore()
    assert runner.steps == [0, 1]


def test_what_did_not_change_is_not_written() -> None:
    """Neither a list that counts nor a tensor."""
    tensor, log = torch.ones(3), Log([1])
    version = tensor._version
    Snapshot([tensor, log, Frozen({"a": 1})]).restore()
    assert tensor._version == version and log.writes == 0


@pytest.mark.parametrize("table", [vars(builtins), sys.modules], ids=["builtins", "sys.modules"])
def test_tables_of_python_are_no_part_of_a_model(table: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A namespace of a Python module leads to them, and a prompt or an import adds to them meanwhile."""
    snapshot = Snapshot([{"__builtins__": table}])
    monkeypatch.setitem(table, "_entered", True)
    assert not snapshot.differs()
    snapshot.restore()
    assert "_entered" in table


def test_weak_tables_that_a_collection_empties() -> None:
    """A search for cycles in the middle of a look does not change what is looked at."""

    class Held:
        """Refers to itself, so that only a collection frees it."""

        def __init__(self) -> None:
            self.own = self

    table = weakref.WeakKeyDictionary({Held(): index for index in range(2000)})
    thresholds = gc.get_threshold()
    gc.set_threshold(50)
    try:
        Snapshot([table.data, table]).restore()
    finally:
        gc.set_threshold(*thresholds)


def test_a_class_that_names_no_python_module() -> None:
    """Objects of it are looked into as others are."""
    value = type("Odd", (), {"__module__": None})()
    value.items = [1]
    snapshot = Snapshot([value], nn.ReLU())
    value.items.append(2)
    snapshot.restore()
    assert value.items == [1]

"""Tensors without data, and the memory of what ops do to sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import engine
from engine.program.storages import storage_of
from engine.running import fakes
from engine.running.fakes import Fakes, Layout

ATEN = torch.ops.aten
SAMPLES = [(rule, sample) for rule in engine.RULES.distinct() for sample in rule.samples()]


def recorded(model: nn.Module, x: Tensor) -> list[Any]:
    """What a trace says of sizes, dtypes and places."""
    graph = engine.trace(model, x)
    return [
        (n.op, n.module, n.path, [(v.index, v.shape, v.dtype) for v in (*n.inputs, *n.outputs)]) for n in graph.nodes
    ]


@pytest.mark.parametrize("rule, sample", SAMPLES, ids=[f"{r.ops[0]}-{s.name}" for r, s in SAMPLES])
def test_a_graph_is_the_same_with_and_without_memory(rule: Any, sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op of every sample: run in the mode each time, for the first time, and from memory."""
    torch.manual_seed(0)
    model, x = sample.make(), torch.randn(sample.shape)
    model(x)  # lazy layers
    monkeypatch.setattr(fakes, "_RECIPES", {})
    first, again = recorded(model, x), recorded(model, x)
    monkeypatch.setattr(Fakes, "run", Fakes._run)
    assert first == again == recorded(model, x)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember nothing of what earlier tests ran."""
    monkeypatch.setattr(fakes, "_RECIPES", {})
    monkeypatch.setattr(fakes, "_RECIPES_BY_ELEMENT", {})


def twice(make: Callable[[Fakes], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The result from memory."""
    forget(monkeypatch)
    make(Fakes())
    return make(Fakes())


def test_tensors_that_share_memory_do_so_as_fakes() -> None:
    """Parameters cut from one buffer, in any order; others have memory of their own."""
    whole, made = torch.zeros(6, 4), Fakes()
    second, first = made.of(whole[3:]), made.of(whole)
    assert storage_of(second) == storage_of(first) != storage_of(made.of(torch.zeros(6, 4)))
    assert second.storage_offset() == 12 and second.shape == (3, 4)
    number, view = made.of(torch.tensor(2.0)), made.of(torch.zeros(4)[1])
    assert number.ndim == view.ndim == 0


def test_an_output_that_is_like_an_argument_is_made_without_asking() -> None:
    """In memory of its own; whatever is not known goes to the mode."""
    made = Fakes(lambda func, args, kwargs: Layout.of(args[0]) if func is ATEN.mul.Tensor else None)
    x, wide = made.of(torch.zeros(1, 4)), made.of(torch.zeros(3, 4))
    like = made.run(ATEN.mul.Tensor, (x, wide), {})  # wrong on purpose: so it is not the mode that says it
    assert like.shape == (1, 4) and storage_of(like) != storage_of(x)
    assert made.run(ATEN.add.Tensor, (x, wide), {}).shape == (3, 4)


def test_layouts_devices_and_dtypes_are_kept() -> None:
    """Strides of a transposed tensor, a half, an integer."""
    made = Fakes()
    for tensor in (torch.zeros(3, 5).t(), torch.zeros(2, dtype=torch.half), torch.zeros(2, dtype=torch.long)):
        fake = made.of(tensor)
        assert (fake.shape, fake.stride(), fake.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
        assert fake.device == tensor.device


@pytest.mark.parametrize("number, dtype", [(1, torch.long), (1.0, torch.float32), (True, torch.long)])
def test_equal_numbers_of_other_types_are_told_apart(
    number: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1, 1.0 and True hash alike, and promote differently."""
    monkeypatch.setattr(fakes, "_RECIPES", {})
    made = Fakes()
    found = {}
    for other in (1, 1.0, True, number, number):
        found[type(other)] = made.run(ATEN.add.Tensor, (made.of(torch.zeros(2, dtype=torch.long)), other), {}).dtype
    assert found[type(number)] == dtype


def test_the_default_dtype_is_part_of_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """An integer divided gives the default."""
    forget(monkeypatch)
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            made = Fakes()
            assert made.run(ATEN.div.Tensor, (made.of(torch.ones(2, dtype=torch.long)), 2), {}).dtype == dtype
    finally:
        torch.set_default_dtype(before)


def test_an_op_that_writes_gives_back_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same object, so that the write is seen."""

    def relu(made: Fakes) -> bool:
        x = made.of(torch.zeros(2, 3))
        return made.run(ATEN.relu_.default, (x,), {}) is x

    assert twice(relu, monkeypatch)


def test_an_op_that_writes_and_returns_another_tensor_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later runs would record the write with a second result."""
    forget(monkeypatch)

    def written(fakes: Fakes) -> bool:
        x = fakes.of(torch.zeros(2, 3))
        return fakes.run(ATEN.sigmoid_.default, (x,), {}) is x

    with monkeypatch.context() as patch:
        patch.setattr(Fakes, "_run", lambda self, func, args, kwargs: self.like(args[0]))
        assert not written(Fakes())
    assert written(Fakes())


def test_an_op_that_changes_its_argument_is_run_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """``unsqueeze_`` changes the sizes of what it is given."""

    def unsqueeze(made: Fakes) -> tuple[int, ...]:
        x = made.of(torch.zeros(2, 3))
        made.run(ATEN.unsqueeze_.default, (x, 0), {})
        return tuple(x.shape)

    assert twice(unsqueeze, monkeypatch) == (1, 2, 3)


@pytest.mark.parametrize(
    "view",
    [lambda x: (ATEN.view.default, (x, [6])), lambda x: (ATEN.t.default, (x,)), lambda x: (ATEN.chunk.default, (x, 2))],
)
def test_views_share_the_memory(view: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """At every call."""

    def run(made: Fakes) -> bool:
        x = made.of(torch.zeros(2, 3))
        func, args = view(x)
        out = made.run(func, args, {})
        return all(storage_of(t) == storage_of(x) for t in (out if isinstance(out, (list, tuple)) else [out]))

    assert twice(run, monkeypatch)


def test_a_reshape_that_copies_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it does depends on the strides."""

    def run(made: Fakes, strided: bool) -> bool:
        x = made.of(torch.zeros(3, 2).t() if strided else torch.zeros(2, 3))
        return storage_of(made.run(ATEN.reshape.default, (x, [6]), {})) == storage_of(x)

    for strided in (True, False):
        assert twice(lambda made, strided=strided: run(made, strided), monkeypatch) is not strided


def test_a_data_dependent_op_needs_data_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never remembered."""
    monkeypatch.setattr(fakes, "_RECIPES", {})
    made = Fakes()
    for _ in range(2):
        with pytest.raises(torch._subclasses.fake_tensor.DynamicOutputShapeException):
            made.run(ATEN.nonzero.default, (made.of(torch.zeros(3)),), {})


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long-lived process that sees ever new sizes does not grow."""
    monkeypatch.setattr(fakes, "_RECIPES", {})
    monkeypatch.setattr(fakes, "_LIMIT", 5)
    made = Fakes()
    for n in range(1, 30):
        made.run(ATEN.relu.default, (made.of(torch.zeros(n)),), {})
    assert len(fakes._RECIPES) <= 6


@pytest.mark.parametrize("inference", [True, False])
def test_a_fake_tensor_is_what_the_constructor_makes(inference: bool) -> None:
    """The second of a device is assembled: same class, attributes and dispatch keys."""
    maker = Fakes()
    with torch.inference_mode(inference):
        first, second = (maker._fake(torch.empty(2, 3, device="meta"), torch.device("cpu")) for _ in range(2))
        own = FakeTensor(maker.mode, torch.empty(2, 3, device="meta"), torch.device("cpu"))
    for fake in (first, second):
        assert type(fake) is type(own) and vars(fake) == vars(own) and vars(fake) is not vars(own)
        assert torch._C._dispatch_keys(fake) == torch._C._dispatch_keys(own)
        assert (fake.device, fake.is_inference()) == (own.device, own.is_inference())


def test_a_fake_tensor_has_no_address() -> None:
    """Where torch is told to refuse it."""
    with torch._functorch.config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        maker = Fakes()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="data pointer"):
                maker._fake(torch.empty(2, 3, device="meta"), torch.device("cpu")).data_ptr()


def overloads() -> list[Any]:
    """Those that compute each element by itself."""
    packets = [getattr(ATEN, name) for name in dir(ATEN)]
    functions = (getattr(packet, name) for packet in packets for name in getattr(packet, "overloads", list)())
    return [f for f in functions if torch.Tag.pointwise in f.tags and "out" not in f._overloadname]


def arguments(func: Any, dtype: torch.dtype, shape: tuple[int, ...], fakes: Fakes) -> list[Any]:
    """Of an overload: tensors of a shape, and numbers."""
    plain = {"Scalar": 2, "float": 0.5, "int": 1, "bool": True, "str": "none"}
    result = []
    for argument in func._schema.arguments:
        kind = str(argument.type)
        if argument.has_default_value() or argument.kwarg_only:
            break
        result.append(fakes.of(torch.ones(shape, dtype=dtype)) if kind == "Tensor" else plain.get(kind))
    return result


def layouts(run: Callable[..., Any], func: Any, args: Sequence[Any]) -> Any:
    """Of what an op returns, or the class of its error."""
    try:
        out = run(func, tuple(args), {})
    except (RuntimeError, TypeError, NotImplementedError, IndexError, ValueError) as error:
        return type(error)
    return [Layout.of(t) for t in ([out] if isinstance(out, Tensor) else out)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_what_holds_for_one_size_holds_for_all(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op that computes each element by itself: remembered at one size, asked at others, and in other layouts."""
    monkeypatch.setattr(fakes, "_RECIPES", {})
    monkeypatch.setattr(fakes, "_RECIPES_BY_ELEMENT", {})
    recorded, functions = 0, overloads()
    for func in functions:
        for shape in [(2, 3), (4, 1, 1, 5), (1, 1), ()]:
            made = Fakes()
            ours = layouts(made.run, func, arguments(func, dtype, shape, made))
            assert ours == layouts(made._run, func, arguments(func, dtype, shape, made)), (func, shape)
        recorded += any(key[0] is func for key in fakes._RECIPES_BY_ELEMENT)
    assert recorded > len(functions) / 4


def test_the_mode_asks_once_for_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask loads the library of a driver: twice for each op that is not remembered."""
    asked: list[None] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(asked.append(None)))
    fakes = Fakes()
    for size in range(2, 6):
        fakes.run(torch.ops.aten.cumsum.default, (fakes.of(torch.zeros(size)), 0), {})
    assert len(asked) <= 1

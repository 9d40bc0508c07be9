"""Size arguments that are pinned in the forward of one module."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import PlanError
from engine.surgery.edits import Pin
from engine.surgery.kinds.pins import Pinned, pin_of, pinned_class
from tests.engine.attentions import (
    Attention,
    ByAttribute,
    ByBase,
    ByBatch,
    ByFunction,
    ByFunctions,
    ByMethod,
    BySuper,
    ByTypedFunction,
    Chosen,
    Decorated,
    Factored,
    Inner,
    Large,
    Named,
    Pieces,
    Rewritten,
    ScaledByWidth,
    Sized,
    Unpacked,
    Viewed,
    WithClassDefault,
    WithPrivateName,
    WithText,
    pins_of,
    split_heads,
    stored,
    tokens,
    without_heads,
)
from tests.engine.exactness import Masks, masked, randomised, relative_error, run
from tests.engine.nets import Net, analysis_of, dead, image, plain, snapshot, unchanged


def net(make: Callable[[], nn.Module] = Attention) -> nn.Module:
    """A projection, attention, and two layers behind it."""
    return randomised(nn.Sequential(nn.Linear(5, 8), make(), nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 3)))


def attention_masks(model: nn.Module, closed: Iterable[int] = (0, 2)) -> Masks:
    """Close heads of the attention in `net`."""
    return {"1.qkv": without_heads(model[1].qkv, closed)}


def compacted(model: nn.Module, masks: Masks, x: Tensor) -> tuple[nn.Module, engine.Plan]:
    """A small copy, and its plan."""
    speedup = engine.ModelSpeedup(copy.deepcopy(model), x, masks, confidence=2)
    return speedup.speedup_model(), speedup.plan


def error_of(model: nn.Module, masks: Masks, small: nn.Module, *batches: Tensor) -> float:
    """Largest relative error of the small model."""
    reference = masked(model, masks)
    return max(relative_error(run(reference, x), run(small, x)) for x in batches)


@pytest.mark.parametrize("make", [Attention, Rewritten, ByFunction, ByMethod])
def test_heads_go_as_a_whole(make: Callable[[], nn.Module]) -> None:
    """Two of four heads go with their queries, keys, values and output columns; other batches and lengths fit."""
    model = net(make)
    masks = attention_masks(model)
    assert "1.qkv" not in engine.not_safe_to_prune(model, tokens())
    small, plan = compacted(model, masks, tokens())
    assert plan.slices["1.qkv.weight"].shape == (12, 8) and plan.slices["1.out.weight"].shape == (8, 4)
    assert pins_of(plan) and type(small[1]) is not make and isinstance(small[1], make)
    assert error_of(model, masks, small, tokens(), tokens(1, 1), tokens(3, 7)) < 1e-9


@pytest.mark.parametrize(
    "make",
    [
        ByFunctions,
        ByAttribute,
        BySuper,
        ByBase,
        WithClassDefault,
        WithPrivateName,
        WithText,
        Decorated,
        Inner,
        Unpacked,
        Named,
    ],
)
def test_whatever_the_code_looks_like(make: Callable[[], nn.Module]) -> None:
    """Either heads go and the model computes the same, or they stay; never an error."""
    model = net(make)
    masks = attention_masks(model)
    small, plan = compacted(model, masks, tokens())
    assert plan.is_empty or plan.slices["1.qkv.weight"].shape == (12, 8)
    assert error_of(model, masks, small, tokens(), tokens(3, 7)) < 1e-9


def test_types_stay(tmp_path: Path) -> None:
    """A rebuilt function takes what it took: TorchScript reads the types of its arguments."""
    model = net(ByTypedFunction)
    masks, x = attention_masks(model), tokens()
    small, plan = compacted(model, masks, x)
    assert pins_of(plan) and error_of(model, masks, small, x) <= 1e-9
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.jit.* is deprecated")
        torch.jit.script(small).save(tmp_path / "small.pt")
        assert torch.equal(torch.jit.load(tmp_path / "small.pt")(x), small(x))


@pytest.mark.parametrize("make", [Decorated, Inner, Unpacked, Named])
def test_a_call_that_cannot_be_edited_keeps_its_heads(make: Callable[[], nn.Module]) -> None:
    """In a closure, behind unpacked sizes, by keyword: the heads stay, and the reason names the line."""
    unsafe = engine.not_safe_to_prune(net(make), tokens())
    assert "1.qkv" in unsafe and "attentions.py:" in unsafe.reasons["1.qkv"]


def test_part_of_a_head_stays() -> None:
    """A head with one live value stays, with all of it."""
    model = net()
    masks = attention_masks(model)
    masks["1.qkv"]["weight"][16] = 1  # the first value of head 0
    small, plan = compacted(model, masks, tokens())
    assert plan.slices["1.qkv.weight"].shape == (18, 8) and error_of(model, masks, small, tokens(1, 3)) < 1e-9


def test_the_pinned_numbers() -> None:
    """Only what does not follow is set: the number of heads, and the width of all heads together."""
    model = net()
    plan = compacted(model, attention_masks(model), tokens())[1]
    assert [(p.module, p.function, p.method, p.position, p.value) for p in pins_of(plan)] == [
        ("1", "forward", "forward", 3, 2),
        ("1", "forward", "forward", 2, 4),
    ]
    assert "Pinned:\n  forward of '1' is given the size 2" in str(plan)


def test_only_the_module_itself_is_pinned() -> None:
    """Another instance of the class, and the class itself, stay as they are; so do attributes."""
    model = randomised(nn.Sequential(nn.Linear(5, 8), Attention(), Attention(), nn.Linear(8, 3)))
    masks = attention_masks(model)
    small, plan = compacted(model, masks, tokens())
    assert type(small[2]) is Attention and type(small[1]) is not Attention and small[1].heads == 4
    assert {p.module for p in pins_of(plan)} == {"1"} and error_of(model, masks, small, tokens(3, 5)) < 1e-9
    assert net()(tokens()).shape == (2, 4, 3)


def test_two_modules_with_one_function_have_pins_of_their_own() -> None:
    """The function of the file is copied for each of them."""
    model = randomised(nn.Sequential(nn.Linear(5, 8), ByFunction(), ByFunction(), nn.Linear(8, 3)))
    masks = attention_masks(model, [0]) | {"2.qkv": without_heads(model[2].qkv, [0, 1, 3])}
    small, plan = compacted(model, masks, tokens())
    assert {(p.module, p.function, p.method, p.value) for p in pins_of(plan)} == {
        ("1", "split_heads", "forward", 3),
        ("2", "split_heads", "forward", 1),
    }
    assert error_of(model, masks, small, tokens(3, 5)) < 1e-9
    assert split_heads(torch.zeros(1, 1, 24), 4, 2)[0].shape == (1, 4, 1, 2)


@pytest.mark.parametrize("kind", ["literal", "batch", "resolution"])
def test_what_is_never_pinned(kind: str) -> None:
    """A number that the author wrote down, or one that follows the batch or the resolution, keeps its channels."""
    model, x = randomised(Sized(kind)), image(4)
    unsafe = engine.not_safe_to_prune(model, x)
    assert list(unsafe) == ["stem"] and "does not follow" in unsafe.reasons["stem"]
    masks = dead(model, {"stem": [0, 1, 2]}, bias=True)
    small, plan = compacted(model, masks, x)
    assert pins_of(plan) == () and "stem.weight" not in plan.slices and type(small) is Sized


def test_an_attribute_is_pinned() -> None:
    """A module's own width is a choice that the plan may change, in the one argument; the attribute stays."""
    model = randomised(Sized("attribute"))
    assert engine.not_safe_to_prune(model, image()) == []
    masks = dead(model, {"stem": [0, 1, 2]}, bias=True)
    small, plan = compacted(model, masks, image())
    assert [(p.position, p.value) for p in pins_of(plan)] == [(1, 5)] and small.width == 8
    assert error_of(model, masks, small, image(9), image(4, batch=1)) < 1e-9


@pytest.mark.parametrize("widths", [[2, 6], (2, 6)])
def test_widths_that_were_computed_beforehand(widths: list[int] | tuple[int, ...]) -> None:
    """`torch.split(x, self.widths)`: the list is not a number that could be pinned, but its numbers can be set."""
    model = randomised(Pieces(widths))
    assert engine.not_safe_to_prune(model, image()) == []
    masks = dead(model, {"stem": [0, 2, 5, 6]}, bias=True)
    small, plan = compacted(model, masks, image())
    assert pins_of(plan) == () and plan.attributes[""] == {"widths[0]": 1, "widths[1]": 3}
    assert small.widths == type(widths)([1, 3]) and model.widths is widths
    assert error_of(model, masks, small, image(9, batch=3)) < 1e-9
    again = stored(plan).apply(copy.deepcopy(model))
    assert again.widths == small.widths
    change = plan.prepare(model)
    change.commit()
    change.rollback()
    assert model.widths is widths
    with pytest.raises(PlanError, match=r"Sized.*has no 'widths\[0\]'"):
        plan.apply(Sized("attribute"))


def test_one_list_of_widths_for_two_layers() -> None:
    """Where two layers would need other widths, what cannot follow stays, and the result is exact."""
    model = randomised(Pieces([2, 6], again=True))
    for other in ([0, 2, 5, 6], [1, 3, 4, 7], [2, 3, 4, 5]):
        masks = dead(model, {"stem": [0, 2, 5, 6], "other": other}, bias=True)
        small, _ = compacted(model, masks, image())
        assert error_of(model, masks, small, image(9, batch=3)) < 1e-9
        assert (small.stem.out_channels == 4) == (other[0] < 2)


KINDS = ["view tuple", "torch.reshape list", "unflatten", "torch.unflatten", "expand", "split"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_call(kind: str) -> None:
    """Sizes one by one, in a tuple or in a list, by method or by function of torch."""
    model = randomised(Viewed(kind))
    masks = dead(model, {"stem": [0, 1, 4, 5]}, bias=True)
    small, plan = compacted(model, masks, image())
    assert plan.slices["stem.weight"].shape[0] == 4 and len(pins_of(plan)) == 1
    assert error_of(model, masks, small, image(9, batch=3)) < 1e-9


@pytest.mark.parametrize("kind", ["right", "left", "divided", "dividend", "method", "function"])
def test_a_factor_computed_from_a_size_that_changes_stays_the_number_it_is(kind: str) -> None:
    """On either side of an operator, through a root, in a call: other batch sizes and resolutions fit."""
    model = randomised(Factored(kind))
    assert not engine.not_safe_to_prune(model, image())
    masks = dead(model, {"stem": [0, 1]}, bias=True)
    small, plan = compacted(model, masks, image())
    assert plan.slices["stem.weight"].shape[0] == 6 and len(pins_of(plan)) == 1
    assert error_of(model, masks, small, image(), image(batch=3)) < 1e-9
    again = stored(plan).apply(copy.deepcopy(model))
    assert relative_error(run(small, image()), run(again, image())) == 0


@pytest.mark.parametrize("kind", ["in place", "power"])
def test_a_factor_that_cannot_be_edited_freezes(kind: str) -> None:
    """The channels stay, and the reason names the expression and the line."""
    model = randomised(Factored(kind))
    unsafe = engine.not_safe_to_prune(model, image())
    assert list(unsafe) == ["stem"] and "shape[1]" in unsafe.reasons["stem"] and ".py:" in unsafe.reasons["stem"]
    masks = dead(model, {"stem": [0, 1]}, bias=True)
    small, plan = compacted(model, masks, image())
    assert "stem.weight" not in plan.slices and error_of(model, masks, small, image(9)) < 1e-9


def test_a_factor_of_the_width_of_heads() -> None:
    """Heads may go and the tokens' width too: neither changes the factor."""
    model = net(ScaledByWidth)
    assert not engine.not_safe_to_prune(model, tokens())
    masks = {**attention_masks(model), **dead(model, {"0": [0, 3]}, bias=True)}
    small, plan = compacted(model, masks, tokens())
    assert plan.slices["1.qkv.weight"].shape == (12, 6) and error_of(model, masks, small, tokens(3, 7)) < 1e-9


def test_a_factor_from_the_number_of_heads_freezes() -> None:
    """``scores / heads`` with the heads read from a shape."""

    def forward(m: Net, x: Tensor) -> Tensor:
        y = m.qkv(m.stem(x)).unflatten(-1, (3, 4, 2)).permute(2, 0, 3, 1, 4)
        return m.head(((y[0] @ y[1].mT / y.shape[2]).softmax(-1) @ y[2]).transpose(1, 2).flatten(2))

    model = randomised(Net(forward, stem=nn.Linear(5, 8), qkv=nn.Linear(8, 24), head=nn.Linear(8, 2)))
    assert "qkv" in engine.not_safe_to_prune(model, tokens())


def test_another_branch_is_pinned_as_well() -> None:
    """Code that only runs at another resolution is recorded before anything is pinned, and is right there too."""
    model = randomised(Large())
    masks: Masks = {"qkv": without_heads(model.qkv, [1, 2])}
    analysis = analysis_of(model, image(), masks)
    assert analysis.structure.graph.explored and len({p.line for p in pins_of(analysis.plan)}) == 2
    small, _ = compacted(model, masks, image())
    assert error_of(model, masks, small, image(6, batch=3), image(8), image(12), image(16, batch=1)) < 1e-9


def test_without_pins_nothing_is_explored() -> None:
    """A plan that pins nothing needs no second recording."""
    model = plain()
    assert not analysis_of(model, image(), dead(model, {"0": [0]}, bias=True)).structure.graph.explored


def test_a_plan_survives_a_file() -> None:
    """Stored and read with weights_only, it does to a fresh model what it did; the small state loads."""
    model = net()
    masks = attention_masks(model)
    small, plan = compacted(model, masks, tokens())
    again = stored(plan).apply(copy.deepcopy(model))
    assert unchanged(again, snapshot(small)) and relative_error(run(small, tokens(3, 7)), run(again, tokens(3, 7))) == 0
    fresh = stored(plan.structure()).apply(nn.Sequential(*[copy.deepcopy(part) for part in net().train()]))
    fresh.load_state_dict(small.state_dict())
    assert relative_error(run(small, tokens(1, 3)), run(fresh, tokens(1, 3))) == 0
    assert pins_of(stored(plan)) == pins_of(plan)


def test_a_method_that_was_chosen_when_the_module_was_made() -> None:
    """`self.forward = self.attend` runs the pinned code, in copies and later compactions too; it comes back."""
    model = net(Chosen)
    masks = attention_masks(model)
    small, plan = compacted(model, masks, tokens())
    assert pins_of(plan) and small[1].qkv.out_features == 12 and error_of(model, masks, small, tokens(3, 7)) < 1e-9
    for again in (copy.deepcopy(small), pickle.loads(pickle.dumps(small)), plan.apply(copy.deepcopy(model))):
        assert again[1].forward.__self__ is again[1] and relative_error(run(small, tokens()), run(again, tokens())) == 0
    more = {"1.qkv": without_heads(small[1].qkv, [1], heads=2)}
    assert error_of(small, more, compacted(small, more, tokens())[0], tokens(3, 7)) < 1e-9
    change, before = plan.prepare(model), model[1].forward
    change.commit()
    change.rollback()
    assert type(model[1]) is Chosen and model[1].forward == before


@pytest.mark.parametrize("batch", [1, 2])
def test_heads_next_to_the_batch(batch: int) -> None:
    """`n * self.heads` follows the batch and cannot be pinned; the attribute that it is a multiple of is set."""
    model = net(ByBatch)
    masks, x = attention_masks(model), tokens(batch)
    small, plan = compacted(model, masks, x)
    assert plan.attributes["1"] == {"heads": 2} and small[1].heads == 2
    assert small[1].qkv.out_features == 12 and error_of(model, masks, small, tokens(3, 7), tokens(1, 2)) < 1e-9


def test_what_holds_on_to_the_model_keeps_working() -> None:
    """State-dict keys, the module object, its attributes, hooks and copies."""
    model = net()
    masks = attention_masks(model)
    keys, attention, calls = list(model.state_dict()), model[1], []
    attention.register_forward_hook(lambda m, a, out: calls.append(out.shape))
    attention.note = "mine"
    reference = masked(model, masks)
    engine.ModelSpeedup(model, tokens(), masks).speedup_model()
    calls.clear()
    found = run(model, tokens(3, 7))
    assert model[1] is attention and list(model.state_dict()) == keys and attention.note == "mine"
    assert calls == [(3, 7, 8)] and type(attention).__name__ == "Attention" and repr(model).count("Attention(") == 1
    assert relative_error(run(reference, tokens(3, 7)), found) < 1e-9
    twin = copy.deepcopy(model)
    assert relative_error(found, run(twin, tokens(3, 7))) == 0
    assert twin.load_state_dict(model.state_dict()) and type(twin[1]) is type(attention)


def test_train_mode_and_backward() -> None:
    """The small model trains as the masked one does: outputs and gradients of what is left agree."""
    model = net()
    masks = attention_masks(model)
    small, plan = compacted(model, masks, tokens())
    reference = masked(model, masks)
    for either in (reference, small):
        either.train()
        (either(tokens(3, 7)) ** 2).sum().backward()
    for name, parameter in small.named_parameters():
        old = reference.get_parameter(name).grad
        expected = plan.slices[name].apply(old) if name in plan.slices else old
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-12)


def test_a_compacted_model_is_compacted_again() -> None:
    """The second plan pins numbers in code that is pinned already, or keeps the heads; the result is exact."""
    model = net()
    small, _ = compacted(model, attention_masks(model), tokens())
    more = {"1.qkv": without_heads(small[1].qkv, [1], heads=2)}
    smaller, _ = compacted(small, more, tokens())
    assert error_of(small, more, smaller, tokens(3, 7)) < 1e-9


def test_rollback_restores_the_class() -> None:
    """And every number; it can be done again."""
    model = net()
    plan = analysis_of(model, tokens(), attention_masks(model)).plan
    state, before = snapshot(model), run(model, tokens())
    change = plan.prepare(model)
    change.commit()
    assert type(model[1]) is not Attention and model[1].qkv.out_features == 12
    change.rollback()
    assert type(model[1]) is Attention and unchanged(model, state) and "forward" not in vars(model[1])
    assert relative_error(before, run(model, tokens())) == 0


def with_pins(plan: engine.Plan, change: Callable[[Pin], Pin]) -> engine.Plan:
    """The plan with other pins."""
    exchanges = [dataclasses.replace(e, pins=tuple(map(change, e.pins))) for e in plan.of(Pinned)]
    return dataclasses.replace(plan, exchanges=tuple(exchanges))


def changed_hash(plan: engine.Plan) -> engine.Plan:
    """As if the code had been edited since."""
    return with_pins(plan, lambda p: dataclasses.replace(p, source="0" * 16))


def other_function(plan: engine.Plan) -> engine.Plan:
    """As if the method had another name now."""
    return with_pins(plan, lambda p: dataclasses.replace(p, function="call"))


def other_place(plan: engine.Plan) -> engine.Plan:
    """As if the call stood somewhere else."""
    return with_pins(plan, lambda p: dataclasses.replace(p, line=p.line + 1))


def other_module(plan: engine.Plan) -> engine.Plan:
    """As if the module had another name."""
    return dataclasses.replace(plan, exchanges=tuple(e.renamed("attention") for e in plan.exchanges))


@pytest.mark.parametrize("damage", [changed_hash, other_function, other_place, other_module])
def test_a_pin_for_other_code_is_refused(damage: Callable[[engine.Plan], engine.Plan]) -> None:
    """In one clear error that names the function or module, and nothing has been changed."""
    model = net()
    plan = analysis_of(model, tokens(), attention_masks(model)).plan
    state = snapshot(model)
    with pytest.raises(PlanError, match="forward|'call'|'attention'"):
        damage(plan).apply(model)
    assert unchanged(model, state) and type(model[1]) is Attention and model[1].qkv.out_features == 24


def test_a_plan_for_another_class_is_refused() -> None:
    """The same parameters in a class whose forward is written in other words."""
    model = net()
    plan = analysis_of(model, tokens(), attention_masks(model)).plan
    other = net(Rewritten)
    state = snapshot(other)
    with pytest.raises(PlanError, match="source of 'forward'"):
        plan.apply(other)
    assert unchanged(other, state) and type(other[1]) is Rewritten


def sizes_by_name(x: Tensor) -> Tensor:
    """Sizes that a call gets all at once, under one name."""
    shape = (x.shape[0], -1)
    return x.reshape(shape)


class BySizes(nn.Module):
    """Calls `sizes_by_name`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return rows."""
        return sizes_by_name(x)


def test_a_name_that_stands_for_several_sizes_is_no_size() -> None:
    """One of them cannot be pinned in its place."""
    node = next(n for n in engine.trace(BySizes(), image()).nodes if n.op in ("reshape", "view"))
    name = next(name for name, given in node.args.items() if isinstance(given, (list, tuple)))
    assert pin_of(node, (name, 0), 1, BySizes) is None


def test_a_call_without_a_place_has_no_pin() -> None:
    """Where it is not known where a call ends, the call is not edited, and its channels stay."""
    model = net()
    node = next(n for n in engine.trace(model, tokens()).nodes if n.op == "reshape")
    pin = pin_of(node, ("shape", 3), 2, Attention)
    assert pin is not None and (pin.module, pin.value, pin.function) == ("1", 2, "forward")
    nowhere = dataclasses.replace(node, site=dataclasses.replace(node.site, end=None))
    assert pin_of(nowhere, ("shape", 3), 2, Attention) is None
    assert pin_of(dataclasses.replace(node, site=None), ("shape", 3), 2, Attention) is None
    assert pin_of(node, ("shape", 9), 2, Attention) is None and pin_of(node, ("shape", 3), 2, nn.Linear) is None


def test_a_pinned_class() -> None:
    """A subclass with the same name, in which one number is another; defaults and line numbers are kept."""
    model = net(ByMethod)
    node = next(n for n in engine.trace(model, tokens()).nodes if n.op == "reshape")
    pin = pin_of(node, ("shape", 3), 2, ByMethod)
    assert pin is not None and pin.function == "split"
    made = pinned_class(ByMethod, [pin])
    assert (
        issubclass(made, ByMethod)
        and made.__qualname__ == ByMethod.__qualname__
        and made.__module__ == ByMethod.__module__
    )
    assert made.split.__defaults__ == (2,) and made.split.__kwdefaults__ == {"parts": 3}
    assert made.split.__code__.co_firstlineno == ByMethod.split.__code__.co_firstlineno
    assert made().split(torch.zeros(1, 5, 12))[0].shape == (1, 2, 5, 2)


@pytest.mark.parametrize("make", [Attention, Rewritten, ByFunction, ByMethod])
def test_heads_go_twice(make: Callable[[], nn.Module]) -> None:
    """What one compaction pinned the next one pins anew; one plan for both does the same to a fresh model."""
    fresh = net(make)
    model, together = copy.deepcopy(fresh), engine.Plan()
    for heads, closed in ((3, [1]), (2, [0]), (1, [1])):
        masks = {"1.qkv": without_heads(model[1].qkv, closed, heads + 1)}
        small, plan = compacted(model, masks, tokens())
        assert pins_of(plan) and small[1].out.weight.shape == (8, 2 * heads)
        assert error_of(model, masks, small, tokens(1, 1), tokens(3, 7)) < 1e-9
        model, together = small, together.then(plan)
    again = together.apply(copy.deepcopy(fresh))
    again.load_state_dict(model.state_dict())
    assert torch.equal(run(again, tokens(3, 7))[0], run(model, tokens(3, 7))[0])


def test_what_was_pinned_stays_pinned_when_others_go() -> None:
    """A later compaction of neurons behind the attention leaves its pins alone."""
    model = net()
    model = compacted(model, attention_masks(model), tokens())[0]
    masks = dead(model, {"2": [0, 3]}, bias=True)
    small, plan = compacted(model, masks, tokens())
    assert plan.slices["2.weight"].shape[0] == 4 and error_of(model, masks, small, tokens(3, 7)) < 1e-9

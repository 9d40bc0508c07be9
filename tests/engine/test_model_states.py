"""A model in any state is traced and planned, and tracing leaves no trace on it: every classifier of torchvision.

dtype, ``requires_grad``, modes, buffers, the objects themselves and the random state are what they were.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.sensitivity.importance import cut
from tests.engine import zoo
from tests.engine.exactness import Masks, parameters

CLASSIFIERS = zoo.names("classification")
QUICK = [name for name in zoo.FAMILIES if name in CLASSIFIERS]
DEEP = {"densenet121", "maxvit_t", "swin_v2_t"}  # over a second each
SMALL = ["shufflenet_v2_x0_5", "squeezenet1_1"]


def in_bf16(model: nn.Module) -> nn.Module:
    """Half precision, as a large model is trained in."""
    return model.to(torch.bfloat16)


def frozen(model: nn.Module) -> nn.Module:
    """Every other parameter is not trained."""
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    return model


def training(model: nn.Module) -> nn.Module:
    """In train mode, but for every third module."""
    for module in list(model.train().modules())[::3]:
        module.training = False
    return model


def everything(model: nn.Module) -> nn.Module:
    """All of it at once."""
    return training(frozen(in_bf16(model)))


STATES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bf16": in_bf16,
    "frozen": frozen,
    "train mode": training,
}


def example(name: str, model: nn.Module) -> Tensor:
    """Two images in the model's dtype, on its device."""
    parameter, size = next(model.parameters()), zoo.recipe(name).size
    return torch.zeros(2, 3, size, size, dtype=parameter.dtype, device=parameter.device)


def facts(model: nn.Module) -> Any:
    """Everything about a model that tracing could change; tensors by identity and number of writes."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return (
        [
            (name, id(t), t.data_ptr(), t._version, t.dtype, t.device, t.shape, t.stride(), t.requires_grad, t.grad)
            for name, t in tensors
        ],
        [(id(m), type(m), m.training, sorted(vars(m))) for m in model.modules()],
        torch.get_rng_state().tolist(),
        torch.backends.mha.get_fastpath_enabled(),
    )


def half(model: nn.Module, groups: list[engine.Group]) -> Masks:
    """Mask the first half of each group."""
    keep = {g.name: cut(torch.arange(g.size), 0.5, g.rows) for g in groups if g.reason is None}
    return engine.group_masks(groups, keep)


def check(name: str, model: nn.Module) -> None:
    """Trace and plan, with no trace on the model; the small one is in the state that the large one was in."""
    images, before = example(name, model), facts(model)
    graph = engine.trace(model, images)
    assert facts(model) == before
    groups = engine.dependency_groups(model, images, graph=graph)
    masks = half(model, groups)
    predicted = engine.count_flops_params(model, images, verbose=False, masks=masks, graph=graph)
    assert facts(model) == before
    small = copy.deepcopy(model)
    state = [(n, p.dtype, p.device, p.requires_grad) for n, p in small.named_parameters()]
    modes = [m.training for m in small.modules()]
    speedup = engine.ModelSpeedup(small, images, masks, confidence=0)
    speedup.speedup_model()
    assert [(n, p.dtype, p.device, p.requires_grad) for n, p in small.named_parameters()] == state
    assert [m.training for m in small.modules()] == modes
    assert parameters(small) == predicted[1] <= 0.55 * parameters(model)
    assert facts(model) == before


def test_every_classifier_is_there() -> None:
    """All 80 of torchvision, and one of each of their files at least in the quick set."""
    assert len(set(CLASSIFIERS)) == 80 and set(map(zoo.family_of, QUICK)) == set(map(zoo.family_of, CLASSIFIERS))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in DEEP)) for n in QUICK])
def test_one_of_each_architecture_is_traced(name: str) -> None:
    """On meta, in bf16, with frozen layers, partly in train mode, all at once."""
    model = everything(zoo.on_meta(name))
    before = facts(model)
    assert engine.trace(model, example(name, model)).nodes
    assert facts(model) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_every_classifier_is_planned(name: str) -> None:
    """The same for all of them, and half of the units of each group go."""
    check(name, everything(zoo.on_meta(name)))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("state", STATES)
def test_with_data(name: str, state: str) -> None:
    """Each state by itself, on tensors with data."""
    model = STATES[state](zoo.make(name))
    values = {n: t.clone() for n, t in model.state_dict().items()}
    check(name, model)
    assert all(torch.equal(t, values[n]) for n, t in model.state_dict().items())


def test_the_check_notices_a_change() -> None:
    """Of a dtype, a mode, a flag, a buffer, an attribute and the random state."""
    changes: list[Callable[[nn.Module], Any]] = [
        lambda m: m.half(),
        lambda m: m[1].eval(),
        lambda m: m[0].weight.requires_grad_(False),
        lambda m: m[1].running_mean.add_(0),
        lambda m: m[1].register_buffer("running_var", m[1].running_var.clone()),
        lambda m: setattr(m, "calls", 1),
        lambda m: torch.rand(1),
    ]
    for change in changes:
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        before = facts(model)
        assert facts(model) == before
        change(model)
        assert facts(model) != before

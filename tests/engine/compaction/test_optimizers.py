"""Training on after a compaction in the middle: as with masks, or refused by name of the reason."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import engine
from engine.compaction.optimizers import check_entrywise
from engine.errors import PlanError

REFUSED = {
    "Adafactor": "depending on the other entries|keeps",
    "LBFGS": "cannot be tested",
    "Muon": "depending on the other entries|cannot be tested",
    "SparseAdam": "cannot be tested",
}
CLASSES = sorted(
    name for name, cls in vars(torch.optim).items() if isinstance(cls, type) and issubclass(cls, Optimizer)
)
PACKAGES = [
    ("lion_pytorch", "Lion", None),
    ("schedulefree", "AdamWScheduleFree", None),
    ("torch_optimizer", "Lamb", "depending on the other entries"),
    ("torch_optimizer", "Shampoo", "depending on the other entries|cannot be tested"),
]


def network() -> nn.Sequential:
    """Two layers without biases, so that optimizers of matrices take all parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)).double()


def trained(make: Callable[[Any], Optimizer], cut: bool) -> torch.Tensor:
    """What the network puts out after six steps, of which the last three are without the masked channels."""
    model, mask = network(), torch.tensor([1.0, 0, 1, 1, 0, 0, 1, 1]).double().view(8, 1)
    x, y = torch.randn(16, 6).double(), torch.randn(16, 3).double()
    optimizer = make(model.parameters())
    if hasattr(optimizer, "train"):
        optimizer.train()
    model[0].weight.data.mul_(mask)
    for step in range(6):
        if cut and step == 3:
            engine.ModelSpeedup(model, x[:2], {"0": {"weight": mask.expand(8, 6)}}).speedup_model(
                optimizer=optimizer, training=True
            )
            assert model[0].out_features == 5
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        if model[0].weight.shape[0] == 8:
            model[0].weight.grad.mul_(mask)
        optimizer.step()
        if model[0].weight.shape[0] == 8:
            model[0].weight.data.mul_(mask)
    with torch.no_grad():
        out: torch.Tensor = model(x)
    return out


def check(make: Callable[[Any], Optimizer], refused: str | None) -> None:
    """Both trainings agree, or the second is refused."""
    if refused is not None:
        optimizer = make(network().parameters())
        with pytest.raises(PlanError, match=refused):
            check_entrywise(optimizer, optimizer.param_groups[0], 2, "0.weight")
        return
    torch.manual_seed(1)
    masked = trained(make, cut=False)
    torch.manual_seed(1)
    assert float((trained(make, cut=True) - masked).abs().max()) <= 1e-9


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "Optimizer"])
def test_every_optimizer_of_torch(name: str) -> None:
    """Equal to 1e-9, or refused: none is trusted by its name."""
    check(lambda parameters: getattr(torch.optim, name)(parameters, lr=0.01), REFUSED.get(name))


@pytest.mark.parametrize(("package", "name", "refused"), PACKAGES)
def test_optimizers_of_packages(package: str, name: str, refused: str | None) -> None:
    """The same of some that come from elsewhere."""
    module = pytest.importorskip(package)
    check(lambda parameters: getattr(module, name)(parameters, lr=0.01), refused)


class ByNorm(torch.optim.SGD):
    """A step of a length of its own: it divides by the norm of the parameter."""

    def step(self, closure: Any = None) -> None:
        """Update in place."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(group["lr"] * parameter.grad / parameter.data.norm())


class Needing(torch.optim.SGD):
    """It cannot be made from options alone."""

    def __init__(self, parameters: Any, model: nn.Module) -> None:
        super().__init__(parameters, lr=0.1)


class Sometimes(torch.optim.SGD):
    """SGD that scales by the norm of the parameter, from a step on, every so many steps, or beyond a limit."""

    def __init__(self, *args: Any, start: int = 0, every: int = 1, limit: float = 0.0, shared: bool = False, **kw: Any):
        super().__init__(*args, **kw)
        for group in self.param_groups:
            group |= {"start": start, "every": every, "limit": limit, "shared": shared, "k": group.get("k", 0)}

    def step(self, closure: Any = None) -> None:
        """A step, counted in the group or in the state of the parameter."""
        for group in self.param_groups:
            for parameter in group["params"]:
                counter = group if group["shared"] else self.state[parameter]
                counter["k"] = counter.get("k", 0) + 1
                if counter["k"] > group["start"] and counter["k"] % group["every"] == 0:
                    norm = parameter.detach().norm()
                    if norm > group["limit"]:
                        parameter.grad.div_(norm)
        super().step()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("options", [{"start": 10}, {"start": 10**6}, {"every": 100}, {"every": 16}, {"limit": 500.0}])
def test_what_happens_now_and_then(options: dict[str, Any], shared: bool) -> None:
    """An update that looks at other entries late, seldom, or only of large weights."""
    optimizer = Sometimes(network().parameters(), lr=0.1, shared=shared, **options)
    with pytest.raises(PlanError, match="depending on the other entries"):
        check_entrywise(optimizer, optimizer.param_groups[0], 2, "weight")


def test_by_what_it_does_and_not_by_name() -> None:
    """A subclass of SGD that looks at the whole parameter; and one that cannot be tested."""
    check(lambda parameters: ByNorm(parameters, lr=0.01), "depending on the other entries")
    check(lambda parameters: Needing(parameters, network()), "cannot be tested")


def test_nothing_is_changed_by_the_trial() -> None:
    """The optimizer, its parameters and the random numbers are as they were."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    before, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    check_entrywise(optimizer, optimizer.param_groups[0], 2, "0.weight")
    assert all(map(torch.equal, before, model.parameters())) and not optimizer.state
    assert torch.equal(state, torch.get_rng_state())


def test_the_packages_are_what_they_are_called() -> None:
    """Names of the cases above, where the packages are installed."""
    for package, name, _ in PACKAGES:
        if importlib.util.find_spec(package) is not None:
            assert hasattr(importlib.import_module(package), name)

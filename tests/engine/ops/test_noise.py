"""Random numbers for each entry of a tensor: whole in eval mode, as narrow as the tensor while training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import engine
from tests.engine.exactness import check_exact, randomised
from tests.engine.nets import Net, dead, image
from tests.engine.ops.brute import check_labels

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform": lambda x: torch.empty_like(x).uniform_(0.5, 1.5),
    "normal": lambda x: torch.empty_like(x).normal_(1.0, 0.1),
    "exponential": lambda x: torch.zeros_like(x).exponential_(),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 1, 3),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_in_eval_mode_keep_their_size(name: str) -> None:
    """A seed gives the same numbers afterwards, so nothing that is drawn for goes; the reason says so."""
    check_labels(lambda x: x * 0 * DRAWS[name](x), classes=0)
    model = randomised(Net(lambda m, x: m.head(m.stem(x) * DRAWS[name](m.stem(x))), **_parts()))
    reasons = [group.reason or "" for group in engine.dependency_groups(model, image())]
    assert any("draws a random number for each entry" in reason for reason in reasons)


@pytest.mark.parametrize("name", DRAWS)
def test_draws_while_training_are_as_narrow_as_what_they_meet(name: str) -> None:
    """Jitter of training alone, as routers of experts have, keeps no channels."""

    def forward(m: Net, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head(x * DRAWS[name](x) if m.training else x)

    model = randomised(Net(forward, **_parts()))
    plan = check_exact(model, dead(model, {"stem": [0, 3]}, bias=True), image())
    assert plan.slices["stem.weight"].shape[0] == 6
    assert model.train()(image()).isfinite().all()


def _parts() -> dict[str, nn.Module]:
    return {"stem": nn.Conv2d(3, 8, 1), "head": nn.Conv2d(8, 4, 1)}

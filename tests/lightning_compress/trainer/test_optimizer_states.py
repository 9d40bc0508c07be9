"""States of optimizers that cannot be narrowed, at the end of a fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_compress import ChannelPruning, MaskConflictRepair, ModelCompaction, load_compacted
from lightning_compress.trainer.optimizer_states import narrowed_along
from tests.lightning_compress.models import Reference, Wrapped, fit, seeded


class _Normalized(torch.optim.SGD):
    """Divides gradients by their norm; the constructor takes an argument that no group holds."""

    def __init__(self, params: Any, radius: float, **options: Any) -> None:
        self.radius = radius
        super().__init__(params, **options)

    def step(self, closure: Any = None) -> Any:
        """Scale the gradients of each parameter, then do what SGD does."""
        result = None if closure is None else torch.enable_grad()(closure)()
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.grad.mul_(self.radius / (parameter.grad.norm() + 1e-6))
        super().step()
        return result


class _Shared(Wrapped):
    """Trained by an optimizer whose update of an entry depends on the others."""

    def configure_optimizers(self) -> Any:
        return _Normalized(self.parameters(), 0.1, lr=0.1, momentum=0.9)


def test_at_the_end_any_optimizer_will_do(tmp_path: Path) -> None:
    """The state of one that cannot be narrowed is emptied, with a warning; the checkpoint loads again."""
    module, reference, compaction = seeded(_Shared), Reference(), ModelCompaction(on_failure="raise")
    with pytest.warns(UserWarning, match="The state of _Normalized cannot be narrowed"):
        fit(module, tmp_path, reference, ChannelPruning(amount=0.5), MaskConflictRepair(), compaction,
            precision="64-true")  # fmt: skip
    assert reference.error(module) <= 1e-9
    assert not module.trainer.optimizers[0].state
    assert load_compacted(compaction.checkpoint_path, _Shared).net.stem.weight.shape == module.net.stem.weight.shape


def test_a_state_stays_where_nothing_is_narrowed() -> None:
    """A fit without masks ends with the state that it has."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.LBFGS([weight])
    optimizer.step(lambda: weight.sum())  # type: ignore[arg-type, return-value]
    with narrowed_along([optimizer], training=False) as narrowed:
        assert not narrowed
    assert optimizer.state

"""Lightning's own ModelPruning under repair and compaction: exact, and its known faults no worse than without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelPruning
from torch import nn

import engine
from lightning_compress import MaskConflictRepair, ModelCompaction
from tests.lightning_compress.models import Reference, Wrapped, fit, seeded, trainer


def structured(module: Wrapped, **options: Any) -> ModelPruning:
    """Whole channels of every convolution, half of them after the first epoch."""
    settings: dict[str, Any] = {
        "parameters_to_prune": [(m, "weight") for m in module.net.modules() if isinstance(m, nn.Conv2d)],
        "pruning_fn": "ln_structured",
        "pruning_dim": 0,
        "pruning_norm": 1,
        "amount": lambda epoch: 0.5 if epoch == 0 else 0.0,
        "use_lottery_ticket_hypothesis": False,
        "use_global_unstructured": False,
    }
    return ModelPruning(**{**settings, **options})


def dead(module: Wrapped) -> dict[str, int]:
    """Channels of each convolution that are all zero."""
    found = {name: m.weight.detach().flatten(1) for name, m in module.net.named_modules() if isinstance(m, nn.Conv2d)}
    return {name: int((weight == 0).all(1).sum()) for name, weight in found.items()}


RANDOM = {"pruning_fn": "random_structured", "pruning_norm": None}


@pytest.mark.parametrize("policy", ["union", "intersection", "score"])
@pytest.mark.parametrize("options", [{}, {"pruning_norm": 2}, RANDOM], ids=str)
def test_it_compacts_exactly(tmp_path: Path, policy: str, options: dict[str, Any]) -> None:
    """Masks of all layers, coupled ones included, repaired by each policy: the small network computes the same."""
    module, reference, compaction = seeded(Wrapped), Reference(), ModelCompaction(on_failure="raise", save=False)
    before = engine.count_flops_params(module.net, (1, 3, 8, 8), verbose=False)
    callbacks = [reference, structured(module, **options), MaskConflictRepair(policy=policy), compaction]
    fit(module, tmp_path, *callbacks, precision="64-true")
    assert reference.error(module) <= 1e-9
    assert compaction.certificate is not None and compaction.certificate.verified
    assert engine.count_flops_params(module.net, (1, 3, 8, 8), verbose=False)[0] < 0.75 * before[0]


def test_with_its_lottery_ticket(tmp_path: Path) -> None:
    """By default it sets the weights back to their first values: that compacts exactly too, in its float32."""
    module, reference = seeded(Wrapped), Reference()
    pruning = structured(module, use_lottery_ticket_hypothesis=True)
    fit(module, tmp_path, reference, pruning, MaskConflictRepair(), ModelCompaction(on_failure="raise", save=False))
    assert reference.error(module) <= 1e-4 and module.net.wide.out_channels == 8


@pytest.mark.parametrize("repaired", [False, True])
def test_a_constant_amount_compounds(tmp_path: Path, repaired: bool) -> None:
    """Half of what is left goes after each of three epochs: 14 of 16 channels; with the repair not one more."""
    module = seeded(Wrapped)
    fit(module, tmp_path, structured(module, amount=0.5), *([MaskConflictRepair()] if repaired else []))
    found = dead(module)
    assert found["wide"] == 14
    assert found["stem"] <= 7 and found["back"] <= 7


@pytest.mark.parametrize("repaired", [False, True])
def test_it_forgets_its_masks_on_resume(tmp_path: Path, repaired: bool) -> None:
    """Resumed, it masks no more, and its zeros train away; what the repair had added stays masked with the layer."""
    first, second = seeded(Wrapped), seeded(Wrapped)
    more = [MaskConflictRepair()] if repaired else []
    stopped = fit(first, tmp_path, structured(first), *more, max_epochs=2)
    stopped.save_checkpoint(tmp_path / "last.ckpt")
    again = [structured(second), *([MaskConflictRepair()] if repaired else [])]
    trainer(tmp_path, *again, max_epochs=4).fit(second, ckpt_path=str(tmp_path / "last.ckpt"))
    assert dead(second)["wide"] == (8 if repaired else 0)


def test_norms_have_to_be_left_out(tmp_path: Path) -> None:
    """Without `parameters_to_prune` it fails on the vectors of the norms, in torch and before anything of ours."""
    module = seeded(Wrapped)
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        fit(module, tmp_path, structured(module, parameters_to_prune=None), MaskConflictRepair(), max_epochs=1)
    assert torch.isfinite(module.net.wide.weight).all()

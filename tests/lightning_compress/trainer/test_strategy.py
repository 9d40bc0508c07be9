"""Strategies that keep each parameter whole are accepted, others are refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

from lightning_compress.trainer.packages import MisconfigurationException
from lightning_compress.trainer.strategy import check_strategy


@pytest.mark.parametrize("strategy", [FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy])
def test_sharding_strategies_are_refused(strategy: type) -> None:
    """FSDP, DeepSpeed and model parallelism are errors that say what works, subclasses included."""
    subclass = type("Mine", (strategy,), {})
    for cls in (strategy, subclass):
        holder = SimpleNamespace(strategy=object.__new__(cls))
        with pytest.raises(MisconfigurationException, match=f"{cls.__name__}.*offline.*ddp"):
            check_strategy(holder)


def test_ddp_and_subclasses_are_accepted() -> None:
    """DDP and what derives from it works."""
    for cls in (DDPStrategy, type("Mine", (DDPStrategy,), {})):
        check_strategy(SimpleNamespace(strategy=object.__new__(cls)))

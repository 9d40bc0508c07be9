"""What depends on how parameters are spread over processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_compress.trainer.packages import MisconfigurationException

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

__all__ = ["SHARDING", "SUPPORTED", "check_strategy"]

# Strategies that shard or flatten parameters: a channel is then no slice of any one tensor.
SHARDING = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")
SUPPORTED = ("SingleDeviceStrategy", "DDPStrategy")


def check_strategy(trainer: Trainer) -> None:
    """Refuse strategies under which channels cannot be masked or removed.

    Raises:
        MisconfigurationException: for FSDP, DeepSpeed and model parallelism, and for strategies that derive from
            neither the single-device nor the DDP strategy.
    """
    names = [cls.__name__ for cls in type(trainer.strategy).__mro__]
    if any(name in SHARDING for name in names) or not any(name in SUPPORTED for name in names):
        raise MisconfigurationException(
            f"Compression works on one device and with DDP, not under `{names[0]}`, which does not keep each parameter "
            "whole on every device. Train without these callbacks there and compact the checkpoint offline "
            "(`lightning_compress.compact_checkpoint`), or choose `strategy='ddp'`."
        )

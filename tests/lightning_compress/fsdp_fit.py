"""Training under FSDP on CPU processes, and a sharded checkpoint in Lightning's layout. Started by test_offline.py.

Lightning's own FSDPStrategy wants a GPU; what it writes is ``{"model": weights}`` by torch.distributed.checkpoint, and
the rest of the checkpoint in ``meta.pt``.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from tests.lightning_compress.models import Wrapped, data, seeded


def train(rank: int, folder: str) -> None:
    """One process."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    module = seeded(Wrapped)
    keep = (torch.arange(16) % 2).float()
    fully_shard(module.net, mesh=mesh)
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    for batch in data():
        module.training_step(batch, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for layer in (module.net.wide, module.net.wide_norm):
            for parameter in layer.parameters():
                mask = keep.view(-1, *[1] * (parameter.ndim - 1)).expand(parameter.shape).contiguous()
                parameter.mul_(distribute_tensor(mask, mesh, parameter.placements))
    dcp.save({"model": module.state_dict()}, checkpoint_id=Path(folder, "sharded.ckpt"))
    if rank == 0:
        rest = {"epoch": 1, "hyper_parameters": dict(module.hparams), "pytorch-lightning_version": "2.4.0"}
        torch.save(rest, Path(folder, "sharded.ckpt", "meta.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    mp.spawn(train, (sys.argv[1],), 2)

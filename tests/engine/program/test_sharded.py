"""Parameters that are spread over processes: refused before anything is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.program.sharded import why_sharded

ROOT = Path(__file__).parents[3]
CODE = """
import copy, sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module, distribute_tensor
import engine

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

def sharded(kind):
    if kind == "tensor":
        return distribute_module(net(), mesh)
    return fully_shard(net(), mesh=mesh)

x, mask = torch.ones(1, 4), (torch.arange(8) % 2).view(8, 1)
masks = {"0": {"weight": mask.expand(8, 4), "bias": mask[:, 0]}}
small = net()
engine.ModelSpeedup(small, x, masks).speedup_model()
torch.save(small.state_dict(), sys.argv[1])

def check(kind):
    model = sharded(kind)
    before = {name: (tensor, type(tensor), tensor._version) for name, tensor in model.named_parameters()}
    ways = {
        "trace": lambda: engine.trace(model, x),
        "groups": lambda: engine.dependency_groups(model, x),
        "count": lambda: engine.count_flops_params(model, x),
        "repair": lambda: engine.fix_mask_conflict(masks, model, x),
        "speedup": lambda: engine.ModelSpeedup(model, x, masks),
        "plan": lambda: engine.Plan().apply(model),
        "load": lambda: engine.load_compacted_state(model, sys.argv[1]),
    }
    for name, way in ways.items():
        try:
            way()
        except engine.errors.EngineError as error:
            print(kind, name, "refused" if "spread over several processes" in str(error) else error)
        else:
            print(kind, name, "went through")
    after = {name: (tensor, type(tensor), tensor._version) for name, tensor in model.named_parameters()}
    same = all(after[name][0] is entry[0] and after[name][1:] == entry[1:] for name, entry in before.items())
    print(kind, "as before", same and before.keys() == after.keys())
    model(distribute_tensor(x, mesh) if kind == "tensor" else x).sum().backward()
    print(kind, "trains", all(parameter.grad is not None for parameter in model.parameters()))

check("tensor")
check("fsdp2")
dist.destroy_process_group()
"""
WAYS = ("trace", "groups", "count", "repair", "speedup", "plan", "load")


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a process says of both kinds: to start one takes longer than all that it does."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", CODE, str(tmp_path_factory.mktemp("sharded") / "small.pt")]
    out = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    assert out.returncode == 0, out.stdout + out.stderr
    return out.stdout.splitlines()


@pytest.mark.parametrize("kind", ["tensor", "fsdp2"])
def test_whatever_looks_at_a_spread_model_refuses_it(kind: str, lines: list[str]) -> None:
    """DTensors, and FSDP of the second kind, whose parameters are DTensors: nothing of the model is touched."""
    expected = [f"{kind} {way} refused" for way in WAYS] + [f"{kind} as before True", f"{kind} trains True"]
    assert [line for line in lines if line.startswith(kind)] == expected


def test_the_first_kind_of_fsdp() -> None:
    """Its parameters are plain, and parts of them are missing: the class of the module says so."""
    kind = type("FullyShardedDataParallel", (nn.Module,), {"__module__": "torch.distributed.fsdp.fully_sharded"})
    assert "'0' is a FullyShardedDataParallel" in str(why_sharded(nn.Sequential(kind())))


def test_a_plain_model() -> None:
    """Nothing is said of it, nor of one under DDP's name."""
    assert why_sharded(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))) is None
    assert why_sharded(nn.Module()) is None and torch.distributed.is_available()

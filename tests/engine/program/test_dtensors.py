"""Tensors that are spread over two processes, and models whose parameters are: gathered, exchanged, without data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.errors import PlanError
from engine.program.dtensors import FSDPModule, has_shards, local, owners, placeholders, spread, whole

ROOT = Path(__file__).parents[3]
CODE = """
import sys, tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from engine.program.dtensors import Resized, has_shards, local, owners, parts, placeholders, resharded, spread, whole

KEEP = torch.tensor([0, 2, 3, 5, 8])

def net():
    torch.manual_seed(0)
    layers = nn.Linear(5, 9), nn.Tanh(), nn.Sequential(nn.Linear(9, 7), nn.Tanh()), nn.Linear(7, 3)
    return nn.Sequential(*layers).double()

def step(model, optimizer, seed):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).double()
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()

def check(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(15.0).view(5, 3)
    shard = distribute_tensor(full, mesh, [Shard(0)])
    assert torch.equal(whole(shard), full) and torch.equal(local(spread(full, shard)), shard.to_local())
    assert local(shard).data_ptr() == shard.to_local().data_ptr() and len(local(shard)) == 3 - rank
    assert parts(shard, {}) == {0: 2}
    model, reference = net(), net()
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    one, other = (torch.optim.AdamW(m.parameters(), 0.1) for m in (model, reference))
    for seed in range(3):
        step(model, one, seed)
        step(reference, other, seed)
    with torch.no_grad():
        model(torch.ones(1, 5).double())  # the root keeps what it gathered
    resharded(model)
    assert has_shards(model) and len(owners(model)) == 6
    assert not any(parts(parameter, owners(model)) for parameter in model.parameters())  # FSDP2 gathers them
    parameters, plain = dict(model.named_parameters()), dict(reference.named_parameters())
    changes = []
    for name, dim in {"0.weight": 0, "0.bias": 0, "2.0.weight": 1}.items():
        parameter, old = parameters[name], plain[name]
        new = whole(parameter).index_select(dim, KEEP)
        changes.append(Resized.of(parameter, new, None, owners(model)))
        state = one.state[parameter]
        for key, value in list(state.items()):
            state[key] = spread(whole(value).index_select(dim, KEEP), changes[-1].other) if value.ndim else value
        small = nn.Parameter(old.detach().index_select(dim, KEEP))
        other.state[small] = {k: v.index_select(dim, KEEP) if v.ndim else v for k, v in other.state.pop(old).items()}
        group = other.param_groups[0]["params"]
        group[[p is old for p in group].index(True)] = small
        owner, _, key = name.rpartition(".")
        setattr(reference.get_submodule(owner), key, small)
    for _ in range(3):  # forth, back and forth
        for change in changes:
            change.exchange()
    for change in changes:
        change.drop()
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    for seed in range(3, 6):
        step(model, one, seed)
        step(reference, other, seed)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    assert max(float((whole(a) - b).abs().max().detach()) for a, b in pairs) < 1e-12
    model.load_state_dict(model.state_dict())  # FSDP2's own hooks
    with placeholders(model):
        assert not has_shards(model) and not isinstance(model, FSDPModule)
        assert all(parameter.is_meta for parameter in model.parameters())
        assert model(torch.ones(2, 5, device="meta", dtype=torch.float64)).shape == (2, 3)
    assert isinstance(model, FSDPModule) and has_shards(model)
    step(model, one, 7)
    with placeholders(model, runs=False):
        model[2].__class__ = type("Renamed", (nn.Sequential,), {})
    assert type(model[2]).__name__ == "FSDPRenamed" and isinstance(model[2], FSDPModule)
    step(model, one, 8)
    dist.barrier()  # or one rank ends while the other still waits for it, and gloo aborts
    dist.destroy_process_group()

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(check, (folder,), 2)
    print("done")
"""


def test_two_processes(tmp_path: Path) -> None:
    """A parameter that is exchanged under FSDP2 trains on as a small one does; private names of torch are as known."""
    script = tmp_path / "check.py"
    script.write_text(CODE)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", str(script)]
    out = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env, timeout=170)
    assert out.stdout.endswith("done\n"), out.stdout + out.stderr[-3000:]


def test_plain_tensors() -> None:
    """They are whole, and hold what they hold."""
    tensor, net = torch.ones(2), nn.Linear(2, 2)
    assert whole(tensor) is tensor and local(tensor) is tensor and spread(tensor, tensor) is tensor
    assert not has_shards(net) and not owners(net)


def test_placeholders_come_and_go() -> None:
    """The model's own parameters, buffers and hooks are back afterwards; attributes that were set stay."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    with placeholders(net):
        assert all(tensor.is_meta for tensor in (*net.parameters(), *net.buffers()))
        net[0].out_features = 1
    after = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    assert all(after[name] is tensor for name, tensor in before.items()) and net[0].out_features == 1


def test_another_torch() -> None:
    """Where torch keeps its shards otherwise, the error says what works."""

    kind = nn.Linear(1, 1)
    kind.__class__ = type("Odd", (FSDPModule, nn.Linear), {"_get_fsdp_state": lambda self: object()})
    with pytest.raises(PlanError, match="compact_checkpoint"):
        owners(kind)

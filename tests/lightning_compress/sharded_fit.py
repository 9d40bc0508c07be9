"""A fit whose parameters are spread over CPU processes, or the same fit in one; each process writes what it holds.

Started by test_sharded.py: ``python sharded_fit.py FOLDER MODEL OPTIMIZER MESH [CHECKPOINT]``. The mesh is the number
of FSDP2's processes, or that and tensor parallelism's (``2x2``). The fit saves a checkpoint after the compaction in the
middle, and goes on from one that it is given. Processes are forked, as most of the time of small fits goes to imports.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

from engine.program.dtensors import Resized
from lightning_compress import (
    ChannelPruning,
    Compensation,
    ComplexityMonitor,
    CompressionReport,
    MaskConflictRepair,
    ModelCompaction,
)
from lightning_compress.trainer.quiet import is_quiet
from tests.lightning_compress.ddp_fit import Smooth
from tests.lightning_compress.models import seeded, trainer

WORDS, LENGTH = 12, 8


class Attention(nn.Module):
    """Grouped queries: two heads of queries share one of keys and values."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Causal attention."""
        b, n, _ = x.shape
        q, k, v = (p(x).view(b, n, -1, self.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(b, n, -1))


class Layer(nn.Module):
    """Of a decoder like Llama."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, kv_heads=heads // 2)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and a gated network."""
        x = x + self.attention(self.attention_norm(x))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """Words to the next words."""

    def __init__(self, width: int = 8, heads: int = 4, hidden: int = 17) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Layer(width, heads, hidden) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Encoder(nn.Module):
    """Layer norms, torch's own attention, and embeddings that are the output layer, too."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 13, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def split(net: Decoder, mesh: DeviceMesh) -> None:
    """Tensor and sequence parallelism."""
    outer = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    inner = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **{f"attention.{name}_proj": ColwiseParallel() for name in "qkv"},
        "attention.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(),
        "gate": ColwiseParallel(input_layouts=Shard(1)),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(net, mesh, outer)
    for layer in net.layers:
        parallelize_module(layer, mesh, inner)


# Tensor parallelism wants multiples of its number of processes, times the size of a head.
# `ChannelPruning` sees to that; to compare, a fit in one process has to be told.
ROUND_TO = {"heads": 4, "many heads": 8}
MODELS = {
    "decoder": Decoder,
    "heads": partial(Decoder, width=16, heads=8, hidden=16),
    "free heads": partial(Decoder, width=16, heads=8, hidden=18),
    "many heads": partial(Decoder, width=32, heads=16, hidden=32),
    "encoder": Encoder,
    "cnn": Smooth,
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
}


POLICIES: dict[str | None, dict[str, Any]] = {
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "mixed": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}


class Spread(LightningModule):
    """Eight samples a step, on however many processes; images are the same on all, as batch norms look at them."""

    def __init__(
        self,
        model: str = "decoder",
        optimizer: str = "sgd",
        spread: bool = True,
        same_data: bool = False,
        policy: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        # The strategy has no plugin for double precision.
        self.net = MODELS[model]().to(torch.float32 if policy == "mixed" else torch.float64)

    def configure_model(self) -> None:
        """Shard each layer, and the rest."""
        if self.hparams.spread and self.device_mesh is not None:
            mesh = self.device_mesh["data_parallel"]
            if self.device_mesh["tensor_parallel"].size() > 1:
                split(self.net, self.device_mesh["tensor_parallel"])
                if mesh.size() == 1:
                    return
            for module in (*getattr(self.net, "layers", []), self.net):
                fully_shard(module, mesh=mesh, **POLICIES.get(self.hparams.policy, {}))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(self.net(batch[0]).flatten(0, -2), batch[1].flatten())

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """A value to monitor."""
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """By its name."""
        return OPTIMIZERS[self.hparams.optimizer.removesuffix("+")](self.parameters())

    def train_dataloader(self) -> DataLoader:
        """Random samples in their order."""
        generator = torch.Generator().manual_seed(0)
        ranks, rank = 1, 0
        if self.hparams.model == "cnn":
            x, y = torch.randn(24, 3, 8, 8, generator=generator).double(), torch.randint(3, (24,), generator=generator)
        else:
            x = torch.randint(WORDS, (24, LENGTH), generator=generator)
            y = x.roll(-1, 1)
            if torch.distributed.is_initialized() and self.device_mesh is not None and not self.hparams.same_data:
                mesh = self.device_mesh["data_parallel"]
                ranks, rank = mesh.size(), mesh.get_local_rank()
        return DataLoader(TensorDataset(x[rank::ranks], y[rank::ranks]), batch_size=8 // ranks)

    val_dataloader = train_dataloader


def gathered(tensor: Tensor) -> Tensor:
    """A copy of all of a tensor."""
    return (tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()).clone()


class Record(Callback):
    """Keeps weights and masks after each step, and writes them when the fit is over."""

    def __init__(self, folder: Path, pruning: ChannelPruning, compaction: ModelCompaction) -> None:
        self.folder, self.pruning, self.compaction = folder, pruning, compaction
        self.others: list[Any] = []
        self.steps: list[dict[str, Tensor]] = []
        self.notes: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep what the fit starts from."""
        if is_quiet(pl_module):
            return
        self.notes["start"] = {name: gathered(value) for name, value in pl_module.state_dict().items()}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        """Keep; not while steps are recorded, or all that is kept would have to stay whole."""
        if is_quiet(pl_module):
            return
        masks = {f"{m}.{n} mask": mask.clone() for m, own in self.pruning.masks.items() for n, mask in own.items()}
        self.steps.append({k: gathered(v) for k, v in pl_module.state_dict().items()} | masks)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save after nine steps, three epochs: code that reads `current_epoch` is recorded at other epochs, too."""
        if len(self.steps) == 9 and not is_quiet(pl_module):
            trainer.save_checkpoint(self.folder / "middle.ckpt")
            if pl_module.hparams.model != "cnn":
                words = torch.arange(4 * LENGTH).view(4, LENGTH) % WORDS
                with torch.no_grad():
                    self.notes |= {"words": words, "outputs": gathered(pl_module.net(words))}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Die in the last compaction, if that is what is tried."""
        if os.environ.get("KILLED_RANK") == str(trainer.global_rank):
            kill_in_compaction()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write."""
        states = [gathered(value) for o in trainer.optimizers for s in o.state.values() for value in s.values()]
        result = {
            **self.notes,
            "steps": self.steps,
            "weights": {name: gathered(value) for name, value in pl_module.state_dict().items()},
            "states": states,
            "path": self.compaction.checkpoint_path,
            "certificate": self.compaction.certificate.state_dict(),
            "kept": {name: cut.shape for name, cut in self.compaction.plan.slices.items()},
            "surveys": [
                survey.state_dict()
                for other in self.others
                if isinstance(other, CompressionReport) and other.report is not None
                for survey in (other.report.before, other.report.after)
            ],
            "fitted": [name for row in self.fitted() for name in row.layers],
        }
        torch.save(result, self.folder / f"rank{trainer.global_rank}.pt")

    def fitted(self) -> list[Any]:
        """What the last compensation did."""
        return [
            row for other in self.others if isinstance(other, Compensation) for row in (other.report or {}).values()
        ]


def run(folder: Path, model: str, optimizer: str, mesh: str = "1", checkpoint: str | None = None) -> None:
    """Fit, pruning in three epochs, compacting in the third and at the end.

    Args:
        folder: where each process writes.
        model: one of `MODELS`; with options behind it (``, norms`` or ``, least_squares`` for `Compensation`,
            ``, mixed`` or ``, offload`` for FSDP2) the data are the same everywhere, with `CompressionReport`.
        optimizer: one of `OPTIMIZERS`; ``sgd+`` accumulates and clips.
        mesh: processes.
        checkpoint: where to go on.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, *options = model.split(", ")
    policy = next((option for option in options if option in POLICIES), None)
    method = next((option for option in options if option not in POLICIES), None)
    data, tensor = map(int, f"{mesh}x1".split("x")[:2])
    devices = data * tensor
    round_to = ROUND_TO.get(model, 1)
    pruning = ChannelPruning("l2", amount=0.5, schedule="linear", start=0, end=3, round_to=round_to)
    compaction = ModelCompaction(when=2, on_failure="raise")
    spread = devices > 1 or checkpoint is not None
    module = seeded(Spread, model=model, optimizer=optimizer, spread=spread, same_data=bool(options), policy=policy)
    record = Record(folder, pruning, compaction)
    settings: dict[str, Any] = {"max_epochs": 4, "use_distributed_sampler": False}
    if optimizer.endswith("+"):
        settings |= {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    if spread:
        settings["strategy"] = ModelParallelStrategy(data_parallel_size=data, tensor_parallel_size=tensor)
    if options:
        record.others = [CompressionReport(folder, "report", terminal="none", figures=False)]
    if method is not None:
        record.others.insert(0, Compensation(samples=16, method=method))
    callbacks = [compaction, ComplexityMonitor(), pruning, MaskConflictRepair(), *record.others, record]
    start = trainer(folder, *callbacks, devices=devices, limit_val_batches=2, **settings)
    start.fit(module, ckpt_path=checkpoint)


def kill_in_compaction(count: int = 3) -> None:
    """Let this process die while parameters are gathered and cut."""
    prepare, calls = Resized.of, itertools.count()

    def of(*arguments: Any) -> Resized:
        if next(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return prepare(*arguments)

    Resized.of = of  # type: ignore[method-assign]


def fork(folder: Path, model: str, optimizer: str, mesh: str, checkpoint: str | None = None) -> list[int]:
    """Run the fit in processes of its own; their exit codes.

    Where one fails, the others do not run on, unless that is what is tried (``KILLED_RANK``).
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    children: list[int] = []
    codes: dict[int, int] = {}
    for rank in range(torch.Size(map(int, mesh.split("x"))).numel()):
        children.append(os.fork())
        if children[-1] == 0:
            signal.alarm(300)  # whoever waits for the others waits no longer
            os.environ["LOCAL_RANK"] = str(rank)
            try:
                run(folder, model, optimizer, mesh, checkpoint)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
    while len(codes) < len(children):
        child, status = os.wait()
        codes[child] = os.waitstatus_to_exitcode(status)
        if status and "KILLED_RANK" not in os.environ:
            for other in set(children) - codes.keys():
                os.kill(other, signal.SIGKILL)
    return [codes[child] for child in children]


if __name__ == "__main__":
    exit_codes = fork(Path(sys.argv[1]), *sys.argv[2:])
    print(exit_codes)
    sys.exit(any(exit_codes))

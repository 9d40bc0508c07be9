"""Networks of which checkpoints in each version of the format are kept in ``golden/``.

The files were written with ``python -m tests.engine.golden`` by the code of that time; they are read, never rewritten.
Pins hold a hash of the source of `HandAttention.forward`, so it stays as it is.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

FOLDER = Path(__file__).with_name("golden")


class HandAttention(nn.Module):
    """Self-attention with sizes written in Python."""

    def __init__(self, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens, (batch, tokens, width)."""
        n, t, c = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(n, t, c))


def convolutional() -> nn.Module:
    """Grouped and depthwise layers and a norm."""
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.Sigmoid(),
        nn.Conv2d(6, 6, 3, padding=1, groups=6),
        nn.Conv2d(6, 8, 1, groups=2),
        nn.Conv2d(8, 2, 3, padding=1),
    )


def attention() -> nn.Module:
    """Heads whose sizes are pinned."""
    return nn.Sequential(nn.Linear(5, 8), HandAttention(), nn.Linear(8, 2))


def encoder() -> nn.Module:
    """A stream that norms span, and torch's own attention."""
    layer = nn.TransformerEncoderLayer(8, 4, 6, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Linear(5, 8), layer, nn.LayerNorm(8), nn.Linear(8, 2))


NETWORKS = {
    "convolutional": (convolutional, (2, 2, 6, 6)),
    "attention": (attention, (2, 4, 5)),
    "encoder": (encoder, (2, 4, 5)),
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    """The network with its weights of before the compaction, and an input; the same in any version of torch."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model, generator = make().eval(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
            tensor.copy_(torch.rand(tensor.shape, generator=generator) - 0.3)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_var.abs_().add_(0.5)
    return model, torch.rand(shape, generator=generator)


def masks(name: str, model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Dead channels, heads, and columns of the stream."""
    found: dict[str, dict[str, Tensor]] = {}

    def close(layer: str, rows: list[int]) -> None:
        module = model.get_submodule(layer)
        own = {n: torch.ones(p.shape) for n, p in module.named_parameters(recurse=False)}
        for mask in own.values():
            mask[rows] = 0
        found[layer] = own

    if name == "convolutional":
        close("0", [0, 1, 3, 4])
        close("1", [0, 1, 3, 4])
        close("3", [0, 1, 3, 4])
        close("4", [1, 2, 5, 6])
    elif name == "attention":
        close("1.qkv", [0, 1, 6, 7, 8, 9, 14, 15, 16, 17, 22, 23])
    else:
        for layer in ("0", "1.self_attn.out_proj", "1.linear2", "1.norm1", "1.norm2", "2"):
            close(layer, [0, 3])
        close("1.linear1", [2])
    return found


def main(version: str) -> None:
    """Write the files of the version of the code that is installed."""
    import engine
    from engine.files import checkpoint

    for name in NETWORKS:
        model, x = made(name)
        speedup = engine.ModelSpeedup(model, x, masks(name, model))
        speedup.speedup_model()
        own = {
            "version": 1,
            "target": "",
            "plan": speedup.plan.structure().state_dict(),
            "certificate": speedup.certificate.state_dict(),
        }
        content = {"state_dict": model.state_dict(), "expected": model(x).detach()}
        if version != "1":
            content = checkpoint.seal({**content, checkpoint.KEY: checkpoint.content_of(model)})
        else:
            content["lightning_compress"] = own
        FOLDER.mkdir(exist_ok=True)
        torch.save(content, FOLDER / f"{name}-{version}.golden")
        print(name, speedup.plan)


if __name__ == "__main__":
    main(sys.argv[1])

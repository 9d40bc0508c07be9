"""Exactness on torchvision's convolutional networks: masked and compacted compute the same, whatever is masked.

    python benchmarks/breadth_masks.py [model ...]      (default: all; resumes where it stopped)

Each model runs in float64 with random BN statistics, affine parameters and biases, under four kinds of masks:

    repaired   50 % of the channels of each layer, chosen independently, then repaired
    conflict   the same, not repaired
    elements   30 % of the single weights
    groups     50 % of the units of each dependency group

Compared are the outputs at the example's size and at another batch size and resolution, and, channel by channel, what
every norm outputs. A channel that differs inside must have no influence: random numbers in its place may not change
the output. Results are kept, line by line, in ``build/breadth-masks.jsonl``; the table goes to the terminal.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import engine
from benchmarks.breadth import half_of_each_group
from tests.engine.exactness import (
    Masks,
    channel_masks,
    element_masks,
    layers,
    masked,
    norm_outputs,
    parameters,
    randomised,
    relative_error,
    run,
)

MODELS = """
    alexnet vgg11 vgg11_bn resnet18 resnet50 resnext50_32x4d wide_resnet50_2 squeezenet1_0 densenet121 googlenet
    inception_v3 mobilenet_v2 mobilenet_v3_small mnasnet0_5 shufflenet_v2_x0_5 efficientnet_b0 efficientnet_v2_s
    regnet_y_400mf regnet_x_400mf
""".split()

# Parameters that Torch-Pruning 1.6.1 reaches at 50 %, in millions; inception_v3 without auxiliary heads.
PEER = {
    "resnet18": 3.06,
    "resnet50": 6.92,
    "mobilenet_v2": 1.22,
    "densenet121": 2.27,
    "efficientnet_b0": 1.70,
    "inception_v3_without_aux": 6.48,
}
KINDS = ("repaired", "conflict", "elements", "groups")
TOLERANCE = 1e-9


def build(name: str) -> nn.Module:
    """Return a model with random weights, statistics, affine parameters and biases, in float64."""
    torch.manual_seed(0)
    options: dict[str, Any] = {}
    if name.startswith(("googlenet", "inception")):
        options = {"init_weights": False}
    if name.endswith("_without_aux"):
        options |= {"aux_logits": False}
    model = getattr(torchvision.models, name.removesuffix("_without_aux"))(weights=None, **options)
    return randomised(model)


def example(name: str, batch: int, larger: int = 0) -> Tensor:
    """Return a batch of images as small as the model takes them."""
    size = 299 if name.startswith("inception") else 96  # its auxiliary head takes no smaller one
    generator = torch.Generator().manual_seed(batch)
    return torch.randn(batch, 3, size + larger, size + larger, generator=generator, dtype=torch.float64)


def masks_of(kind: str, model: nn.Module, images: Tensor) -> Masks:
    """Return the masks of a kind; the layer that makes the output is left whole, except for single weights."""
    if kind == "groups":
        return half_of_each_group(model, engine.dependency_groups(model, images))
    if kind == "elements":
        return element_masks(model, seed=1, amount=0.3)
    masks = channel_masks(model, seed=1)
    masks.pop([name for name, _ in layers(model)][-1])
    return engine.fix_mask_conflict(masks, model, images) if kind == "repaired" else masks


def kept_channels(plan: engine.Plan, name: str, size: int) -> Tensor:
    """Return which channels of a norm stay."""
    for stored in ("running_mean", "weight"):
        cut = plan.slices.get(f"{name}.{stored}")
        if cut is not None:
            return cut.cuts[0].index
    return torch.arange(size)


def inner_error(reference: nn.Module, compacted: nn.Module, plan: engine.Plan, images: Tensor) -> float:
    """Return the largest error of a norm's channel that has an influence, relative to that channel's size."""
    before, after = norm_outputs(reference, images), norm_outputs(compacted, images)
    worst, idle = 0.0, {}
    for name, old in before.items():
        index = kept_channels(plan, name, old.size(1))
        size = old.movedim(1, 0).flatten(1)[index].norm(dim=1)
        difference = (old[:, index] - after[name]).movedim(1, 0).flatten(1).norm(dim=1)
        error = difference / size.clamp(min=1e-6 * float(size.max()))
        differs = error > TOLERANCE
        idle[name] = index[differs]
        worst = max(worst, *error[~differs].tolist(), 0.0)
    return worst if without_influence(reference, idle, images) else float("inf")


def without_influence(model: nn.Module, channels: dict[str, Tensor], images: Tensor) -> bool:
    """Whether random numbers in these channels leave the output as it is."""
    expected = run(model, images)

    def disturb(index: Tensor) -> Callable[..., Tensor]:
        def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            out = out.clone()
            out[:, index] = torch.randn(out[:, index].shape, dtype=out.dtype)
            return out

        return hook

    hooks = [
        model.get_submodule(n).register_forward_hook(disturb(index)) for n, index in channels.items() if len(index)
    ]
    if not hooks:
        return True
    outputs = run(model, images)
    for hook in hooks:
        hook.remove()
    return relative_error(expected, outputs) <= TOLERANCE


def check(name: str, kind: str) -> dict[str, Any]:
    """Compact a model under one kind of masks and return what came of it."""
    model, images = build(name), example(name, 2)
    masks = masks_of(kind, model, images)
    compacted = copy.deepcopy(model)
    predicted = engine.count_flops_params(model, images, verbose=False, masks=masks)
    start = time.process_time()
    speedup = engine.ModelSpeedup(compacted, images, masks, confidence=2)
    compacted = speedup.speedup_model()
    seconds = time.process_time() - start
    reference = masked(model, masks)
    others = (images, example(name, 3), example(name, 1, larger=32 if not name.startswith("vgg") else 0))
    errors = [relative_error(run(reference, x), run(compacted, x)) for x in others]
    measured = engine.count_flops_params(compacted, images, verbose=False)
    inner = inner_error(reference, compacted, speedup.plan, images)
    compacted.train()
    sum(t.sum() for t in outputs(compacted(images))).backward()
    return {
        "model": name,
        "kind": kind,
        "error": max(errors),
        "inner": inner,
        "certificate": speedup.certificate.max_error,
        "parameters": [parameters(model), parameters(compacted)],
        "predicted": predicted[:2] == measured[:2],
        "carriers": len({int(i) for fold in speedup.plan.folds if fold.dim >= 0 for i in fold.index}),
        "seconds": round(seconds, 1),
    }


def outputs(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output (a tensor, or a named tuple with auxiliary logits)."""
    yield from (tree,) if isinstance(tree, Tensor) else tree


def holds(row: dict[str, Any]) -> bool:
    """Whether a row keeps every promise."""
    peer = PEER.get(row["model"])
    small = row["kind"] != "groups" or peer is None or row["parameters"][1] <= peer * 1e6 * 1.005
    return row["error"] <= TOLERANCE and row["inner"] <= TOLERANCE and row["predicted"] and small


def main() -> int:
    """Run what has not been run yet, print the table, and return 1 if anything does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="model", help="names of torchvision models")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    args = parser.parse_args()
    file = Path("build/breadth-masks.jsonl")
    file.parent.mkdir(exist_ok=True)
    if args.fresh:
        file.unlink(missing_ok=True)
    done = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    wanted = [(name, kind) for name in args.models or [*MODELS, "inception_v3_without_aux"] for kind in KINDS]
    for name, kind in wanted:
        if not any((row["model"], row["kind"]) == (name, kind) for row in done):
            row = check(name, kind)
            done.append(row)
            with file.open("a") as out:
                out.write(json.dumps(row) + "\n")
    rows = [row for row in done if (row["model"], row["kind"]) in wanted]
    for row in rows:
        before, after = (n / 1e6 for n in row["parameters"])
        verdict = "ok" if holds(row) else "FAILED"
        print(
            f"{row['model']:26} {row['kind']:9} {before:7.2f} M -> {after:6.2f} M  output {row['error']:.1e}  "
            f"norms {row['inner']:.1e}  {row['seconds']:6.1f} s  {verdict}"
        )
    failed = [row for row in rows if not holds(row)]
    print(f"{len(rows) - len(failed)} of {len(rows)} hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""An op and a criterion of one's own.

What this example teaches:

1. A rule says what an op does to its channels. Without one, the channels that it touches are left whole, and the report
   says why. ``engine.RULES.register`` makes the rule known to all callbacks; ``engine.check_rule`` tests it under every
   kind of mask.
2. A criterion is a function of a dependency group and a getter of its parameters that returns a score for each channel;
   those with the lowest go first.

    make example NAME=own_op_and_criterion
"""

from __future__ import annotations

import argparse
from typing import Any

import pytorch_lightning as pl
import torch
from fitting import Results, fit, main, sizes
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from engine.rule import Rule
from image_data import load
from lightning_compress import ChannelPruning, MaskConflictRepair, ModelCompaction
from measuring import count_correct

# ------------------------------------------------------------------------------------------------------------------ op


@torch.library.custom_op("example::bounded", mutates_args=())
def bounded(x: Tensor, bound: Tensor) -> Tensor:
    """Clip each channel of (N, C, H, W) to [-bound, bound] of its own, (C,)."""
    limit = bound.view(1, -1, 1, 1)
    return torch.maximum(torch.minimum(x, limit), -limit)


@bounded.register_fake
def _(x: Tensor, bound: Tensor) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient * ctx.inside, None


def _remember(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.inside = inputs[0] == output


bounded.register_autograd(_backward, setup_context=_remember)


def _labels(node: Any, labels: Any) -> None:
    x, bound = node.inputs
    labels.per_channel(bound, labels.along(x, 1))  # each channel has its bound
    labels.pass_on(x, node.output)  # what comes out are the channels that go in


def _constants(node: Any, constants: Any) -> list[Tensor]:
    x, bound = constants.plain(node.inputs[0]), constants[node.inputs[1]].view(1, -1, 1, 1)
    return [torch.where(x.isnan(), x, torch.maximum(torch.minimum(x, bound), -bound))]  # NaN says that it varies


def _use(node: Any, use: Any) -> None:
    use.add(node.inputs[0], use[node.output])


engine.RULES.register(Rule(("example::bounded",), _labels, _constants, _use))


# ----------------------------------------------------------------------------------------------------------- criterion


def spread(group: engine.Group, parameter: Any) -> Tensor:
    """Standard deviation of the weights that put a channel out: a filter of equal weights only averages.

    Args:
        group: the channels that go together, of one or several layers.
        parameter: gives a parameter by its name.

    Returns:
        A score for each channel, (group.size,).
    """
    scores = torch.zeros(group.size)
    for member in group.members:
        if member.role == "out" and member.units.ndim > 1:  # weights, not biases
            rows = parameter(member.parameter).detach().cpu().flatten(1).std(1)
            scores.index_add_(0, member.units.flatten(), rows)
    return scores


# ------------------------------------------------------------------------------------------------------------- network


class Net(pl.LightningModule):
    """Two convolutions with the op between them."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(1, width, 3), nn.Conv2d(width, width, 3, 2)
        self.bound = nn.Parameter(torch.linspace(0.5, 2, width), requires_grad=False)
        self.head = nn.Linear(width, 10)
        self.example_input_array = torch.zeros(2, 1, 16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, 16, 16) -> (N, 10)."""
        return self.head(F.relu(self.last(bounded(self.first(x), self.bound))).mean((2, 3)))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy of one batch."""
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), 5e-3)


def run(args: argparse.Namespace) -> Results:
    """Check the rule, train and prune by the criterion, compact."""
    pl.seed_everything(0, verbose=False)
    sample = engine.Sample(Net, (2, 1, 16, 16), "between two convolutions")
    checked = engine.check_rule(engine.RULES["example::bounded"], [sample])
    model, data = Net(), load("digits", args.log_dir, limit=args.limit)
    before = sizes(model, model.example_input_array[:1])
    compaction = ModelCompaction(on_failure="raise", save=False)
    fit(args, model, data, [ChannelPruning(spread, amount=0.5), MaskConflictRepair(), compaction])
    after = sizes(model, model.example_input_array[:1])
    return {
        "kinds of masks that the rule was checked with": len(checked.rows),
        "MACs": (before[0], after[0]),
        "bounds": (24, len(model.bound)),
        "accuracy": count_correct(model, data.test) / len(data.test),
        "error of the compaction": compaction.certificate.max_error,
    }


if __name__ == "__main__":
    main(__doc__, run, epochs=8)

"""Random recurrent networks with random masks."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.exactness import Masks, randomised
from tests.engine.nets import Net

GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}


def recurrent_net(seed: int) -> nn.Module:
    """A linear layer, a function, a recurrent layer, and a linear one that reads its steps or its last states."""
    draw = random.Random(seed)
    kind, units, inputs = draw.choice(["LSTM", *GATES]), draw.choice([3, 4, 5]), draw.choice([3, 4])
    options: dict[str, Any] = {"num_layers": draw.choice([1, 1, 2, 3]), "bidirectional": draw.random() < 0.5}
    options |= {"bias": draw.random() < 0.7, "batch_first": draw.random() < 0.7}
    if kind == "LSTM" and draw.random() < 0.4:
        options["proj_size"] = 2
    layer = getattr(nn, kind)(inputs, units, **options)
    directions = 1 + options["bidirectional"]
    function, reads = draw.choice([torch.relu, torch.sigmoid, torch.tanh]), draw.choice(["steps", "states", "both"])

    def forward(m: Net, x: Tensor) -> Tensor:
        steps, states = m.layer(function(m.first(x)))
        states = states[0] if isinstance(states, tuple) else states
        last = m.out(torch.cat(list(states[-directions:]), 1))
        if reads == "states":
            return last
        return m.out(steps) if reads == "steps" else m.out(steps).sum(1 if m.layer.batch_first else 0) + last

    width = options.get("proj_size", units) * directions
    return randomised(Net(forward, first=nn.Linear(3, inputs), layer=layer, out=nn.Linear(width, 2)), seed)


def recurrent_masks(model: nn.Module, seed: int) -> Masks:
    """Whole units, single gates, columns or entries of each layer and direction, and units of the layer in front."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    style = draw.choice(["units", "units", "gates", "columns", "entries"])
    masks: Masks = {"first": {}, "layer": {}, "out": {}}
    kept = torch.rand(model.layer.input_size, generator=generator) < 0.5
    masks["first"]["weight"] = kept.double()[:, None].expand(-1, 3)
    masks["first"]["bias"] = kept.double() if draw.random() < 0.7 else torch.ones(len(kept)).double()
    alive: dict[str, Tensor] = {}
    for name, parameter in model.layer.named_parameters():
        place, mask = name.partition("_l")[2], torch.ones(parameter.shape, dtype=torch.float64)
        stays = alive.setdefault(place, torch.rand(model.layer.hidden_size, generator=generator) < 0.5)
        if "_hr_" in name:
            mask[torch.rand(len(mask), generator=generator) < 0.4] = 0
        elif style in ("units", "gates"):
            gates = GATES[type(model.layer).__name__]
            some = slice(None) if style == "units" else slice(min(2, gates - 1), min(3, gates))
            mask.view(gates, -1, *mask.shape[1:])[some, ~stays] = 0
        elif style == "entries":
            mask = (torch.rand(mask.shape, generator=generator) < 0.6).double()
        elif mask.ndim > 1:
            mask[:, torch.rand(mask.shape[1], generator=generator) < 0.5] = 0
        masks["layer"][name] = mask
    columns = torch.rand(1, model.out.in_features, generator=generator) < 0.7
    masks["out"]["weight"] = columns.double().expand(2, -1)
    return masks

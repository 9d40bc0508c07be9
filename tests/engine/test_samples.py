"""Every rule's own samples, under every kind of mask."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

import engine
from engine.program.graph import Graph
from engine.rule import Sample
from tests.engine.exactness import KINDS, channel_masks, check_exact, parameters, randomised

SAMPLES = [sample for rule in engine.RULES.distinct() for sample in rule.samples()]


def built(sample: Sample, seed: int = 0) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return the sample's network, an input, and one of another batch size."""
    torch.manual_seed(seed)
    model = sample.make()
    example = torch.randn(sample.shape)
    model(example)  # lazy layers
    model = randomised(model, seed)
    return model, example.double(), torch.randn(sample.shape[0] + 1, *sample.shape[1:]).double()


@functools.lru_cache(maxsize=1)
def recorded(sample: Sample) -> tuple[nn.Module, torch.Tensor, torch.Tensor, Graph]:
    """What `built` returns, and the graph: recorded once for all masks of a sample, which follow each other."""
    model, example, other = built(sample)
    return model, example, other, engine.trace(model, example)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_sample_compacts_exactly(sample: Sample, kind: str) -> None:
    """A rule is exact on its samples for masked channels, entries, columns, layers, at another batch size too."""
    model, example, other, graph = recorded(sample)
    check_exact(copy.deepcopy(model), KINDS[kind](model, 1), example, other, graph=graph)


@pytest.mark.parametrize("policy", ["union", "intersection", "score"])
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_repaired_sample_compacts_exactly(sample: Sample, policy: str) -> None:
    """Repaired masks compact exactly, and leave at most as much as the masks did before."""
    model, example, other, graph = recorded(sample)
    masks = channel_masks(model, 2)
    repaired = engine.fix_mask_conflict(masks, model, example, policy, graph=graph)
    check_exact(copy.deepcopy(model), repaired, example, other, graph=graph)
    assert parameters(model) > 0


def test_every_rule_has_samples_or_shares_them() -> None:
    """Each family of rules brings samples."""
    assert len(SAMPLES) > 60

"""Tests of what is gathered while a model trains."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning import Callback
from torch import nn

import engine
from engine.sensitivity.activity import ActivityMeter
from lightning_compress import ChannelPruning
from lightning_compress.selection.evidence import DECAY, Gatherer, loss_changes
from tests.lightning_compress.models import Net, Wrapped, data, fit, seeded, trainer


def test_loss_change_is_the_first_order_term() -> None:
    """It is the square of the derivative of the loss towards zeroing a unit with all that belongs to it."""
    net: Any = seeded(Net).double().eval()
    images, labels = next(iter(data()))
    groups = engine.dependency_groups(net, images.double())
    wide = next(group for group in groups if group.name == "wide")
    F.cross_entropy(net(images.double()), labels).backward()
    found = loss_changes([wide], net)["wide"]
    step, masks = 1e-6, engine.group_masks([wide], {"wide": torch.arange(16) != 3})
    with torch.no_grad():
        before = F.cross_entropy(net(images.double()), labels)
        for module, own in masks.items():
            for name, mask in own.items():
                parameter = net.get_submodule(module).get_parameter(name)
                parameter.sub_(step * parameter * (1 - mask))
        change = (F.cross_entropy(net(images.double()), labels) - before) / step
    assert float(found[3]) == pytest.approx(float(change) ** 2, rel=1e-4)


def test_stale_gradients_do_not_count() -> None:
    """Of several optimizers only the parameters of the one that steps count; without gradients nothing is known."""
    net: Any = seeded(Net)
    groups = engine.dependency_groups(net, torch.ones(2, 3, 8, 8))
    assert loss_changes(groups, net) == {}
    net(torch.rand(2, 3, 8, 8)).sum().backward()
    assert list(loss_changes(groups, net, net.wide.parameters())) == ["wide"]


class Recording(Callback):
    """Keeps what was gathered after each batch."""

    def __init__(self, pruning: ChannelPruning) -> None:
        self.pruning, self.seen = pruning, []

    def on_train_batch_end(self, *_: Any) -> None:
        """Keep."""
        self.seen.append({kind: dict(found) for kind, found in self.pruning._gatherer.gathered.items()})


@contextmanager
def ended_early() -> Iterator[None]:
    """A fit that is too short says so at its start and at its end."""
    with pytest.warns(UserWarning, match="has no effect in this fit|fit ended before") as record:
        yield
    assert sum("fit ended before" in str(warning.message) for warning in record) == 1


def test_activations_of_the_batches_are_averaged(tmp_path: Path) -> None:
    """Each look adds what an evaluation of the batch in eval mode gives, the older ones fading."""
    module = seeded(Wrapped)
    pruning = ChannelPruning("apoz", gather_every=1, amount=0.5, end=2)
    recording = Recording(pruning)
    optimizer = torch.optim.SGD(module.parameters(), 0.0)
    module.configure_optimizers = lambda: optimizer
    with ended_early():
        fit(module, tmp_path, pruning, recording, max_epochs=1)
    images = [batch[0] for batch in data()]
    assert len(recording.seen) == 3
    groups = engine.dependency_groups(module.net, images[0])
    meter = ActivityMeter(engine.trace(module.net, images[0]), groups)
    last = meter(module.net, (images[2],))
    expected = (last.positive["wide"] / last.count["wide"]) + DECAY * recording.seen[1]["active"]["wide"]
    torch.testing.assert_close(recording.seen[2]["active"]["wide"], expected, rtol=1e-6, atol=1e-9)


class Extra(Callback):
    """Calls the model after each step, with gradients, on images of its own."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Call."""
        pl_module.net(torch.full((2, 3, 8, 8), 100.0, requires_grad=True))


@pytest.mark.parametrize("others", [[Extra()], []])
def test_calls_around_the_step_do_not_count(tmp_path: Path, others: list[Callback]) -> None:
    """Neither are those of another callback looked at, nor the recording that a pruning after a step makes."""
    pruning = ChannelPruning("mean_activation", 0.5, "linear", unit="step", start=1, end=9, frequency=1, gather_every=3)
    recording = Recording(pruning)
    fit(seeded(Wrapped), tmp_path, *others, pruning, recording)
    seen = [look["magnitude"]["wide"] for look in recording.seen]
    assert all(bool(look.isfinite().all()) and float(look.max()) < 50 for look in seen)
    assert torch.equal(seen[0], seen[2]) and not torch.equal(seen[2], seen[3])  # one look in each epoch of three steps


def test_every_so_often() -> None:
    """The first batch of an epoch and each n-th are looked at; with accumulation the step that takes the batch in."""
    gatherer = Gatherer(["loss_change"], every=4)
    seen = []
    for batch_idx in range(10):
        gatherer.on_batch_start(trainer(Path("."), accumulate_grad_batches=1), batch_idx)
        seen.append((gatherer._batch_due, gatherer._step_due))
    assert [b for b, _ in seen] == [True, False, False, False] * 2 + [True, False] and all(b == s for b, s in seen)
    gatherer.on_batch_start(trainer(Path("."), accumulate_grad_batches=3), 5)
    assert not gatherer._batch_due and gatherer._step_due


def test_cut_keeps_what_stays() -> None:
    """After a compaction the statistics of the channels that are left go on; those that do not fit are dropped."""
    gatherer = Gatherer(["loss_change"], every=1)
    gatherer.load_state_dict({"loss_change": {"a": torch.arange(4.0), "b": torch.ones(3), "c": torch.ones(2)}})
    gatherer.cut({"a": torch.tensor([True, False, True, False]), "b": torch.ones(5, dtype=torch.bool)})
    assert {n: v.tolist() for n, v in gatherer.state_dict()["loss_change"].items()} == {
        "a": [0.0, 2.0],
        "c": [1.0, 1.0],
    }


@pytest.mark.parametrize("criterion", ["taylor", "apoz", "mean_activation"])
def test_gathering_leaves_the_training_as_it_is(tmp_path: Path, criterion: str) -> None:
    """Before the first pruning the weights are bit for bit those of a fit without the callback."""
    plain, watched = seeded(Wrapped), seeded(Wrapped)
    fit(plain, tmp_path, max_epochs=1)
    with ended_early():
        fit(watched, tmp_path, ChannelPruning(criterion, gather_every=1, end=2), max_epochs=1)
    assert all(
        torch.equal(a, b) for a, b in zip(plain.state_dict().values(), watched.state_dict().values(), strict=True)
    )
    assert not watched.net._forward_pre_hooks


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
@pytest.mark.parametrize("criterion", ["taylor", "apoz"])
def test_resume_goes_on_with_what_was_gathered(tmp_path: Path, criterion: str) -> None:
    """Stopped in the middle of the gathering and resumed, the masks and weights are those of an uninterrupted run."""
    whole, first, second = seeded(Wrapped), seeded(Wrapped), seeded(Wrapped)
    settings: dict[str, Any] = {"criterion": criterion, "gather_every": 1, "start": 2, "end": 3}
    one, two = ChannelPruning(**settings), ChannelPruning(**settings)
    fit(whole, tmp_path, one, max_epochs=4)
    with ended_early():
        stopped = fit(first, tmp_path, ChannelPruning(**settings), max_epochs=1)
    stopped.save_checkpoint(tmp_path / "last.ckpt")
    trainer(tmp_path, two, max_epochs=4).fit(second, ckpt_path=str(tmp_path / "last.ckpt"))
    assert torch.equal(one.masks["wide"]["weight"], two.masks["wide"]["weight"])
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


def test_gatherer_travels_without_the_model() -> None:
    """Strategies that spawn processes pickle the callbacks: hooks and graphs stay behind."""
    net: nn.Module = seeded(Net)
    gatherer = Gatherer(["activity"], every=1)
    graph = engine.trace(net, torch.ones(1, 3, 8, 8))
    gatherer.watch(net, graph, engine.dependency_groups(net, torch.ones(1, 3, 8, 8), graph=graph))
    state = gatherer.__getstate__()
    assert gatherer.watching and state["_hook"] is None and state["_meter"] is None
    gatherer.close()
    assert not gatherer.watching and not net._forward_pre_hooks


def test_ranks_gather_together(tmp_path: Path) -> None:
    """Two processes with half of the batch each know what one process with the whole batch knows, both the same."""
    script, root = Path(__file__).parents[1] / "ddp_statistics.py", Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, str(script), str(tmp_path)], env=environment, cwd=tmp_path, check=True, timeout=300)
    alone, first, second = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("1.0", "2.0", "2.1"))
    assert sorted(alone) == sorted(first) == ["active", "loss_change", "magnitude"]
    for kind, found in alone.items():
        for name, value in found.items():
            assert torch.equal(first[kind][name], second[kind][name])
            torch.testing.assert_close(first[kind][name], value, rtol=1e-5, atol=1e-8)

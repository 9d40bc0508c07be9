"""Settings of a fit that can never act, and those that only a longer fit would let act."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import prune

from engine.errors import EngineError
from lightning_compress import ChannelPruning, MaskConflictRepair, ModelCompaction, SparseTraining
from lightning_compress.callbacks.masking import MaskingCallback
from lightning_compress.callbacks.when import parse_when
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.models import Wrapped, fit, seeded


def test_epochs_behind_the_end(tmp_path: Path) -> None:
    """A longer fit would get there: a warning that names them and the length, also where steps bound it."""
    for options in ({"max_epochs": 2}, {"max_epochs": -1, "max_steps": 6}):
        callbacks = ChannelPruning(amount=0.5, end=1), ModelCompaction(when=[1, 10], on_failure="raise", save=False)
        with pytest.warns(UserWarning, match=r"does not compact in epoch 10: the fit has only 2 epochs"):
            fit(seeded(Wrapped), tmp_path, *callbacks, **options)


@pytest.mark.parametrize("others", [[], [MaskConflictRepair()], [SparseTraining()]])
def test_nothing_that_masks(tmp_path: Path, others: list[Any]) -> None:
    """Then a compaction in the middle can remove nothing, however long the fit is: an error before it."""
    module = seeded(Wrapped)
    with pytest.raises(MisconfigurationException, match="no callback of this Trainer masks any"):
        fit(module, tmp_path, ModelCompaction(when=1), *others)
    assert module.trainer.global_step == 0


def test_before_anything_is_masked(tmp_path: Path) -> None:
    """An error, by epochs and by steps; not where one of the epochs is late enough, or others mask too."""
    for pruning in (ChannelPruning(start=2, end=2), ChannelPruning(start=6, end=8, unit="step")):
        with pytest.raises(MisconfigurationException, match="no channel is masked before epoch 2"):
            fit(seeded(Wrapped), tmp_path, ModelCompaction(when=[0, 1]), pruning)
    for when, others in (([1, 2], []), ([1], [MaskingCallback()])):
        callbacks = ModelCompaction(when=when, on_failure="raise", save=False), ChannelPruning(start=2, end=2)
        fit(seeded(Wrapped), tmp_path, *callbacks, *others)


def test_masks_that_are_there_already(tmp_path: Path) -> None:
    """Of `torch.nn.utils.prune`: they have an error of their own, which says what to do."""
    module = seeded(Wrapped)
    prune.ln_structured(module.net.wide, "weight", 0.5, n=1, dim=0)
    with pytest.warns(UserWarning, match="are masked by `torch.nn.utils.prune`"):
        fit(module, tmp_path, ModelCompaction(when=[1], save=False))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"round_to": 512}, "amount=0.5, round_to=512, no channel is ever masked: the groups have 8 to 16 units"),
        ({"minimum": 100, "layers": "wide"}, "minimum=100, no channel is ever masked: the groups have 16 units"),
        ({"max_amount": 0.01}, "max_amount=0.01"),
        ({"amount": 0.01}, "amount=0.01"),
        ({"widths": {"stem": [8], "wide": [16]}}, "widths="),
        ({"target": "macs", "budget": 1e12}, "budget=1000000000000.0"),
        ({"exclude": "*"}, r"exclude=\('\*',\), no layer remains"),
        ({"layers": "wide", "exclude": "wi*"}, "no layer remains"),
        ({"amount": {"wide": 0.5}, "exclude": "wide"}, "no layer remains"),
    ],
)
def test_limits_under_which_nothing_goes(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    """An error before the first epoch that names the settings: no longer fit would help."""
    module = seeded(Wrapped)
    with pytest.raises(MisconfigurationException, match=said):
        fit(module, tmp_path, ChannelPruning(**settings))
    assert module.trainer.global_step == 0


def test_limits_under_which_some_goes(tmp_path: Path) -> None:
    """One group is enough, and an amount of nothing is what it says."""
    fit(seeded(Wrapped), tmp_path, ChannelPruning(round_to=8))  # half of 16 channels, and none of 8
    fit(seeded(Wrapped), tmp_path, ChannelPruning(amount=0.0))


@pytest.mark.parametrize(
    "callback",
    [ChannelPruning(start=5, end=9), ChannelPruning(start=50, end=60, unit="step"), SparseTraining(start=50, end=60)],
    ids=["epochs", "steps", "sparse"],
)
def test_a_start_behind_the_end_of_the_fit(tmp_path: Path, callback: Any) -> None:
    """A warning before the first epoch."""
    with pytest.warns(UserWarning) as caught:
        fit(seeded(Wrapped), tmp_path, callback)
    said = f"`{type(callback).__name__}` has no effect in this fit: it starts at"
    assert any(said in str(warning.message) for warning in caught)


def test_a_rehearsal_is_not_asked(tmp_path: Path) -> None:
    """`fast_dev_run` is one batch long, whatever the settings are for."""
    fit(seeded(Wrapped), tmp_path, ChannelPruning(amount=0.5), ModelCompaction(when=[10]), fast_dev_run=1)


def test_what_when_may_be() -> None:
    """A fraction, an epoch, several, or nothing."""
    assert [parse_when(when) for when in (None, 0.5, 3, [1, 2])] == [None, 0.5, (3,), (1, 2)]
    for wrong in (torch.ones(2).tolist(), torch.tensor(1), "1"):
        with pytest.raises(MisconfigurationException, match="`when` must be an epoch"):
            parse_when(wrong)


class TwoOptimizers(Wrapped):
    """An optimizer that treats a parameter as a whole, for the network or for a table beside it."""

    def __init__(self, whole: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.table, self.whole = torch.nn.Parameter(torch.ones(3, 3)), whole

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Both step."""
        optimizers: Any = self.optimizers()
        self.manual_backward(super().training_step([batch[0], batch[1]], batch_idx) + self.table.square().sum())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        """Adafactor for one of the two."""
        parts = {"net": [*self.net.parameters()], "table": [self.table]}
        kinds = {True: torch.optim.Adafactor, False: torch.optim.SGD}
        return [kinds[name == self.whole](part, lr=0.01) for name, part in parts.items()]


def test_optimizers_that_would_go_on_differently(tmp_path: Path) -> None:
    """Are named before the first epoch, if they have parameters that may become smaller."""

    def run(whole: str, on_failure: str) -> TwoOptimizers:
        module = seeded(TwoOptimizers, whole=whole)
        compaction = ModelCompaction(when=1, on_failure=on_failure, save=False, confidence=1)
        fit(module, tmp_path, ChannelPruning(start=1, end=1), MaskConflictRepair(), compaction)
        return module

    with pytest.raises(EngineError, match="Adafactor updates an entry"):
        run("net", "raise")
    with (
        pytest.warns(UserWarning, match="The state of Adafactor"),
        pytest.warns(UserWarning, match="was not compacted and is unchanged: Adafactor"),
        pytest.warns(UserWarning, match="stays masked until the end of the fit: Adafactor updates an entry"),
    ):
        assert run("net", "warn").net.wide.out_channels == 8
    assert run("table", "raise").net.wide.out_channels == 8

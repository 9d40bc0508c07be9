"""Compaction while training goes on: the same training as with masks, step by step."""

from __future__ import annotations

import copy
import itertools
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning.callbacks as lightning_callbacks
import torch
import torch.nn.functional as F
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import StochasticWeightAveraging
from pytorch_lightning.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import engine
from engine.compaction.compact import Compaction
from engine.errors import EngineError, VerificationError
from engine.surgery.kinds.spread import Spread
from lightning_compress import ChannelPruning, ComplexityMonitor, ModelCompaction, load_compacted
from lightning_compress.callbacks import shrinking
from lightning_compress.callbacks.base import CompressionCallback
from lightning_compress.callbacks.masking import MaskingCallback
from lightning_compress.trainer.averages import Average
from lightning_compress.trainer.packages import MisconfigurationException
from lightning_compress.trainer.strategy import Job
from tests.lightning_compress.callbacks.test_repair import structured
from tests.lightning_compress.models import Base, Wrapped, difference, fit, seeded, trainer
from tests.lightning_compress.small import SIDE, Classifier

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True),
    "sgd nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=False),
    "sgd fused": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.01, amsgrad=True, foreach=False),
    "adam foreach": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.01, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.002, momentum=0.5, centered=True, weight_decay=0.01, foreach=False),
    "rmsprop foreach": lambda p: torch.optim.RMSprop(p, 0.002, momentum=0.5, weight_decay=0.01, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.02, weight_decay=0.01, foreach=False),
    "adagrad foreach": lambda p: torch.optim.Adagrad(p, 0.02, weight_decay=0.01, foreach=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, 0.02, weight_decay=0.01, fused=True),
}


class Smooth(nn.Module):
    """A residual block with batch norms and no kinks, so that rounding is not amplified."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.wide, self.wide_norm = nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width)
        self.back, self.fc = nn.Conv2d(2 * width, width, 3, padding=1), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        x = torch.tanh(self.norm(self.stem(x)))
        return self.fc(torch.tanh(x + self.back(torch.tanh(self.wide_norm(self.wide(x))))).mean((2, 3)))


class Trained(Base):
    """`Smooth` under any optimizer."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Smooth()

    def logits(self, x: Tensor) -> Tensor:
        """Output of the model."""
        return self.net(x)

    def configure_optimizers(self) -> Any:
        """With a schedule of the learning rate."""
        optimizer = OPTIMIZERS[self.hparams.optimizer](self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Follow(Callback):
    """Notes what the model computes before each step, and how wide it is."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        """Note, in train mode's own statistics: the step's loss would hide small differences."""
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(3)).to(next(pl_module.parameters()))
        stateful = any(True for _ in pl_module.net.buffers())  # which a copy must update in the place of the model
        with torch.no_grad():
            out = (copy.deepcopy(pl_module.net) if stateful else pl_module.net)(x)
        self.seen.append((pl_module.net.wide.weight.shape[0], out))


def both(
    folder: Path,
    make: Callable[[], Any],
    callbacks: Callable[[], list[Any]],
    *,
    first: bool = False,
    model: str = "net",
    **options: Any,
) -> tuple[Any, ...]:
    """The same fit with masks, and compacted in its second epoch: modules, what was seen, Trainers, more callbacks.

    Options that are functions are called for each of the two.
    """
    made: list[tuple[Base, Follow, Trainer, list[Any]]] = []
    for when in (None, 1):
        module, follow = make(), Follow()
        compaction = ModelCompaction(when=when, on_failure="raise", save=False, model=model)
        more = callbacks()
        pruning = ChannelPruning(amount=0.5, schedule="one_shot", start=1, model=model)
        ours = [follow, compaction, pruning] if when else [follow, pruning]
        every = [*more, *ours] if first else [*ours, *more]
        given = {name: value() if callable(value) else value for name, value in options.items()}
        made.append((module, follow, fit(module, folder, *every, **{"max_epochs": 4, **given}), more))
    return tuple(made)


def errors(masked: Follow, compacted: Follow) -> list[float]:
    """Relative error of what the compacted model computes after each step."""
    assert len(masked.seen) == len(compacted.seen) > 0
    pairs = zip(masked.seen, compacted.seen, strict=True)
    return [float((a - b).abs().max() / a.abs().max()) for (_, a), (_, b) in pairs]


def widths(follow: Follow) -> list[int]:
    """Channels of the wide convolution after each step, repetitions left out."""
    return [width for width, _ in itertools.groupby(width for width, _ in follow.seen)]


CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in OPTIMIZERS),
    ("sgd", {"gradient_clip_val": 0.05}),
    ("adam", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    ("adamw foreach", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_masked_and_compacted_training_are_the_same(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """In float64 the outputs agree after each of nine further steps, with each optimizer, clipping, accumulation."""
    masked, compacted = both(tmp_path, lambda: seeded(Trained, optimizer=name), list, precision="64-true", **options)
    assert widths(masked[1]) == [16] and widths(compacted[1]) == [16, 8]
    assert max(errors(masked[1], compacted[1])) <= 1e-9
    for parameter, state in compacted[2].optimizers[0].state.items():
        assert all(entry.shape == parameter.shape for entry in state.values() if entry.ndim)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 2**-7), ("16-mixed", 2**-10), ("32-true", 1e-4)])
def test_lower_precision(tmp_path: Path, precision: str, tolerance: float) -> None:
    """Under autocast and with a gradient scaler they agree to the dtype's rounding."""
    scaled = precision == "16-mixed"
    options = {"plugins": lambda: [MixedPrecision("16-mixed", "cpu")]} if scaled else {"precision": precision}
    masked, compacted = both(tmp_path, lambda: seeded(Trained, optimizer="adam"), list, **options)
    assert widths(compacted[1]) == [16, 8]
    assert max(errors(masked[1], compacted[1])) <= tolerance
    if scaled:
        assert compacted[2].precision_plugin.scaler.get_scale() == masked[2].precision_plugin.scaler.get_scale()


class Averaged(Trained):
    """Keeps an exponential moving average of its own."""

    def __init__(self) -> None:
        super().__init__("adam")
        self.ema = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)

    def on_train_batch_end(self, *rest: Any) -> None:
        """Update it."""
        self.ema.update_parameters(self.net)


def test_an_average_inside_of_the_module(tmp_path: Path) -> None:
    """It shrinks with the model it averages, and ends as the masked one does."""
    masked, compacted = both(tmp_path, lambda: seeded(Averaged), list, precision="64-true")
    assert max(errors(masked[1], compacted[1])) <= 1e-9
    assert compacted[0].ema.module.wide.weight.shape[0] == 8
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(masked[0].ema.eval()(x), compacted[0].ema.eval()(x), rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(not hasattr(lightning_callbacks, "EMAWeightAveraging"), reason="comes with a later Lightning")
@pytest.mark.parametrize("first", [True, False])
def test_averaging_callbacks(tmp_path: Path, first: bool) -> None:
    """Lightning's EMA, before or after ours in the list: its average and the final weights are the masked run's."""

    masked, compacted = both(
        tmp_path,
        lambda: seeded(Trained),
        lambda: [lightning_callbacks.EMAWeightAveraging(decay=0.5)],
        first=first,
        precision="64-true",
        limit_val_batches=1,
    )
    assert max(errors(masked[1], compacted[1])) <= 1e-9
    assert compacted[3][0]._average_model.module.net.wide.weight.shape[0] == 8
    assert difference(masked[0], compacted[0]) <= 1e-9


def test_stochastic_weight_averaging(tmp_path: Path) -> None:
    """SWA begins after the compaction, with a copy of the model that was made before it."""
    masked, compacted = both(
        tmp_path,
        lambda: seeded(Trained),
        lambda: [StochasticWeightAveraging(0.01, swa_epoch_start=2)],
        precision="64-true",
        max_epochs=5,
    )
    assert max(errors(masked[1], compacted[1])) <= 1e-9
    assert difference(masked[0], compacted[0]) <= 1e-9


class Manual(Trained):
    """Two optimizers, each stepping within every batch, with a forward pass in between and clipping by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Step twice."""
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self.logits(batch[0]), batch[1]))
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()

    def configure_optimizers(self) -> list[Optimizer]:
        """One for the wide part, one for the rest."""
        wide = [*self.net.wide.parameters(), *self.net.wide_norm.parameters()]
        rest = [p for p in self.parameters() if all(p is not q for q in wide)]
        return [torch.optim.SGD(wide, 0.05, momentum=0.9, weight_decay=0.01), torch.optim.Adam(rest, 0.01)]


def test_manual_optimization_with_several_optimizers(tmp_path: Path) -> None:
    """What is masked is zero already when the second optimizer's forward pass looks, and clipping does not see it."""
    masked, compacted = both(tmp_path, lambda: seeded(Manual), list, precision="64-true")
    assert max(errors(masked[1], compacted[1])) <= 1e-9


class Compiled(Trained):
    """The LightningModule is a model itself."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        return self.net(x)


class Transformer(nn.Module):
    """Attention and neurons of its own over layer norms."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 4, 4)
        self.block = nn.TransformerEncoderLayer(12, 4, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.wide, self.fc = nn.Linear(12, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        return self.fc(F.gelu(self.wide(self.block(self.stem(x).flatten(2).mT).mean(1))))


class Attentive(Trained):
    """Heads, neurons and the token stream are channels."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.net = Transformer()


def test_heads_and_neurons(tmp_path: Path) -> None:
    """Half of a transformer's heads, neurons and stream go, and it trains on as with masks."""
    masked, compacted = both(tmp_path, lambda: seeded(Attentive), list, precision="64-true")
    net = compacted[0].net
    assert (net.block.self_attn.num_heads, net.block.linear1.out_features, net.stem.out_channels) == (2, 8, 6)
    assert max(errors(masked[1], compacted[1])) <= 1e-9


@pytest.mark.parametrize("whole", [True, False])
def test_compiled(tmp_path: Path, whole: bool) -> None:
    """A compiled model, or LightningModule, is looked at as it is, and compiled anew for the small sizes."""
    compiled: list[list[int]] = []
    torch._dynamo.reset()  # nothing that another test compiled

    def note(graph: Any, inputs: Any) -> Any:
        compiled.append([len(i) for i in inputs if i.ndim == 4 and i.requires_grad])
        return graph.forward

    def make() -> Base:
        module = seeded(Compiled)
        if whole:
            return torch.compile(module, backend=note)
        module.net.compile(backend=note)
        return module

    masked, compacted = both(tmp_path, make, list, precision="64-true", model="" if whole else "net")
    assert max(errors(masked[1], compacted[1])) <= 1e-9
    assert widths(compacted[1]) == [16, 8]
    assert compiled[0] == [8, 16, 8] and compiled[-1] == [4, 8, 4]


@pytest.mark.parametrize("compiles", [True, False])
def test_compiled_code_is_forgotten_where_there_is_some(monkeypatch: pytest.MonkeyPatch, compiles: bool) -> None:
    """On a GPU, to forget it takes the import of the whole compiler."""
    forgotten: list[bool] = []
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch.compiler, "reset", lambda: forgotten.append(True))
    if compiles:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    shrinking._forget_compiled_code()
    assert bool(forgotten) == compiles


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the code that inductor writes needs a C++ compiler")
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_by_inductor(tmp_path: Path, whole: bool) -> None:
    """With the code that torch.compile writes by default, the runs agree as well."""
    torch._dynamo.reset()

    def make() -> Base:
        module = seeded(Compiled)
        if whole:
            return torch.compile(module)
        module.net.compile()
        return module

    masked, compacted = both(tmp_path, make, list, precision="64-true", model="" if whole else "net")
    assert max(errors(masked[1], compacted[1])) <= 1e-9
    assert widths(compacted[1]) == [16, 8]
    assert torch._dynamo.utils.counters["inductor"]


@pytest.mark.parametrize("differs", [False, True])
@pytest.mark.filterwarnings("ignore:The averaged weights are not compacted")
def test_an_average_that_equals_the_model_folds_the_same_constants(tmp_path: Path, differs: bool) -> None:
    """As long as training has not moved the two apart; after that, its constants are others."""
    module = seeded(Base)
    module.net = nn.Sequential(nn.Linear(2, 4), nn.Sigmoid(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        module.net[0].weight[1], module.net[0].bias[1] = 0, 0.3
        module.ema = AveragedModel(module.net)
        module.ema.module[0].bias += float(differs)
    x = torch.randn(8, 2, dtype=torch.float64)
    expected, job = module.ema(x), Job("net", x, None, engine.trace(module.net, x), 1, training=False)
    plan, _ = shrinking.shrink(trainer(tmp_path), module, job, alone=True)
    assert plan.folds and module.net[0].out_features == 3
    assert module.ema.module[0].out_features == (4 if differs else 3)
    torch.testing.assert_close(module.ema(x), expected, rtol=1e-12, atol=1e-12)


class Failing(CompressionCallback):
    """Cannot follow a compaction during the fit."""

    def after_compaction(self, *_: Any) -> None:
        """Fail, once the model, its average and other callbacks have been changed."""
        raise VerificationError("no way to follow")


@pytest.mark.parametrize("criterion", ["l2", "apoz"])
def test_a_callback_that_cannot_follow_leaves_everything_as_it_was(tmp_path: Path, criterion: str) -> None:
    """Model, average, optimizer, masks and statistics: the fit goes on as with masks, and compacts at its end."""
    seen: list[Follow] = []
    modules: list[Base] = []
    for when in (None, 1):
        follow, module = Follow(), seeded(Averaged)
        pruning = ChannelPruning(criterion, amount=0.75, schedule="linear", start=0, end=3, model="net")
        compaction = ModelCompaction(when=when, save=False, model="net")
        callbacks = [follow, pruning, *([compaction, Failing("net")] if when else [])]
        if when:
            with pytest.warns(UserWarning, match="was not compacted and is unchanged: no way to follow"):
                fit(module, tmp_path, *callbacks, precision="64-true", max_epochs=4)
        else:
            fit(module, tmp_path, *callbacks, precision="64-true", max_epochs=4)
        seen.append(follow)
        modules.append(module)
    assert widths(seen[1]) == [16] and max(errors(*seen)) <= 1e-9
    assert modules[1].net.wide.weight.shape[0] == 4 == modules[1].ema.module.wide.weight.shape[0]
    assert compaction.failure is None


def test_averages_are_compacted_together_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit of the second fails after its first steps: both are restored."""
    nets = [nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)) for _ in range(2)]
    states = [copy.deepcopy(net.state_dict()) for net in nets]
    keep = torch.tensor([0, 2])
    slices = {"0.weight": (0, (4, 2)), "0.bias": (0, (4,)), "1.weight": (1, (1, 4))}
    plan = engine.Plan({name: engine.Slice.along(dim, keep, shape) for name, (dim, shape) in slices.items()})
    commits: list[bool] = []
    commit = Compaction.commit

    def fail_at_last(change: Compaction) -> None:
        commits.append(True)
        commit(change)
        if len(commits) == 2:
            raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Compaction, "commit", fail_at_last)
    with pytest.raises(torch.OutOfMemoryError), ExitStack() as undo:
        shrinking._shrink_averages([Average("", net) for net in nets], plan, undo)
    assert len(commits) == 2
    for net, state in zip(nets, states, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("foreach", [False, True])
def test_adafactor_is_refused(tmp_path: Path, foreach: bool) -> None:
    """It averages over whole tensors, so that the small network would train differently than with masks."""
    module = seeded(Factored, foreach=foreach)
    pruning = ChannelPruning(amount=0.5, schedule="one_shot", start=1)
    compaction = ModelCompaction(when=1, save=False, on_failure="raise")
    with pytest.raises(EngineError, match="Adafactor updates an entry"):
        fit(module, tmp_path, compaction, pruning, precision="64-true", max_epochs=4)
    assert module.net.wide.weight.shape[0] == 16 and not pruning.masks  # before the first epoch


@pytest.mark.filterwarnings("ignore:The state of Adafactor cannot be narrowed")
@pytest.mark.filterwarnings("ignore:The model stays masked until the end of the fit. Adafactor")
def test_a_later_success_clears_the_failure(tmp_path: Path) -> None:
    """What cannot be compacted during the fit can be at its end, when no optimizer goes on."""
    compaction = ModelCompaction(when=1, save=False, confidence=1)
    pruning = ChannelPruning(amount=0.5, schedule="one_shot", start=1)
    with pytest.warns(UserWarning, match="was not compacted and is unchanged: Adafactor"):
        fit(seeded(Factored, foreach=False), tmp_path, compaction, pruning, max_epochs=3)
    assert compaction.plan is not None and compaction.failure is None


class Factored(Trained):
    """Adafactor, whose second moments are factored."""

    def __init__(self, foreach: bool) -> None:
        super().__init__()
        self.foreach = foreach

    def configure_optimizers(self) -> Optimizer:
        """At a constant rate."""
        return torch.optim.Adafactor(self.parameters(), 0.01, foreach=self.foreach)


def gradual(**options: Any) -> ChannelPruning:
    """Pruning in four steps."""
    return ChannelPruning("bn_scale", amount=0.75, schedule="linear", start=0, end=4, **options)


def test_again_and_again(tmp_path: Path) -> None:
    """Compacted in every epoch, amounts go on counting what is gone: the same channels go as in a masked run."""
    seen: list[Follow] = []
    for when in (None, range(6)):
        follow = Follow()
        compaction = ModelCompaction(when=when, save=False, on_failure="raise")
        fit(seeded(Trained), tmp_path, follow, gradual(), compaction, precision="64-true", max_epochs=6)
        seen.append(follow)
    assert widths(seen[0]) == [16] and widths(seen[1]) == [16, 13, 10, 7, 4]
    assert max(errors(*seen)) <= 1e-9
    assert (
        compaction.plan.slices[
            "net.wide.weight" if "net.wide.weight" in compaction.plan.slices else "wide.weight"
        ].shape[0]
        == 4
    )


def test_whenever_enough_has_died(tmp_path: Path) -> None:
    """With a fraction it waits until that part of the parameters would go, and says what it did."""
    follow, monitor = Follow(), ComplexityMonitor()
    compaction = ModelCompaction(when=0.5, on_failure="raise", confidence=2)
    module = seeded(Trained)
    result = fit(module, tmp_path, compaction, follow, monitor, gradual(), max_epochs=6)
    sizes = [entry["complexity/params"] for entry in monitor.history]
    smaller = [b / a for a, b in itertools.pairwise(sizes) if b != a]
    assert len(smaller) == 2 and all(ratio <= 0.5 for ratio in smaller[:-1])
    assert module.net.wide.weight.shape[0] == 4
    assert compaction.certificate.verified
    fresh = Smooth()
    compaction.plan.apply(fresh)
    assert repr(fresh) == repr(module.net) and result.current_epoch == 6


def test_masks_inside_of_what_stays_hold(tmp_path: Path) -> None:
    """A group that is masked as a whole keeps one channel, which stays zero in the small model."""

    class Watch(Callback):
        """Looks behind the optimizer's steps, as the package does: what a user's hook reads would keep its size."""

        def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            def look(*_: Any) -> None:
                wide = pl_module.net.wide
                if len(wide.weight) == 1:
                    alive.append(bool(wide.weight.any() or wide.bias.any()))

            look.__module__ = "lightning_compress.callbacks"
            trainer.optimizers[0].register_step_post_hook(look)

    class Everything(MaskingCallback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if trainer.current_epoch == 1:
                layers = {"wide": pl_module.net.wide, "wide_norm": pl_module.net.wide_norm}
                masks = {n: {k: torch.zeros_like(p) for k, p in m.named_parameters()} for n, m in layers.items()}
                self.impose(pl_module, masks)

    alive: list[bool] = []
    holder = Everything()
    fit(seeded(Trained), tmp_path, ModelCompaction(when=1, save=False, on_failure="raise"), holder, Watch())
    assert len(alive) == 6 and not any(alive)


def test_natural_zeros_are_not_dead(tmp_path: Path) -> None:
    """Weights that are zero without being masked have yet to learn: nothing is removed while training."""

    class Zero(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            pl_module.net.wide_norm.weight.data.zero_()

    module = seeded(Trained)
    fit(module, tmp_path, ModelCompaction(when=[0, 1], on_failure="raise"), MaskingCallback(), Zero())
    assert module.net.wide.weight.shape[0] == 16 and module.net.wide_norm.weight.all()


class Bare(MaskingCallback):
    """Masks the outputs of a convolution alone, and not the norm behind it."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """In the second epoch."""
        if trainer.current_epoch == 1:
            mask = torch.ones(16, 8, 3, 3)
            mask[:8] = 0
            self.impose(pl_module, {"wide": {"weight": mask, "bias": mask[:, 0, 0, 0]}})


def test_what_would_change_the_training_is_refused(tmp_path: Path) -> None:
    """The shift of an unmasked norm is still being trained: a warning that says what to do, and it stays as it is."""

    class Watch(Callback):
        """Looks behind the optimizer's steps, as the package does: what a user's hook reads would keep its size."""

        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            def look(*_: Any) -> None:
                seen.add(len(pl_module.net.wide.weight))

            look.__module__ = "lightning_compress.callbacks"
            trainer.optimizers[0].register_step_post_hook(look)

    seen: set[int] = set()
    with pytest.warns(UserWarning, match="not compacted.*leave constants behind.*Mask their norms"):
        fit(seeded(Trained), tmp_path, Watch(), ModelCompaction(when=1, save=False), Bare())
    assert seen == {16}
    with pytest.raises(VerificationError, match="leave constants behind"):
        fit(seeded(Trained), tmp_path, ModelCompaction(when=1, on_failure="raise"), Bare())


def test_masked_channels_that_a_hook_holds_are_named(tmp_path: Path) -> None:
    """A hook runs a copy in train mode: nothing goes while training, and a warning says why; at the end it goes."""
    module, follow = seeded(Trained), Follow()
    with pytest.warns(UserWarning, match=r"not removed while training goes on.*wide \(.*At its end"):
        fit(module, tmp_path, follow, ModelCompaction(when=1, save=False), Bare())
    assert widths(follow) == [16] and module.net.wide.out_channels < 16


def test_model_pruning_does_not_go_together_with_it(tmp_path: Path) -> None:
    """Its copies cannot follow: an error before training that says what to do."""
    module = seeded(Wrapped)
    with pytest.raises(MisconfigurationException, match="`ModelPruning` keeps.*Omit `when`"):
        fit(module, tmp_path, structured(module, "wide"), ModelCompaction(when=1))


def test_buffers_of_prune_do_not_go_together_with_it(tmp_path: Path) -> None:
    """Masks of `torch.nn.utils.prune` that a user put there: refused while training, named, removed at the end."""
    module = seeded(Wrapped)
    prune.ln_structured(module.net.wide, "weight", 0.5, n=1, dim=0)
    with pytest.warns(UserWarning, match="wide.weight are masked by `torch.nn.utils.prune`"):
        fit(module, tmp_path, ModelCompaction(when=[1], save=False))
    assert module.net.wide.weight.shape[0] < 16


@pytest.mark.parametrize("when", [0.0, 1.0, -1, True, [0.5], "late"])
def test_bad_times(when: Any) -> None:
    """An error of the constructor that names it."""
    with pytest.raises(MisconfigurationException, match="`when` must be an epoch >= 0, a list of such epochs"):
        ModelCompaction(when=when)


def test_layers_that_are_set_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of each layer alone contradict each other: more goes with ``reindex``, and the checkpoint loads."""
    monkeypatch.setattr("engine.compaction.spreading.PAYS", 0.0)
    sizes = []
    for reindex in (False, True):
        module = Classifier("resnet18")
        for part in module.modules():
            if isinstance(part, nn.Conv2d):
                prune.ln_structured(part, "weight", 0.5, 1, 0)
        compaction = ModelCompaction(on_failure="raise", confidence=2, reindex=reindex)
        trainer(tmp_path / str(reindex), compaction, max_epochs=1).fit(module)
        small = load_compacted(compaction.checkpoint_path, Classifier, name="resnet18")
        x = torch.randn(2, 3, SIDE, SIDE)
        assert torch.equal(small.eval().net(x), module.eval().net(x))
        assert bool(compaction.plan.of(Spread)) is reindex
        sizes.append(sum(p.numel() for p in module.parameters()))
    assert sizes[1] < 0.9 * sizes[0]


def test_a_stream_goes_in_steps(tmp_path: Path) -> None:
    """Layer norms that lost channels lose some again: stream, heads and neurons are those of the masked run."""

    class Widths(Callback):
        def __init__(self) -> None:
            self.seen: list[tuple[int, int]] = []

        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
            net = pl_module.net
            self.seen.append((net.stem.out_channels, net.block.linear1.out_features))

    found: dict[bool, Any] = {}
    for compact in (False, True):
        follow, sizes = Widths(), ModelCompaction(when=range(4), save=False, on_failure="raise", confidence=1)
        pruning = ChannelPruning(amount=0.5, schedule="linear", start=0, end=2)
        module = seeded(Attentive)
        callbacks = [follow, pruning, *([sizes] if compact else [])]
        fit(module, tmp_path, *callbacks, precision="64-true", max_epochs=4, limit_train_batches=1)
        found[compact] = follow.seen, module
    assert found[False][0] == [(12, 16)] * 4
    assert found[True][0] == [(12, 16), (9, 12), (6, 8), (6, 8)]
    assert difference(found[False][1], found[True][1]) <= 1e-9

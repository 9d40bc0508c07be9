"""What a LightningModule runs is its steps: pruned and compacted in the middle, the fit goes on as with masks.

Twelve modules of the kinds that train by more than a call of forward, and some of public packages.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytorch_lightning import Callback, LightningModule, Trainer, seed_everything
from pytorch_lightning.demos import Transformer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from engine.errors import VerificationError
from lightning_compress import ChannelPruning, MaskConflictRepair, ModelCompaction, load_compacted
from lightning_compress.callbacks.masking import MaskingCallback
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.models import Wrapped, data, fit, trainer


class Body(nn.Module):
    """Two convolutions with norms, and features of its output."""

    def __init__(self, width: int = 8, features: int = 6) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, bias=False), nn.BatchNorm2d(width)
        self.wide, self.wide_norm = nn.Conv2d(width, 12, 3, bias=False), nn.BatchNorm2d(12)
        self.fc = nn.Linear(12, features)

    def inside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what lies inside."""
        first = torch.tanh(self.norm(self.stem(x)))
        return first, torch.tanh(self.wide_norm(self.wide(first)))

    def forward(self, x: Tensor) -> Tensor:
        """Features of images."""
        return self.fc(self.inside(x)[1].mean((2, 3)))


class Module(LightningModule):
    """Trains by its step alone; forward is that of the body."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Body()
        self._more()

    def _more(self) -> None:
        """Add what else is trained, or used."""

    def forward(self, x: Tensor) -> Tensor:
        """Features of images."""
        return self.net(x)

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        """What is minimised."""
        raise NotImplementedError

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        """Log the loss and return it."""
        loss = self._loss(batch[0], batch[1], batch_idx)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """With momentum."""
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.05, momentum=0.9)

    def train_dataloader(self) -> DataLoader:
        """The random images."""
        return data()


class SimCLR(Module):
    """Two views, a projection head, and similarities within the batch."""

    def _more(self) -> None:
        self.project = nn.Sequential(nn.Linear(12, 10, bias=False), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 4))

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        views = torch.cat([x, x.flip(3)])
        z = F.normalize(self.project(self.net.inside(views)[1].mean((2, 3))), dim=1)
        logits = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        return F.cross_entropy(logits, torch.arange(len(z)).roll(len(x)))


class MoCo(Module):
    """A momentum encoder, and a queue of its keys."""

    def _more(self) -> None:
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(6, 16), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for mine, theirs in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
                theirs.data = theirs.data * 0.9 + mine.data * 0.1
            keys = F.normalize(self.teacher(x.flip(3)), dim=1)
        queries = F.normalize(self.net(x), dim=1)
        positive = torch.einsum("nc,nc->n", queries, keys).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", queries, self.queue.clone().detach())
        place = int(self.place)
        self.queue[:, place : place + len(keys)] = keys.T
        self.place[0] = (place + len(keys)) % 16
        logits = torch.cat([positive, negative], 1) / 0.2
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


class BYOL(Module):
    """An averaged target network, which a hook updates behind each batch, and a predictor."""

    def _more(self) -> None:
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.predict = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.target(x.flip(3))
        return -F.cosine_similarity(self.predict(self.net(x)), target).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Follow."""
        with torch.no_grad():
            for mine, theirs in zip(self.net.parameters(), self.target.parameters(), strict=True):
                theirs.lerp_(mine, 0.1)


class DINO(Module):
    """A centre of the teacher's outputs in a buffer."""

    def _more(self) -> None:
        self.register_buffer("centre", torch.zeros(1, 6))

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            teacher = self.net(x.flip(3))
            target = ((teacher - self.centre) / 0.5).softmax(1)
            self.centre = self.centre * 0.9 + teacher.mean(0, keepdim=True) * 0.1
        return -(target * F.log_softmax(self.net(x), 1)).sum(1).mean()


class Distilled(Module):
    """A frozen teacher that is wider, of which features are imitated too."""

    def _more(self) -> None:
        self.teacher = Body(20).requires_grad_(False)
        self.hint = nn.Conv2d(8, 20, 1)

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        inner, _ = self.net.inside(x)
        with torch.no_grad():
            wide, _ = self.teacher.inside(x)
            soft = self.teacher(x).softmax(1)
        return F.kl_div(F.log_softmax(self.net(x), 1), soft, reduction="batchmean") + F.mse_loss(self.hint(inner), wide)


class Supervised(Module):
    """An auxiliary head on inner features, while training only."""

    def _more(self) -> None:
        self.aux = nn.Sequential(nn.Conv2d(8, 6, 1, bias=False), nn.BatchNorm2d(6), nn.Tanh(), nn.Conv2d(6, 3, 1))

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        first, second = self.net.inside(x)
        out = self.net.fc(second.mean((2, 3)))
        return F.cross_entropy(out, y) + 0.4 * F.cross_entropy(self.aux(first).mean((2, 3)), y)


class Penalised(Module):
    """The mean absolute weight, and orthogonal filters, of all convolutions."""

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        total = F.cross_entropy(self(x), y)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                w = module.weight.flatten(1)
                total = total + 0.1 * w.abs().mean() + 0.1 * (w @ w.T - torch.eye(len(w))).square().sum()
        return total


class Activated(Module):
    """A penalty over features that hooks collect."""

    def _more(self) -> None:
        self.kept: list[Tensor] = []
        self.net.norm.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.kept.append(out)

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        self.kept.clear()
        loss = F.cross_entropy(self(x), y)
        loss = loss + 0.1 * torch.stack([t.square().mean() for t in self.kept]).sum()
        self.kept.clear()
        return loss


class Mixed(Module):
    """Mixup within the step, of images and of features, with soft targets."""

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        first = torch.tanh(self.net.norm(self.net.stem(0.8 * x + 0.2 * x.flip(0))))
        first = 0.7 * first + 0.3 * first.flip(0)
        out = self.net.fc(torch.tanh(self.net.wide_norm(self.net.wide(first))).mean((2, 3)))
        target = 0.6 * F.one_hot(y, 6) + 0.4 * F.one_hot(y.flip(0), 6)
        return -(target * F.log_softmax(out, 1)).sum(1).mean()


class Generator(nn.Module):
    """Noise in, images out."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(5, 12, bias=False), nn.BatchNorm1d(12)
        self.out = nn.Linear(12, 3 * 8 * 8)

    def forward(self, z: Tensor) -> Tensor:
        """Images of noise."""
        return torch.tanh(self.out(torch.tanh(self.norm(self.fc(z))))).view(-1, 3, 8, 8)


class GAN(Module):
    """Two networks, two optimizers, each stepping by hand; every second batch trains the generator."""

    def _more(self) -> None:
        self.automatic_optimization = False
        self.generator = Generator()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Train the critic, then, at times, the generator."""
        mine, theirs = self.optimizers()
        z = torch.linspace(-1, 1, len(batch[0]) * 5, dtype=batch[0].dtype).view(-1, 5).sin()
        self.toggle_optimizer(theirs)
        loss = (
            self.net(self.generator(z).detach()).mean() - self.net(batch[0]).mean() + self.net(batch[0]).square().mean()
        )
        theirs.zero_grad()
        self.manual_backward(loss)
        theirs.step()
        self.untoggle_optimizer(theirs)
        self.log("loss", loss.detach())
        if batch_idx % 2:
            self.toggle_optimizer(mine)
            mine.zero_grad()
            self.manual_backward(-self.net(self.generator(z)).mean())
            mine.step()
            self.untoggle_optimizer(mine)

    def configure_optimizers(self) -> Any:
        """One for each network."""
        return [torch.optim.SGD(self.generator.parameters(), 0.05), torch.optim.SGD(self.net.parameters(), 0.05)]


class Reading(Metric):
    """Holds a network, and averages its features."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        """Add features."""
        self.total = self.total + self.net.inside(x)[0].square().mean().detach()

    def compute(self) -> Tensor:
        """Return their sum."""
        return self.total


class Measured(Module):
    """Metrics in the steps, one of which holds the model."""

    def _more(self) -> None:
        self.accuracy, self.average, self.reading = MulticlassAccuracy(6), MeanMetric(), Reading(self.net)

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        out = self(x)
        self.log("accuracy", self.accuracy(out, y))
        self.average.update(out.mean())
        self.log("average", self.average)
        return F.cross_entropy(out, y)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Read features."""
        self.reading.update(batch[0])
        self.log("reading", self.reading)

    def val_dataloader(self) -> DataLoader:
        """The random images."""
        return data(8)


class VAE(Module):
    """Samples codes, and decodes them, which forward does not."""

    def _more(self) -> None:
        self.decode = Generator()
        self.decode.fc = nn.Linear(3, 12, bias=False)

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        mean, spread = self.net(x).chunk(2, 1)
        noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(batch_idx), dtype=mean.dtype)
        image = self.decode(mean + noise * (0.5 * spread).exp())
        return F.mse_loss(image, x) + 0.01 * (mean.square() + spread.exp() - spread).mean()


class Accumulating(Module):
    """Accumulates gradients over two batches by hand, also across epochs."""

    def _more(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Step at every second batch."""
        optimizer = self.optimizers()
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.manual_backward(loss / 2)
        self.log("loss", loss.detach())
        if (batch_idx + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


class Language(Module):
    """Lightning's own transformer for language, without dropout."""

    def _more(self) -> None:
        self.net = Transformer(vocab_size=20, ninp=8, nhead=2, nhid=12, nlayers=1, dropout=0.0)
        self.example_input_array = (torch.zeros(2, 6, dtype=torch.long), torch.zeros(2, 6, dtype=torch.long))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Log probabilities."""
        return self.net(x, target)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Next tokens."""
        loss = F.nll_loss(self(batch[:, :-1], batch[:, 1:]), batch[:, 1:].reshape(-1))
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> DataLoader:
        """Random tokens."""
        return DataLoader(torch.randint(20, (24, 7), generator=torch.Generator().manual_seed(0)), batch_size=8)


class Metrics(Module):
    """Losses over pairs of torchmetrics, with a collection that is reset within an epoch."""

    def _more(self) -> None:
        self.accuracy = MulticlassAccuracy(6)
        self.head = nn.Linear(8, 6)

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        first, second = self.net.inside(x)
        self.accuracy(self.head(first.mean((2, 3))), y)
        if batch_idx == 1:
            self.log("middle", self.accuracy.compute())
            self.accuracy.reset()
        return F.cross_entropy(self.net.fc(second.mean((2, 3))), y) + F.cross_entropy(self.head(first.mean((2, 3))), y)


class Validated(Module):
    """Its own forward calls the layers, and its steps call other methods of metrics than forward."""

    def _more(self) -> None:
        self.stem, self.wide, self.fc = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3), nn.Linear(8, 6)
        del self.net
        self.accuracy = MulticlassAccuracy(6)
        self.scores = MetricCollection({"accuracy": MulticlassAccuracy(6), "f1": MulticlassF1Score(6)})

    def forward(self, x: Tensor) -> Tensor:
        """Scores of images."""
        return self.fc(self.wide(self.stem(x).relu()).relu().mean((2, 3)))

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        scores = self(x)
        self.accuracy.update(scores, y)
        return F.cross_entropy(scores, y)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Update the collection, and log it."""
        self.scores.update(self(batch[0]), batch[1])
        self.log_dict(self.scores)

    def val_dataloader(self) -> DataLoader:
        """The random images."""
        return data()


class Segmented(Module):
    """A U-Net of MONAI under its Dice loss."""

    def _more(self) -> None:
        nets, losses = pytest.importorskip("monai.networks.nets"), pytest.importorskip("monai.losses")
        self.net = nets.UNet(2, 3, 2, channels=(4, 8), strides=(2,), norm="batch", act="tanh")
        self.dice = losses.DiceLoss(softmax=True)

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        return self.dice(self.net(x), (x[:, :1] > 0).long().expand(-1, 2, -1, -1))


class Contrasted(Module):
    """Lightly's projection head and loss."""

    def _more(self) -> None:
        modules, losses = pytest.importorskip("lightly.models.modules"), pytest.importorskip("lightly.loss")
        self.project = modules.SimCLRProjectionHead(12, 10, 4)
        self.criterion = losses.NTXentLoss()

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        views = [self.project(self.net.inside(view)[1].mean((2, 3))) for view in (x, x.flip(3))]
        return self.criterion(*views)


class Follow(Callback):
    """Notes the loss of each step, and how many parameters there are."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.sizes: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, *rest: Any) -> None:
        """Note."""
        self.losses.append(trainer.callback_metrics["loss"].clone())
        self.sizes.append(sum(p.numel() for p in pl_module.parameters()))


REFUSED = {Penalised: "Nothing can be pruned.*mean .*test_entries.py"}
SMALLER = [SimCLR, MoCo, BYOL, DINO, Distilled, Supervised, Mixed, GAN, VAE, Accumulating, Metrics, Segmented]
SMALLER += [Contrasted, Language, Validated]
WHOLE_OR_SMALLER = [Activated, Measured]


def trained(module: Module, folder: Path, compact: bool, *others: Callback) -> tuple[Follow, ModelCompaction]:
    """Prune in the second epoch, and compact at once, or at the end only."""
    follow = Follow()
    compaction = ModelCompaction(when=1, on_failure="raise", confidence=2, dirpath=folder, model="")
    watch = ModelCompaction(when=0.99, on_failure="raise", confidence=0, save=False, model="")
    layers = "*linear1" if isinstance(module, Language) else "*"  # a criterion for attention is another matter
    pruning = ChannelPruning(amount=0.5, schedule="one_shot", start=1, model="", layers=layers)
    callbacks = [follow, compaction if compact else watch, pruning, MaskConflictRepair(model=""), *others]
    if not compact:
        watch._finish = lambda *args, **kwargs: None  # masked to the end, with the steps in the analysis all the same
    fit(module, folder, *callbacks, precision="64-true", max_epochs=3, limit_val_batches=1)
    return follow, compaction


@pytest.mark.parametrize("make", [*SMALLER, *WHOLE_OR_SMALLER])
def test_the_fit_goes_on(make: Callable[[], Module], tmp_path: Path) -> None:
    """Losses of all steps are those of the masked fit; what is reloaded is what was trained."""
    modules = make(), make()
    masked, _ = trained(modules[0], tmp_path / "masked", compact=False)
    followed, compaction = trained(modules[1], tmp_path / "compacted", compact=True)
    pairs = list(zip(masked.losses, followed.losses, strict=True))
    assert len(pairs) == 9
    assert max(float((a - b).abs() / a.abs().clamp(min=1e-3)) for a, b in pairs) <= 1e-9
    if make in SMALLER:
        assert len(set(followed.sizes)) == 2, followed.sizes
    if compaction.plan is None:
        return
    assert "training_step" in compaction.certificate.entries or len(set(followed.sizes)) == 2
    torch.set_default_dtype(torch.float64)
    try:
        loaded = load_compacted(compaction.checkpoint_path, make)
    finally:
        torch.set_default_dtype(torch.float32)
    small, again = modules[1].state_dict(), loaded.state_dict()
    assert small.keys() == again.keys() and all(torch.equal(small[name], again[name]) for name in small)


@pytest.mark.parametrize("when", [None, 1])
def test_a_teacher_stays_as_it_is(when: int | None, tmp_path: Path) -> None:
    """What forward does not read is pruned only where a pattern names it, whenever the network becomes smaller."""
    module = Distilled()
    before = copy.deepcopy(module.teacher)
    pruning = ChannelPruning(amount=0.5, schedule="one_shot", start=1, model="")
    compaction = ModelCompaction(when=when, on_failure="raise", dirpath=tmp_path, model="")
    fit(module, tmp_path, pruning, MaskConflictRepair(model=""), compaction, precision="64-true", max_epochs=2)
    assert module.net.wide.out_channels == 6
    after = dict(module.teacher.named_parameters())
    assert all(torch.equal(parameter.double(), after[name].double()) for name, parameter in before.named_parameters())


@pytest.mark.parametrize("make", REFUSED)
def test_what_cannot_shrink_is_refused(make: type[Module], tmp_path: Path) -> None:
    """At setup, with the line that stands against it."""
    with pytest.raises(MisconfigurationException, match=REFUSED[make]):
        trained(make(), tmp_path, compact=True)


class Broken(Module):
    """A step that cannot run without a Trainer that works."""

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        raise ValueError("no such batch")


def test_a_step_that_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    """Before the first epoch, by its name, with what to do; and nothing is recorded where that is asked for."""
    with pytest.raises(MisconfigurationException, match="'training_step' cannot be recorded.*no such batch.*steps="):
        trained(Broken(), tmp_path, compact=True)
    with pytest.raises(ValueError, match="no such batch"):
        fit(Broken(), tmp_path, ModelCompaction(when=1, steps=False), MaskingCallback())


def test_recording_leaves_no_trace(tmp_path: Path) -> None:
    """Weights, metrics, logs, random numbers and the order of batches are those of a fit without it."""
    seen = []
    for callbacks in ([], [ModelCompaction(when=0.99, save=False), MaskingCallback()]):
        module, follow = Shuffled(), Follow()
        torch.manual_seed(3)
        module.random = torch.Generator().manual_seed(4)
        result = fit(module, tmp_path, follow, *callbacks, max_epochs=2, limit_val_batches=1)
        seen.append((follow.losses, list(module.parameters()), torch.rand(1), result.callback_metrics, module.draws))
    losses, parameters, random, logged, draws = zip(*seen, strict=True)
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1])) and torch.equal(*random)
    assert all(torch.equal(a, b) for a, b in zip(*parameters, strict=True))
    assert logged[0] == logged[1] and draws[0] == draws[1] == 6


class Shuffled(Measured):
    """Shuffles batches with a generator of its own, and counts its steps."""

    draws = 0

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        self.draws += 1
        return super()._loss(x, y, batch_idx)

    def train_dataloader(self) -> DataLoader:
        """The random images."""
        return DataLoader(data().dataset, batch_size=8, shuffle=True, generator=self.random)


class Alternating(Module):
    """Another loss for every second batch."""

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        first, second = self.net.inside(x)
        return F.cross_entropy(self(x), y) if batch_idx % 2 == 0 else first.var() + second.var()


class EveryThird(Module):
    """A penalty over a weight at some batches."""

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(x), y)
        return loss + self.net.wide.weight.std() if (batch_idx + 1) % 3 == 0 else loss


class Later(Module):
    """A penalty that begins with a step that an attribute names."""

    begin = 0

    def _more(self) -> None:
        self.begin = 4

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(x), y)
        return loss + self.net.wide.weight.std() if self.global_step >= self.begin else loss


class LastEpoch(Module):
    """A penalty in the last epoch alone."""

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(x), y)
        return loss + self.net.wide.weight.std() if self.trainer.current_epoch == 2 else loss


class LastBatch(Module):
    """A penalty at the last batch of an epoch."""

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(x), y)
        return loss + self.net.wide.weight.std() if self.trainer.is_last_batch else loss


class Phases(Module):
    """A flag that a hook sets."""

    def _more(self) -> None:
        self.second_phase = False

    def on_train_epoch_start(self) -> None:
        """Begin the second phase."""
        self.second_phase = self.current_epoch > 1

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(x), y)
        return loss + self.net.wide.weight.std() if self.second_phase else loss


class OwnBackward(Module):
    """A penalty in a backward pass of its own."""

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(x), y)

    def backward(self, loss: Tensor) -> None:
        """Differentiate the loss, and the penalty."""
        loss.backward()
        self.net.wide.weight.std().backward()


@pytest.mark.parametrize("make", [Alternating, EveryThird, Later, LastEpoch, LastBatch, Phases, OwnBackward])
def test_what_a_first_batch_does_not_show_counts(make: type[Module], tmp_path: Path) -> None:
    """What runs at another batch, step or epoch, in another phase or in a backward pass keeps what it reads whole."""
    with pytest.raises(MisconfigurationException, match=r"Nothing can be pruned.*(std|var) .*test_entries.py"):
        trained(make(), tmp_path, compact=True)


class Annealed(Module):
    """The weight of a term grows from zero."""

    def _more(self) -> None:
        self.aux = nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 4))

    def _loss(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        features = self.net.inside(x)[1].mean((2, 3))
        weight = min(1.0, self.global_step / 10)
        return F.cross_entropy(self.net.fc(features), y) + weight * (self.aux(features) - 1).square().mean()


class Unused(Module):
    """Asks for no moment, and counts what it does."""

    def _more(self) -> None:
        self.calls = 0

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Count the call."""
        self.calls += 1
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss


class Clamped(Unused):
    """Hooks that change each entry of a gradient, and of a weight, by itself."""

    def on_after_backward(self) -> None:
        """Clip each entry."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.01, 0.01)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Log how large the gradients are, and shrink them."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.log("norm", torch.stack([gradient.norm() for gradient in gradients]).norm())
        for gradient in gradients:
            gradient.mul_(0.9)


class OwnStep(Unused):
    """Clamps the weights behind the optimizer's step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        """Step, and clamp."""
        optimizer.step(closure=closure)
        with torch.no_grad():
            self.net.fc.weight.clamp_(-0.2, 0.2)


class Unfreezing(Unused):
    """Trains the first layer from the second epoch on."""

    def _more(self) -> None:
        super()._more()
        self.net.stem.weight.requires_grad_(False)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Add a group to the optimizer, once."""
        if self.current_epoch >= 1 and not self.net.stem.weight.requires_grad:
            self.net.stem.weight.requires_grad_(True)
            self.optimizers().add_param_group({"params": [self.net.stem.weight], "lr": 0.01})
        return super().training_step(batch)


class ManuallyClipped(Module):
    """Clips the norm of all gradients by hand."""

    def _more(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor]) -> None:
        """Train, and log the loss."""
        optimizer, loss = self.optimizers(), F.cross_entropy(self(batch[0]), batch[1])
        optimizer.zero_grad()
        self.manual_backward(loss)
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        optimizer.step()
        self.log("loss", loss.detach())


class Renormed(Unused):
    """Norms of units are limited at the end of a batch (Srivastava et al., JMLR 2014), which reads whole units."""

    def on_train_batch_end(self, *args: Any) -> None:
        """Limit."""
        with torch.no_grad():
            self.net.wide.weight.copy_(torch.renorm(self.net.wide.weight, 2, 0, 0.5))


class AverageOfFloats(Unused):
    """An average over the state, of what has floating-point numbers (ModelEMA of YOLOv5)."""

    def _more(self) -> None:
        super()._more()
        self.ema = copy.deepcopy(self.net).requires_grad_(False)

    def on_train_batch_end(self, *args: Any) -> None:
        """Go a step further."""
        state = self.net.state_dict()
        for name, value in self.ema.state_dict().items():
            if value.dtype.is_floating_point:
                value.mul_(0.9).add_(state[name].detach(), alpha=0.1)


CUT = [Annealed, Unused, Clamped, OwnStep, Unfreezing, ManuallyClipped, Renormed, AverageOfFloats]


@pytest.mark.parametrize("make", CUT)
def test_steps_and_hooks_that_may_be_cut(make: Callable[[], Module], tmp_path: Path) -> None:
    """They train on as with masks."""
    test_the_fit_goes_on(make, tmp_path)


class Centred(Unused):
    """Gradient centralization (Yong et al., ECCV 2020), over the optimizer's groups."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Subtract the mean over what a unit reads."""
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None and parameter.ndim > 1:
                parameter.grad -= parameter.grad.mean(tuple(range(1, parameter.ndim)), keepdim=True)


class Scaled(Unused):
    """Gradients over their mean."""

    def on_after_backward(self) -> None:
        """Scale."""
        for parameter in self.net.parameters():
            parameter.grad /= parameter.grad.abs().mean() + 1e-3


class Noisy(Unused):
    """Noise on gradients, whose random numbers follow their shapes (Neelakantan et al., arXiv 1511.06807)."""

    def configure_gradient_clipping(self, optimizer: Any, **limits: Any) -> None:
        """Add noise in place of clipping."""
        generator = torch.Generator().manual_seed(self.calls)
        for parameter in self.net.parameters():
            parameter.grad += 0.01 * torch.randn(parameter.shape, generator=generator).to(parameter)


class CentredLater(Centred):
    """From an epoch on."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Subtract means in the last epoch."""
        if self.current_epoch >= 2:
            super().on_before_optimizer_step(optimizer)


@pytest.mark.parametrize("make", [Centred, CentredLater, Scaled, Noisy])
def test_hooks_that_mix_channels_are_refused(make: type[Module], tmp_path: Path) -> None:
    """With what they would change differently than with masks; the model stays."""
    module = make()
    with pytest.raises(VerificationError, match="Hooks that run after the gradients of 'training_step.*' change"):
        trained(module, tmp_path, compact=True)
    assert module.net.wide.out_channels == 12


class Centring(Callback):
    """The same from outside, with a note of how often."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Subtract means."""
        self.calls.append(trainer.global_step)
        Centred.on_before_optimizer_step(pl_module, optimizer)


def test_hooks_of_callbacks(tmp_path: Path) -> None:
    """They are tried as copies, and refused alike."""
    callback = Centring()
    with pytest.raises(VerificationError, match="Hooks that run after the gradients of 'training_step.*' change"):
        trained(Unused(), tmp_path, True, callback)
    assert callback.calls == [0, 1, 2]


class CentringLater(Centring):
    """From an epoch on that an attribute names."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = 2

    def on_before_optimizer_step(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        """Subtract means, late."""
        if trainer.current_epoch >= self.begin:
            super().on_before_optimizer_step(trainer, pl_module, optimizer)


def test_hooks_of_callbacks_at_other_moments(tmp_path: Path) -> None:
    """They are tried when they act."""
    with pytest.raises(VerificationError, match="after the gradients of 'training_step, epoch 2' change"):
        trained(Unused(), tmp_path, True, CentringLater())


class Biased(LightningModule):
    """Convolutions with a bias in front of their batch norms: a gradient that is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4),
        )  # fmt: skip

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        """Adam."""
        return torch.optim.Adam(self.parameters(), 1e-2)


@pytest.mark.parametrize("seed", [1, 4])  # refused if rounding counts
def test_a_bias_in_front_of_a_batch_norm(tmp_path: Path, seed: int) -> None:
    """What rounding leaves of a sum that cancels out follows the number of channels, and is no difference."""
    seed_everything(seed, verbose=False)
    images = torch.randn(48, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    loader = DataLoader(list(zip(images, torch.arange(48) % 4, strict=True)), 16)  # type: ignore[arg-type]
    compaction = ModelCompaction(tmp_path / "small.ckpt", save=False, on_failure="raise", when=1)
    pruning = ChannelPruning(amount=0.5, schedule="one_shot", start=1)
    run = trainer(tmp_path, pruning, MaskConflictRepair(), compaction, max_epochs=2, limit_train_batches=3)
    module = Biased()
    run.fit(module, loader)
    assert module.net[0].weight.shape[0] == 4


class BestWeights(Callback):
    """Keeps the weights of the best validation, and loads them when training ends."""

    def __init__(self) -> None:
        self.best, self.weights = float("inf"), dict[str, Tensor]()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep a copy."""
        loss = float(trainer.callback_metrics["val_loss"])
        if loss <= self.best:
            self.best, self.weights = loss, copy.deepcopy(pl_module.state_dict())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load them."""
        pl_module.load_state_dict(self.weights)


def test_what_steps_leave_does_not_matter_when_the_fit_is_over(tmp_path: Path) -> None:
    """At the end, a copy of all weights is no reason to refuse."""
    compaction = ModelCompaction(tmp_path / "small.ckpt", save=False, on_failure="raise")
    module, pruning = Wrapped(), ChannelPruning(amount=0.5, schedule="one_shot")
    fit(module, tmp_path, pruning, MaskConflictRepair(), compaction, BestWeights(), max_epochs=2, limit_val_batches=1)
    assert module.net.wide.weight.shape[0] == 8

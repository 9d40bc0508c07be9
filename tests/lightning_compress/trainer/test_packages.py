"""Tests of the classes shared by both Lightning packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import pytorch_lightning
import torch
import torch.nn.functional as F
from pytorch_lightning.utilities.exceptions import MisconfigurationException as TheirException
from torch import Tensor

import lightning_compress
from lightning_compress.trainer.packages import Callback, MisconfigurationException, classes
from tests.lightning_compress.models import Net, data

ROOT = Path(__file__).parents[3]


def test_public_names_are_sorted_and_exist() -> None:
    """`__all__` is sorted, and each name in it is an attribute."""
    assert lightning_compress.__all__ == sorted(lightning_compress.__all__)
    assert all(hasattr(lightning_compress, name) for name in lightning_compress.__all__)


def test_callbacks_are_callbacks_of_the_installed_package() -> None:
    """A callback derives from pytorch_lightning's, so its Trainer takes it."""
    assert issubclass(Callback, pytorch_lightning.Callback)
    assert issubclass(lightning_compress.ChannelPruning, pytorch_lightning.Callback)


def test_errors_are_caught_as_lightnings() -> None:
    """What is raised is caught as Lightning's own MisconfigurationException."""
    with pytest.raises(TheirException, match="amount"):
        lightning_compress.ChannelPruning(amount=2.0)
    assert issubclass(MisconfigurationException, TheirException)


def test_unknown_class_is_an_error() -> None:
    """A class that a package lacks raises and is not left out."""
    with pytest.raises(AttributeError, match="Nothing"):
        classes("tree", "Nothing")


def test_both_class_trees_are_joined(tmp_path: Path) -> None:
    """Where `lightning` is installed too, the callbacks derive from both packages' Callback."""
    files = {
        "lightning/__init__.py": "",
        "lightning/pytorch/__init__.py": "class Callback: pass\nclass LightningDataModule: pass\n"
        "class LightningModule:\n    def forward(self): pass\n",
        "lightning/pytorch/callbacks.py": "from lightning.pytorch import Callback\n"
        "class StochasticWeightAveraging(Callback): pass\n",
        "lightning/fabric/__init__.py": "",
        "lightning/fabric/utilities/__init__.py": "",
        "lightning/fabric/utilities/exceptions.py": "class MisconfigurationException(Exception): pass\n",
        "lightning/pytorch/loggers/__init__.py": "",
        "lightning/pytorch/loops/__init__.py": "",
        "lightning/pytorch/loops/loop.py": "class _Loop: pass\n",
        "lightning/pytorch/loggers/logger.py": "class DummyLogger: pass\n",
        "lightning/pytorch/utilities/__init__.py": "",
        "lightning/pytorch/utilities/signature_utils.py": "is_param_in_hook_signature = None\n",
        "lightning/pytorch/utilities/combined_loader.py": "class CombinedLoader: pass\n",
        "lightning/pytorch/utilities/seed.py": "isolate_rng = None\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    program = (
        "import pytorch_lightning, importlib.util, sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "sys.modules.pop('lightning', None)\n"
        "from lightning_compress import ComplexityMonitor\n"
        "import lightning.pytorch\n"
        "assert issubclass(ComplexityMonitor, pytorch_lightning.Callback)\n"
        "assert issubclass(ComplexityMonitor, lightning.pytorch.Callback)\n"
        "assert ComplexityMonitor().history == []\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


def test_a_fit_under_the_other_package(tmp_path: Path) -> None:
    """Where `lightning` is installed, its Trainer prunes, repairs, compacts twice, and the result loads."""
    pl = pytest.importorskip("lightning.pytorch")

    class Module(pl.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 0.01)

    module, compaction = Module(), lightning_compress.ModelCompaction(when=1, on_failure="raise")
    repair, monitor = lightning_compress.MaskConflictRepair(), lightning_compress.ComplexityMonitor()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=3, logger=False, enable_checkpointing=False, default_root_dir=tmp_path,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[compaction, monitor, repair, lightning_compress.ChannelPruning(amount=0.5, start=1, end=2)],
    )  # fmt: skip
    trainer.fit(module, data())
    assert module.net.wide.out_channels == 8 and monitor.history
    loaded = lightning_compress.load_compacted(compaction.checkpoint_path, Module)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), module.parameters(), strict=True))

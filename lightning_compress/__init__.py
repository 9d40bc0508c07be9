"""Lightning callbacks that prune while training, repair masks, count what is saved, and remove what is masked."""

from lightning_compress import namesake as namesake  # first: it checks which `engine` the others would import

from engine import __version__ as __version__  # isort: skip
from lightning_compress.callbacks.compaction import ModelCompaction
from lightning_compress.callbacks.compensation import Compensation
from lightning_compress.callbacks.complexity import ComplexityMonitor
from lightning_compress.callbacks.distillation import Distillation
from lightning_compress.callbacks.final import FinalMetric
from lightning_compress.callbacks.pruning import ChannelPruning
from lightning_compress.callbacks.repair import MaskConflictRepair
from lightning_compress.callbacks.report import CompressionReport
from lightning_compress.callbacks.sparse import SparseTraining
from lightning_compress.checkpoints.compacted import load_compacted
from lightning_compress.checkpoints.offline import compact_checkpoint
from lightning_compress.one_shot import prune
from lightning_compress.selection.allocation import allocate_by_sensitivity, anneal_amounts
from lightning_compress.selection.sensitivity import analyze_sensitivity, validation_metric
from lightning_compress.stock.pretrained import save_pretrained
from lightning_compress.stock.source import save_stock
from lightning_compress.summary import summarize
from lightning_compress.trainer.restore import Compactable

__all__ = [
    "ChannelPruning",
    "Compactable",
    "Compensation",
    "ComplexityMonitor",
    "CompressionReport",
    "Distillation",
    "FinalMetric",
    "MaskConflictRepair",
    "ModelCompaction",
    "SparseTraining",
    "allocate_by_sensitivity",
    "analyze_sensitivity",
    "anneal_amounts",
    "compact_checkpoint",
    "load_compacted",
    "prune",
    "save_pretrained",
    "save_stock",
    "summarize",
    "validation_metric",
]

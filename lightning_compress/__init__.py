"""Lightning callbacks that prune while training, repair masks, count what is saved, and remove what is masked."""

from lightning_compress import namesake as namesake  # first: it checks which `engine` the others would import
from lightning_compress.allocation import allocate_by_sensitivity, anneal_amounts
from lightning_compress.checkpoint import load_compacted
from lightning_compress.compaction import ModelCompaction
from lightning_compress.compensating import Compensation
from lightning_compress.complexity import ComplexityMonitor
from lightning_compress.distillation import Distillation
from lightning_compress.final import FinalMetric
from lightning_compress.loading import Compactable
from lightning_compress.offline import compact_checkpoint
from lightning_compress.one_shot import prune
from lightning_compress.pruning import ChannelPruning
from lightning_compress.repair import MaskConflictRepair
from lightning_compress.reporting import CompressionReport
from lightning_compress.sensitivity import analyze_sensitivity, validation_metric
from lightning_compress.sparse import SparseTraining

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
    "validation_metric",
]

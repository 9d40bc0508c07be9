"""A fit on two CPU processes in which a callback of the second cannot follow a compaction.

Started by test_ddp.py: ``python ddp_refused.py FOLDER``.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

from engine.errors import VerificationError
from lightning_compress import ChannelPruning, ModelCompaction
from lightning_compress.callbacks.base import CompressionCallback
from tests.lightning_compress.ddp_fit import Joined, Record, Synced
from tests.lightning_compress.models import fit, seeded, use_one_thread


class Failing(CompressionCallback):
    """Fails on one rank, when the models of both are narrow."""

    def after_compaction(self, *_: Any) -> None:
        """Fail."""
        if os.environ.get("LOCAL_RANK") == "1":
            raise VerificationError("no way to follow")


def run(folder: Path) -> None:
    """Prune in the second epoch, fail to compact, go on, and compact at the end."""
    use_one_thread()
    pruning = ChannelPruning(amount=0.5, schedule="one_shot", start=1)
    compaction = ModelCompaction(when=1, confidence=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callbacks = [pruning, compaction, Failing(), Record(folder, pruning, compaction)]
        options: dict[str, Any] = {"precision": "64-true", "max_epochs": 3, "use_distributed_sampler": False}
        options["plugins"] = [Synced()]
        fit(seeded(Joined, batch=4), folder, *callbacks, strategy="ddp", devices=2, **options)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        (folder / "warnings.txt").write_text("\n".join(str(warning.message) for warning in caught))


if __name__ == "__main__":
    run(Path(sys.argv[1]))

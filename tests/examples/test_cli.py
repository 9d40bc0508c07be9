"""Everything from a YAML file, on a few digits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("jsonargparse")

import cli

from lightning_compress import CompressionReport, ModelCompaction
from tests.examples.small import one_thread


def test_without_arguments_it_runs_the_file_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make example NAME=cli` is enough."""
    seen: list[object] = []
    monkeypatch.setattr(cli, "LightningCLI", lambda *_, args, **__: seen.append(args))
    monkeypatch.setattr("sys.argv", ["cli.py"])
    cli.main()
    assert seen == [["fit", "--config", str(Path(cli.__file__).with_suffix(".yaml"))]] and Path(seen[0][2]).is_file()


@pytest.mark.filterwarnings(r"ignore:[\s\S]*(Jsonargparse|was deprecated in v)")
def test_the_file_configures_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the MACs go, in widths that are multiples of four; the stem stays; page and checkpoint are written."""
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    options = ["--trainer.max_epochs=2", "--data.limit=96", f"--trainer.logger.init_args.save_dir={tmp_path}"]
    quiet = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    config = Path(cli.__file__).with_suffix(".yaml")
    monkeypatch.setattr("sys.argv", ["cli.py", "fit", "--config", str(config), *options, *quiet])
    with one_thread():
        done = cli.main()
    found = {type(callback): callback for callback in done.trainer.callbacks}
    assert found[ModelCompaction].certificate.verified
    report = found[CompressionReport].report
    assert report.settings["ChannelPruning"]["target"] == "macs"
    assert 0.4 < report.after.macs / report.before.macs <= 0.5
    widths = {layer.name: layer.channels for layer in report.after.layers}
    assert widths["net.stem.0.0"] == 16 and all(n % 4 == 0 for name, n in widths.items() if name != "net.head")
    assert (
        torch.load(found[ModelCompaction].checkpoint_path, weights_only=True) and found[CompressionReport].path.exists()
    )

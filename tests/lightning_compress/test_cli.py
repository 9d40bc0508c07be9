"""Tests of the callbacks under LightningCLI: every constructor argument of every callback can be given in YAML."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_compress
from lightning_compress.trainer.packages import Callback
from tests.lightning_compress.models import Wrapped

pytest.importorskip("jsonargparse")
cli = pytest.importorskip("pytorch_lightning.cli")

CALLBACKS = {
    name: cls
    for name, cls in vars(lightning_compress).items()
    if inspect.isclass(cls) and issubclass(cls, Callback) and name in lightning_compress.__all__
}

# Values that are not defaults, as YAML has them, in each form that an argument takes.
VALUES: dict[str, list[dict[str, Any]]] = {
    "ChannelPruning": [
        {
            "criterion": "l2", "amount": 0.3, "schedule": "linear", "start": 1, "end": 2, "unit": "step",
            "frequency": 2, "layers": "wide", "exclude": "stem", "model": "net", "example_input": [1, 3, 8, 8],
            "seed": 3, "scope": "isomorphic", "target": "macs", "normalize": "max", "max_amount": 0.9, "round_to": 2,
            "minimum": 2, "gather_every": 1, "widths": {"wide": [4, 8]}, "attention": "dimensions",
            "samples": 64, "constants": "embed", "uniform": True,
        },
        {
            "criterion": ["l1", "taylor"], "amount": {"wide": 0.3, "*": 0.5}, "schedule": [0.5, 1.0],
            "layers": ["wide", "stem"], "exclude": ["stem"], "cool_down": 0, "normalize": "torch:sigmoid",
            "scope": "lightning_compress.selection.ladders:isomorphism", "max_amount": {"wide": 0.5},
        },
        {
            "criterion": {"l1": 0.5, "apoz": 2.0}, "target": "params", "budget": 1000.0,
            "schedule": {"warm_up": {"part": 0.2, "schedule": {"exponential": {"rate": 3}}}},
        },
        {
            "criterion": "lightning_compress.selection.criteria:lamp",
            "schedule": "lightning_compress.selection.schedules:one_shot",
        },
    ],
    "Compensation": [
        {"samples": 64, "method": "norms", "ridge": 0.1, "model": "net", "example_input": [1, 3, 8, 8], "seed": 1},
    ],
    "ComplexityMonitor": [{"model": "net", "example_input": [1, 3, 8, 8]}],
    "Distillation": [
        {
            "teacher": "dense.ckpt", "weight": 0.5, "temperature": 2.0, "layers": "wide", "loss": "mse", "dim": 1,
            "model": "net",
        },
        {"layers": ["wide", "back"], "loss": "torch.nn.functional:l1_loss"},
    ],
    "FinalMetric": [{"monitor": "val_loss", "mode": "max"}],
    "MaskConflictRepair": [{"policy": "score", "model": "net", "example_input": [1, 3, 8, 8]}],
    "ModelCompaction": [
        {
            "dirpath": "small", "filename": "tiny", "confidence": 2, "on_failure": "raise", "save": False,
            "model": "net", "example_input": [1, 3, 8, 8], "latency_runs": 3, "reindex": True,
        },
    ],
    "SparseTraining": [
        {
            "penalty": "group_lasso", "strength": 0.01, "growth": "cubic", "start": 1, "end": 2, "unit": "epoch",
            "amount": 0.5, "layers": "wide", "exclude": "stem", "model": "net", "example_input": [1, 3, 8, 8],
        },
        {"growth": {"exponential": {"rate": 2}}, "layers": ["wide"], "exclude": ["stem"]},
        {"growth": [0.0, 1.0]},
    ],
}  # fmt: skip


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest's arguments are none of LightningCLI's, and its own use of jsonargparse is behind the newest version."""
    monkeypatch.setattr("sys.argv", ["fit.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


def made(folder: Path, name: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The callback that a LightningCLI makes of a YAML file, and the arguments as it understood them."""
    entry = {"class_path": f"lightning_compress.{name}", "init_args": arguments}
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    config = {"trainer": {**quiet, "callbacks": [entry]}, "seed_everything": False}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    found = cli.LightningCLI(Wrapped, args=["--config", str(folder / "config.yaml")], run=False)
    callback = next(c for c in found.trainer.callbacks if type(c).__name__ == name)
    return callback, found.config["trainer"]["callbacks"][0]["init_args"].as_dict()


def defaults(name: str) -> dict[str, Any]:
    """Each argument of a constructor with its default."""
    parameters = inspect.signature(CALLBACKS[name]).parameters
    return {n: p.default for n, p in parameters.items() if p.default is not p.empty}


@pytest.mark.parametrize("name", sorted(CALLBACKS))
def test_each_argument_arrives(tmp_path: Path, name: str) -> None:
    """What YAML says is what the constructor gets: each argument at its default, and in each form that it takes."""
    required = {n: v for n, v in VALUES.get(name, [{}])[0].items() if n not in defaults(name)}
    for given in ({**defaults(name), **required}, *({**required, **values} for values in VALUES.get(name, ()))):
        callback, understood = made(tmp_path, name, given)
        assert isinstance(callback, CALLBACKS[name])
        assert {argument: understood[argument] for argument in given} == given


def test_no_argument_of_the_pruning_is_left_out() -> None:
    """The values above name each argument of the callbacks that choose what goes."""
    for name in ("ChannelPruning", "Compensation", "Distillation", "FinalMetric", "SparseTraining"):
        named = {argument for values in VALUES[name] for argument in values}
        assert named == set(inspect.signature(CALLBACKS[name]).parameters)


def test_a_wrong_value_is_an_error_that_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An argument that does not exist or does not fit ends the program with a message."""
    for arguments in ({"amuont": 0.5}, {"round_to": "eight"}):
        with pytest.raises(SystemExit):
            made(tmp_path, "ChannelPruning", arguments)
        assert next(iter(arguments)) in capsys.readouterr().err


def test_a_fit_from_yaml(tmp_path: Path) -> None:
    """The whole chain from a configuration file: slimming, pruning, repair, compaction."""
    entries = {
        "SparseTraining": {"penalty": "group_lasso", "strength": 1e-3},
        "ChannelPruning": {"criterion": {"taylor": 1.0, "l1": 0.5}, "amount": 0.4, "target": "macs", "scope": "global"},
        "MaskConflictRepair": {},
        "ModelCompaction": {"on_failure": "raise", "dirpath": str(tmp_path)},
    }
    callbacks = [{"class_path": f"lightning_compress.{n}", "init_args": a} for n, a in entries.items()]
    settings = {
        "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False,
        "enable_model_summary": False, "max_epochs": 3, "limit_val_batches": 0, "default_root_dir": str(tmp_path),
        "callbacks": callbacks,
    }  # fmt: skip
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"trainer": settings, "seed_everything": False}))
    arguments = ["fit", "--config", str(tmp_path / "config.yaml")]
    found = cli.LightningCLI(Wrapped, args=arguments, save_config_callback=None)
    compaction = next(c for c in found.trainer.callbacks if type(c).__name__ == "ModelCompaction")
    assert compaction.certificate.verified and (tmp_path / "compacted.ckpt").exists()

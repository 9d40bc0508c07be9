"""Training a compacted network on, in its smallest form."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import finetuning
from benchmarks.cifar_resnets import CifarResNet
from benchmarks.finetuning import Classifier, Epoch
from tests.benchmarks.test_accuracy import archive
from tests.engine.exactness import relative_error


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> dict[str, Any]:
    """Run the command for two epochs in a folder, and return the row."""
    if not (folder / "resnet8-random.th").exists():
        torch.manual_seed(0)
        folder.mkdir(parents=True)
        archive(folder)
        torch.save({"state_dict": CifarResNet(1).state_dict()}, folder / "resnet8-random.th")
    options = {"data": folder / "cifar10.npz", "weights": folder, "network": "resnet8", "epochs": 2, "batch": 16}
    options |= {"samples": 32, "images": 16, "precision": "32-true", "folder": folder / "runs"}
    options |= {"keep": folder / "rows.jsonl", "out": folder / "results.md"}
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    monkeypatch.setattr(sys, "argv", ["finetuning.py", *words, *more])
    assert finetuning.main() == 0
    row: dict[str, Any] = json.loads((folder / "rows.jsonl").read_text().splitlines()[-1])
    return row


def test_an_interrupted_run_goes_on_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts from the checkpoint of the compacted network, costs what was asked for, and is trained only once."""
    whole = run(tmp_path / "whole", monkeypatch)
    end = Classifier.on_train_epoch_end

    def interrupted(module: Classifier) -> None:
        if module.current_epoch:
            raise RuntimeError("the power went out")
        end(module)

    with monkeypatch.context() as patch:
        patch.setattr(Classifier, "on_train_epoch_end", interrupted)
        with pytest.raises(RuntimeError, match="the power went out"):
            run(tmp_path / "parts", patch)
    monkeypatch.setattr(finetuning, "prune", None)  # the compacted network comes out of its file
    parts = run(tmp_path / "parts", monkeypatch)
    states = [
        torch.load(next((tmp_path / kind / "runs").glob("resnet8-2.1-0-*/last.ckpt")), weights_only=False)["state_dict"]
        for kind in ("whole", "parts")
    ]
    assert states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][key], states[1][key]) for key in states[0]
    )
    assert {**whole, "seconds": 0} == {**parts, "seconds": 0} and len(whole["curve"]) == 2
    assert whole["by"] == "lightning-compress" and 0.3 < whole["left"] <= 1 / 2.1
    monkeypatch.setattr(finetuning, "trained", None)
    assert run(tmp_path / "whole", monkeypatch) == whole
    text = (tmp_path / "whole" / "results.md").read_text()
    assert text.count(finetuning.START) == text.count(finetuning.END) == 1 and "| resnet8 | 2.1 | lightning" in text


def test_the_best_of_the_rivals_trains_in_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row names the importance."""
    pytest.importorskip("torch_pruning")
    row = run(tmp_path / "peers", monkeypatch, "--peers", "magnitude")
    assert row["by"].startswith("Torch-Pruning, magnitude") and len(row["curve"]) == 2 and row["left"] <= 1 / 2.1


def test_the_stream_may_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the best of the rivals does; its row says so, and it starts from a file of its own."""
    run(tmp_path / "net", monkeypatch)
    row = run(tmp_path / "net", monkeypatch, "--stream", "kept", "--scope", "group", "--layers", "layer?.?")
    assert row["by"] == "lightning-compress, within groups, stream kept" and row["left"] <= 1 / 2.1
    assert row["layers"] == "layer?.?" and "| layer?.? |" in (tmp_path / "net" / "results.md").read_text()
    assert len(list((tmp_path / "net" / "runs").glob("*.pt"))) == 2


def test_each_set_of_options_trains_a_network_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a teacher, it does not go on where the run with one ended, and has a line of its own."""
    taught, alone = (run(tmp_path / "net", monkeypatch, "--weight", weight) for weight in ("1.0", "0.0"))
    assert len(alone["curve"]) == 2 and alone["before"] == taught["before"] and alone["weight"] == 0.0
    assert len(list((tmp_path / "net" / "runs").glob("*/last.ckpt"))) == 2
    assert len(list((tmp_path / "net" / "runs").glob("*.pt"))) == 1  # both start from the same file
    text = (tmp_path / "net" / "results.md").read_text()
    assert text.count("| resnet8 | 2.1 | lightning-compress | 2 | 0.05 |") == 2
    assert "| lightning-compress | 2 | 0.05 | 1 |" in text and "| lightning-compress | 2 | 0.05 | 0 |" in text


def _row(**options: Any) -> dict[str, Any]:
    about = {"network": "net", "times": 2.1, "seed": 0, "by": "lightning-compress", "epochs": 1, "lr": 0.05}
    about |= {
        "weight": 1.0,
        "layers": "",
        "batch": 128,
        "precision": "bf16-mixed",
        "samples": 1024,
        "images": 100,
        "device": "cpu",
    }
    return {**about, "before": 50.0, "curve": [60.0], "seconds": 60.0, **options}


def test_the_page_has_a_line_for_each_set_of_options() -> None:
    """Only seeds are taken together; what differs is a column, what does not is said once."""
    table = [_row(), _row(lr=0.02, weight=4.0, curve=[70.0]), _row(seed=2, curve=[64.0]), _row(seed=1, curve=[62.0])]
    text = finetuning.page(table)
    assert "| network | times fewer MACs | by | epochs | lr | weight | before |" in text
    assert (
        "| net | 2.1 | lightning-compress | 1 | 0.05 | 1 | 50.00 | 60.00, 62.00, 64.00 | 62.00 ± 2.00 | 1.0 |" in text
    )
    assert "| net | 2.1 | lightning-compress | 1 | 0.02 | 4 | 50.00 | 70.00 | 70.00 | 1.0 |" in text
    assert "for all: layers none, batch 128, precision bf16-mixed, samples 1024, device cpu, images 100." in text
    assert "- net, 2.1 times fewer, lightning-compress, epochs 1, lr 0.02, weight 4, seed 0: 70.00" in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("batch", 64),
        ("precision", "32-true"),
        ("samples", 512),
        ("device", "cuda"),
        ("images", 50),
        ("lr", 0.1),
        ("layers", "layer?.?"),
    ],
)
def test_rows_with_other_options_are_not_averaged(key: str, value: Any) -> None:
    """Whatever option they differ in, it is in the table."""
    text = finetuning.page([_row(), _row(**{"seed": 1, key: value, "curve": [62.0]})])
    lines = [line for line in text.splitlines() if line.startswith("| net |")]
    assert len(lines) == 2 and f"| {value} |" in lines[1] and "±" not in text
    assert f"| {key} |" in text and f"for all: {key} " not in text


def test_finished_rows_are_written_without_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of options that have not run, nothing is run; without any row, it says so."""
    (tmp_path / "resnet8-random.th").touch()
    (tmp_path / "rows.jsonl").write_text(json.dumps(_row(peers=[])) + "\n")
    monkeypatch.setattr(finetuning, "trained", None)
    assert run(tmp_path, monkeypatch, "--finished") == _row(peers=[])
    assert "| net | 2.1 | lightning-compress | 1 |" in (tmp_path / "results.md").read_text()
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(SystemExit):
        run(tmp_path, monkeypatch, "--finished")


def test_graphs_need_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The error says which option to add, before anything is pruned."""
    monkeypatch.setattr(finetuning, "prune", None)
    with pytest.raises(SystemExit):
        run(tmp_path / "net", monkeypatch, "--graphs")
    assert "add --device cuda" in capsys.readouterr().err


def test_graphs_replay_the_layers_that_are_compared() -> None:
    """Or the whole network; the examples of their inputs are like those that they are called with."""
    net = CifarResNet(1)
    assert finetuning.replayed(net, "") == [""]
    assert (paths := finetuning.replayed(net, "layer?.?")) == ["layer1.0", "layer2.0", "layer3.0"]
    x = torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    inputs = finetuning.inputs_of([net, *map(net.get_submodule, paths)], net, x)
    assert [tuple(x.shape[1:]) for x in inputs] == [(3, 32, 32), (16, 32, 32), (16, 32, 32), (32, 16, 16)]
    assert [x.requires_grad for x in inputs] == [False, True, True, True] and all(x.is_leaf for x in inputs)
    assert not any(module._forward_pre_hooks for module in net.modules())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream", "ignore:Attempting to run cuBLAS")
@pytest.mark.parametrize("layers", ["", "layer?.?"])
def test_graphs_train_to_the_same_network(layers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the teacher's outputs alone, and with those of its layers."""
    weights = []
    for kind in ("eager", "graphs"):
        more = [
            "--device",
            "cuda",
            "--stream",
            "kept",
            "--layers",
            layers,
            *(("--graphs",) if kind == "graphs" else ()),
        ]
        run(tmp_path / kind, monkeypatch, *more)
        file = next((tmp_path / kind / "runs").glob("*/last.ckpt"))
        state = torch.load(file, weights_only=False, map_location="cpu")["state_dict"]
        weights.append(torch.cat([tensor.flatten() for name, tensor in state.items() if name.endswith("weight")]))
    assert relative_error(weights[:1], weights[1:]) < 1e-2


def test_an_epoch_shifts_and_mirrors() -> None:
    """Each image once, with its label; another seed gives another order; the same seed the same batches."""
    images = np.zeros((8, 40, 40, 3), np.uint8)
    images[:, 20:, 20:] = np.arange(8, dtype=np.uint8)[:, None, None, None] + 1
    labels = np.arange(8)
    first, again, other = (
        list(Epoch(torch.from_numpy(images), torch.from_numpy(labels), seed, 4)) for seed in (0, 0, 1)
    )
    assert all(torch.equal(x, y) for one, two in zip(first, again, strict=True) for x, y in zip(one, two, strict=True))
    assert sorted(int(y) for _, batch in first for y in batch) == list(range(8))
    assert [list(y) for _, y in first] != [list(y) for _, y in other]
    for x, y in first:
        assert x.shape == (4, 3, 32, 32)
        brightest = x[:, 0].flatten(1).max(1).values
        assert torch.equal(brightest.argsort(), y.argsort())
    assert len({tuple(x[i, 0].argmax(0).tolist()) for x, _ in first for i in range(4)}) > 1

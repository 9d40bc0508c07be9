"""Sensitivity analysis: what is pruned, what stays as it was, when it stops, how it goes on after an interruption."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import engine
from engine import progress
from engine.errors import InputError

ROOT = Path(__file__).parents[3]


class Pair(nn.Module):
    """Two layers whose outputs are added: each alone tells the four classes apart."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 4, 1, bias=False)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4, 4, bias=False)
        with torch.no_grad():
            for layer in (self.one, self.other):
                layer.weight.copy_(torch.eye(4).view(4, 4, 1, 1) * torch.arange(4.0, 0.0, -1.0).view(4, 1, 1, 1))
            self.head.weight.copy_(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of the classes."""
        return self.head(self.norm(F.relu(self.one(x) + self.other(x))).mean((2, 3)))


def accuracy(model: nn.Module) -> float:
    """Of the four classes, one image each."""
    model.eval()
    images = torch.eye(4).view(4, 4, 1, 1).expand(-1, -1, 2, 2)
    with torch.no_grad():
        return (model(images).argmax(1) == torch.arange(4)).float().mean().item()


def plain() -> nn.Module:
    """Convolution with a norm, a grouped and a transposed one, a linear layer; random weights, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 8, 1, groups=2),
        nn.ConvTranspose2d(8, 6, 2, groups=2),
        nn.Flatten(),
        nn.Linear(54, 3),
    )


def response(model: nn.Module) -> float:
    """A number that depends on every weight."""
    images = torch.linspace(-1, 1, 2 * 2 * 4 * 4).view(2, 2, 4, 4)
    with torch.no_grad():
        return model(images).square().sum().item()


def state(model: nn.Module) -> tuple[dict[str, Tensor], list[bool]]:
    """Weights, buffers and modes."""
    return copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal bit for bit."""
    return one[1] == other[1] and all(torch.equal(one[0][name], other[0][name]) for name in one[0] | other[0])


# ---------------------------------------------------------------- what is measured


def test_a_row_per_layer_a_column_per_sparsity() -> None:
    """0.1 … 0.9 by default, the keys what they are called; every convolution and linear layer, in the model's order."""
    net = plain()
    table = engine.SensitivityAnalysis(net, response).analysis(val_args=[net])
    assert list(table) == ["0", "2", "3", "5"]
    assert list(table["0"]) == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]


@pytest.mark.parametrize(("name", "dim"), [("0", 0), ("2", 0), ("5", 0)])
def test_the_lowest_filters_of_one_layer_are_zero(name: str, dim: int) -> None:
    """While the metric is taken, the outputs with the smallest L1 norm are zero, and all else is as before."""
    net = plain()
    before = copy.deepcopy(net.state_dict())
    seen: list[dict[str, Tensor]] = []

    def look() -> float:
        seen.append(copy.deepcopy(net.state_dict()))
        return 0.0

    engine.SensitivityAnalysis(net, look, [0.4]).analysis(specified_layers=[name])
    weight = before[f"{name}.weight"]
    gone = weight.flatten(1).abs().sum(1).argsort()[: int(0.4 * len(weight))]
    assert torch.equal(seen[0][f"{name}.weight"], weight)
    assert not seen[1][f"{name}.weight"][gone].any() and not seen[1][f"{name}.bias"][gone].any()
    kept = sorted(set(range(len(weight))) - set(gone.tolist()))
    assert torch.equal(seen[1][f"{name}.weight"][kept], weight[kept])
    assert all(torch.equal(v, before[k]) for k, v in seen[1].items() if not k.startswith(f"{name}."))


def test_group_shows_the_loss_that_plain_analysis_hides() -> None:
    """Behind an addition the partner stands in for a pruned layer; pruned together, both classes are lost."""
    net = Pair()
    alone = engine.SensitivityAnalysis(net, accuracy, [0.5]).analysis([net])
    coupled = engine.SensitivityAnalysis(
        net, accuracy, [0.5], group=True, dummy_input=torch.zeros(1, 4, 2, 2)
    ).analysis([net])
    assert alone["one"] == {0.5: 1.0} and alone["other"] == {0.5: 1.0}
    assert coupled["one"] == coupled["other"] == {0.5: 0.5}


def test_a_group_is_measured_once_and_reaches_its_norm() -> None:
    """One evaluation for coupled layers, with the norm's channels zeroed as well; the output layer is left out."""
    net = Pair()
    seen: list[Tensor] = []

    def look() -> float:
        seen.append(net.norm.weight.detach().clone())
        return 1.0

    analyzer = engine.SensitivityAnalysis(net, look, [0.25], group=True, dummy_input=torch.zeros(1, 4, 2, 2))
    assert list(analyzer.analysis()) == ["one", "other"]
    assert len(seen) == 2 and seen[1].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert "output" in analyzer.skipped["head"]
    with pytest.raises(InputError, match="have to stay"):
        analyzer.analysis(specified_layers=["head"])


def test_level_prunes_single_weights() -> None:
    """The smallest entries, whatever their filter."""
    net = plain()
    count = engine.SensitivityAnalysis(net, lambda: float(net[0].weight.count_nonzero()), [0.25], "level").analysis(
        specified_layers=["0"]
    )
    assert count["0"][0.25] == 144 * 0.75


def test_already_pruned_makes_sparsities_relative() -> None:
    """Half of what is left of a half is three quarters."""
    net = plain()
    analyzer = engine.SensitivityAnalysis(net, lambda: float(net[0].weight.count_nonzero()), [0.5])
    analyzer.update_already_pruned("0", 0.5)
    assert analyzer.analysis(specified_layers=["0"])["0"] == {0.5: 144 * 0.25}


def test_load_state_dict_gives_the_model_other_weights() -> None:
    """The next analysis starts from them."""
    net, other = plain(), plain()
    with torch.no_grad():
        other[0].weight.mul_(2)
    analyzer = engine.SensitivityAnalysis(net, response, [0.5])
    first = analyzer.analysis([net], specified_layers=["0"])
    analyzer.load_state_dict(other.state_dict())
    second = analyzer.analysis([net], specified_layers=["0"])
    assert torch.equal(net[0].weight, other[0].weight) and first != second
    assert second == engine.SensitivityAnalysis(other, response, [0.5]).analysis([other], specified_layers=["0"])


# ---------------------------------------------------------------- stopping


@pytest.mark.parametrize(
    ("mode", "value", "length"),
    [("minimize", 0.65, 4), ("dropped", 0.35, 4), ("maximize", 0.65, 1), ("raised", 0.05, 9), ("minimize", 0.0, 9)],
)
def test_each_mode_ends_the_row_with_the_value_that_triggered(mode: str, value: float, length: int) -> None:
    """With a metric that falls by 0.1 a step from 1.0."""
    net = nn.Linear(1, 10)
    table = engine.SensitivityAnalysis(
        net, lambda: net.weight.count_nonzero().item() / 10, early_stop_mode=mode, early_stop_value=value
    ).analysis()
    assert list(table[""].values()) == [n / 10 for n in range(9, 9 - length, -1)]


def test_rising_metrics_stop_too() -> None:
    """A loss that rises by 0.1 a step stops at the first value that is more than 0.25 above the baseline."""
    net = nn.Linear(1, 10)
    table = engine.SensitivityAnalysis(
        net, lambda: 1 - net.weight.count_nonzero().item() / 10, early_stop_mode="raised", early_stop_value=0.25
    ).analysis()
    assert len(table[""]) == 3


def test_a_stopped_row_is_short_in_the_file(tmp_path: Path) -> None:
    """Header, then layer and metrics, as NNI's documentation shows it."""
    net = nn.Sequential(nn.Linear(1, 10), nn.Linear(10, 10))
    analyzer = engine.SensitivityAnalysis(
        net,
        lambda: net[0].weight.count_nonzero().item() / 10,
        [0.2, 0.3, 0.1],
        early_stop_mode="minimize",
        early_stop_value=0.85,
    )
    analyzer.analysis()
    analyzer.export(tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text() == "layername,0.1,0.2,0.3\n0,0.9,0.8\n1,1.0,1.0,1.0\n"


# ---------------------------------------------------------------- nothing is left behind


@pytest.mark.parametrize("error", [RuntimeError("out of data"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("group", [False, True])
def test_the_model_is_restored_whatever_val_func_does(error: BaseException, group: bool) -> None:
    """It trains the norm, changes modes and raises: the exception arrives as it is, the model is as it was."""
    net = Pair()
    before, calls = state(net), []

    def fail(model: nn.Module) -> float:
        calls.append(0)
        model.train()(torch.rand(2, 4, 2, 2))
        model.eval()
        if len(calls) == 2:
            raise error
        return 1.0

    analyzer = engine.SensitivityAnalysis(net, fail, group=group, dummy_input=torch.zeros(1, 4, 2, 2))
    with pytest.raises(type(error)) as raised:
        analyzer.analysis([net])
    assert raised.value is error and same(state(net), before)


def test_val_func_may_fine_tune() -> None:
    """What it learns is forgotten before the next layer: each starts from the original weights."""
    net = plain()
    before, starts = state(net), []

    def tune() -> float:
        starts.append(net[5].weight.detach().clone())
        torch.optim.SGD(net.parameters(), 0.1).zero_grad()
        net(torch.rand(2, 2, 4, 4)).square().sum().backward()
        torch.optim.SGD(net.parameters(), 0.1).step()
        return 1.0

    engine.SensitivityAnalysis(net, tune, [0.5]).analysis(specified_layers=["0", "2"])
    assert len(starts) == 3 and all(torch.equal(weight, starts[0]) for weight in starts) and same(state(net), before)


def test_the_bar_reaches_its_total(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where sweeps stop early; without wanting it, there is none."""
    made: list[Any] = []

    class Bar(nullcontext[Any]):
        def __init__(self, total: int, **options: Any) -> None:
            super().__init__(self)
            self.total, self.done = total, 0
            made.append(self)

        def update(self, steps: int) -> None:
            self.done += steps

    monkeypatch.setattr(progress, "_in_notebook", lambda: True)
    monkeypatch.setitem(sys.modules, "tqdm", ModuleType("tqdm"))
    sys.modules["tqdm"].__spec__ = ModuleSpec("tqdm", None)
    monkeypatch.setattr(sys.modules["tqdm"], "tqdm", Bar, raising=False)
    options: dict[str, Any] = {"early_stop_mode": "minimize", "early_stop_value": 2}
    engine.SensitivityAnalysis(plain(), lambda: 1.0, **options).analysis()
    engine.SensitivityAnalysis(plain(), lambda: 1.0, progress=False, **options).analysis()
    assert [(bar.total, bar.done) for bar in made] == [(36, 36)]


def test_pruned_and_parametrised_weights() -> None:
    """The stored parameter is masked where a layer computes its weight from it, and restored."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    prune.l1_unstructured(net[0], "weight", 0.2)
    nn.utils.parametrizations.weight_norm(net[1])
    before = state(net)

    def dead_rows() -> float:
        net(torch.rand(1, 3))
        return float(sum((m.weight == 0).all(1).sum().item() for m in net))

    table = engine.SensitivityAnalysis(net, dead_rows, [0.5]).analysis()
    assert table["0"][0.5] == 2 and same(state(net), before)
    with pytest.raises(InputError, match="parametrised"):
        engine.SensitivityAnalysis(net, dead_rows, [0.5], "level").analysis()


# ---------------------------------------------------------------- interruption, shards


def work(folder: str, name: str, kill_at: int, index: int, count: int) -> None:
    """An analysis that logs each evaluation, and may kill its own process at one of them."""
    torch.set_num_threads(1)
    net, log, results = plain(), Path(folder, "log"), Path(folder, f"{name}.jsonl")

    def measure() -> float:
        with open(log, "a") as file:
            file.write(".")
        if len(log.read_text()) == kill_at:
            with open(results, "a") as file:
                file.write('{"weights": "torn')  # as if it died while it wrote
            os.kill(os.getpid(), signal.SIGKILL)
        return response(net)

    analyzer = engine.SensitivityAnalysis(net, measure, results_path=results)
    analyzer.analysis(shard=(index, count))
    analyzer.export(Path(folder, f"{name}.csv"))


def start(*args: Any) -> subprocess.Popen[bytes]:
    """Start `work` in another process."""
    code = f"from tests.engine.sensitivity.test_analysis import work; work(*{args!r})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=ROOT)


def uninterrupted(folder: Path) -> bytes:
    """The CSV of a run in one go."""
    net = plain()
    analyzer = engine.SensitivityAnalysis(net, response)
    analyzer.analysis([net])
    analyzer.export(folder / "whole.csv")
    return (folder / "whole.csv").read_bytes()


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """SIGKILL half-way, and start again: the same CSV byte for byte; only the killed evaluation is done twice."""
    assert start(str(tmp_path), "run", 20, 0, 1).wait(120) == -signal.SIGKILL
    work(str(tmp_path), "run", 0, 0, 1)
    assert (tmp_path / "run.csv").read_bytes() == uninterrupted(tmp_path)
    assert len((tmp_path / "log").read_text()) == 1 + 4 * 9 + 1


def test_two_processes_share_the_work(tmp_path: Path) -> None:
    """Each with a results file of its own; put together they give the same CSV, and nothing is left to evaluate."""
    other = start(str(tmp_path), "part1", 0, 1, 2)
    work(str(tmp_path), "part0", 0, 0, 2)
    assert other.wait(120) == 0
    analyzer = engine.SensitivityAnalysis(plain(), lambda: pytest.fail("evaluated twice"))
    analyzer.load_results(tmp_path / "part0.jsonl", tmp_path / "part1.jsonl")
    analyzer.analysis()
    analyzer.export(tmp_path / "merged.csv")
    assert (tmp_path / "merged.csv").read_bytes() == uninterrupted(tmp_path)
    assert len((tmp_path / "log").read_text()) == 2 + 4 * 9


def test_results_of_other_weights_are_not_taken(tmp_path: Path) -> None:
    """After a change of the weights everything is evaluated again, with a warning; the old results stay in the file."""
    net = plain()
    arguments: dict[str, Any] = {"sparsities": [0.5], "results_path": tmp_path / "results.jsonl"}
    first = engine.SensitivityAnalysis(net, response, **arguments).analysis([net])
    with torch.no_grad():
        net[0].weight.mul_(2)
    with pytest.warns(UserWarning, match="other weights or settings"):
        second = engine.SensitivityAnalysis(net, response, **arguments).analysis([net])
    assert first != second
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 10


def test_without_a_file_every_analysis_evaluates(tmp_path: Path) -> None:
    """The data may have changed in between: nothing is remembered."""
    calls: list[int] = []
    analyzer = engine.SensitivityAnalysis(nn.Linear(1, 4), lambda: float(len(calls) or calls.append(0) or 1), [0.5])
    analyzer.analysis()
    calls.append(0)
    assert analyzer.analysis()[""] == {0.5: 2.0}


# ---------------------------------------------------------------- bad input


BAD: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "model": (lambda m: engine.SensitivityAnalysis("net", response), "`model` is a module"),
    "no layers": (lambda m: engine.SensitivityAnalysis(nn.ReLU(), response), "neither convolutions"),
    "val_func": (lambda m: engine.SensitivityAnalysis(m, 0.5), "`val_func` is a function"),
    "no sparsities": (lambda m: engine.SensitivityAnalysis(m, response, []), "is empty"),
    "a number": (lambda m: engine.SensitivityAnalysis(m, response, 0.5), "`sparsities` must be a list"),
    "text": (lambda m: engine.SensitivityAnalysis(m, response, ["0.5"]), r"fraction in \[0, 1\)"),
    "everything": (lambda m: engine.SensitivityAnalysis(m, response, [0.5, 1.0]), r"fraction in \[0, 1\)"),
    "negative": (lambda m: engine.SensitivityAnalysis(m, response, [-0.1]), r"fraction in \[0, 1\)"),
    "prune_type": (lambda m: engine.SensitivityAnalysis(m, response, prune_type="l3"), "fpgm, l1, l2, level"),
    "mode": (lambda m: engine.SensitivityAnalysis(m, response, None, "l1", "fallen", 1), "minimize, maximize"),
    "mode only": (lambda m: engine.SensitivityAnalysis(m, response, early_stop_mode="raised"), "go together"),
    "value only": (lambda m: engine.SensitivityAnalysis(m, response, early_stop_value=0.1), "go together"),
    "value": (lambda m: engine.SensitivityAnalysis(m, response, None, "l1", "raised", "1"), "is a number"),
    "no example": (lambda m: engine.SensitivityAnalysis(m, response, group=True), "needs `dummy_input`"),
    "level groups": (lambda m: engine.SensitivityAnalysis(m, response, prune_type="level", group=True), "single"),
    "layer": (lambda m: engine.SensitivityAnalysis(m, response).analysis([m], specified_layers=["9"]), "layer '9'"),
    "val_args": (lambda m: engine.SensitivityAnalysis(m, response).analysis(m), "`val_args` is a list"),
    "shard": (lambda m: engine.SensitivityAnalysis(m, response).analysis([m], shard=(2, 2)), "0 <= index < count"),
    "half a shard": (lambda m: engine.SensitivityAnalysis(m, response).analysis([m], shard=(1,)), "two integers"),
    "NaN": (lambda m: engine.SensitivityAnalysis(m, lambda: float("nan")).analysis(), "NaN for the un-pruned model"),
    "None": (lambda m: engine.SensitivityAnalysis(m, lambda: None).analysis(), "returns NoneType"),
    "tensor": (lambda m: engine.SensitivityAnalysis(m, lambda: torch.ones(2)).analysis(), r"Tensor of shape \(2,\)"),
    "word": (lambda m: engine.SensitivityAnalysis(m, lambda: "0.5").analysis(), "returns str"),
    "ratio": (lambda m: engine.SensitivityAnalysis(m, response).update_already_pruned("0", 1.5), "`ratio`"),
    "pruned layer": (lambda m: engine.SensitivityAnalysis(m, response).update_already_pruned("x", 0.5), "layer 'x'"),
    "state": (lambda m: engine.SensitivityAnalysis(m, response).load_state_dict({}), "does not fit the model"),
    "export": (lambda m: engine.SensitivityAnalysis(m, response).export("table.csv"), "call `analysis` first"),
    "no file": (lambda m: engine.SensitivityAnalysis(m, response).load_results("nowhere.jsonl"), "no file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str) -> None:
    """With the culprit in the message, and the model as it was."""
    call, message = BAD[name]
    net = plain()
    before = state(net)
    with pytest.raises(InputError, match=message):
        call(net)
    assert same(state(net), before)


def test_nan_names_the_place() -> None:
    """Layer and sparsity, and what was measured before it stays in the file."""
    net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))

    def measure() -> float:
        return float("nan") if not net[1].weight.all() else 1.0

    with pytest.raises(InputError, match="NaN for '1' at sparsity 0.5"):
        engine.SensitivityAnalysis(net, measure, [0.5]).analysis()


def test_results_of_another_kind_of_run_are_refused(tmp_path: Path) -> None:
    """Loading what can never be used says so."""
    net = plain()
    engine.SensitivityAnalysis(net, response, [0.5], results_path=tmp_path / "l1").analysis([net])
    with pytest.raises(InputError, match="no results of a model with these weights and these settings"):
        engine.SensitivityAnalysis(net, response, [0.5], "l2").load_results(tmp_path / "l1")

"""The benchmark over all models of torchvision: what it makes of its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import engine
from benchmarks import breadth
from tests.engine import zoo

ROW: dict[str, Any] = {
    "model": "resnet18",
    "state": "now",
    "error": 1e-15,
    "tolerance": 1e-9,
    "parameters": [11_700_000, 3_000_000],
    "macs": [150_000_000, 40_000_000],
    "predicted": True,
    "seconds": 0.6,
    "gigabytes": 0.9,
    "stays": {"mul in 'a.1' (/home/me/lib/site-packages/torchvision/models/x.py:12) runs over it": 2},
}


@pytest.mark.parametrize(
    ("change", "verdict", "reason"),
    [
        ({}, "exact", ""),
        ({"error": 1e-8}, "failed", "relative error 1.0e-08"),
        ({"predicted": False}, "failed", "the counted sizes are not the measured ones"),
        ({"parameters": [10, 6]}, "failed", "lost fewer parameters than it should"),
        ({"parameters": [10, 6], "model": "r3d_18"}, "exact", ""),
        ({"refused": "TraceError: no"}, "refused", "TraceError: no"),
        ({"failed": "took longer than 900 s"}, "failed", "took longer than 900 s"),
    ],
)
def test_verdicts(change: dict[str, Any], verdict: str, reason: str) -> None:
    """Exact is only what is as small as it should be, counted right, and within the tolerance."""
    row = ROW | change
    assert (breadth.verdict(row), breadth.reason(row)) == (verdict, reason)
    assert verdict in breadth.line(row) and reason in breadth.line(row)


def test_the_page_tells_what_came_out() -> None:
    """Counts, a table per task, and the reasons without paths of a computer, lines and layers."""
    page = breadth.page([ROW, ROW | {"model": "r3d_18", "refused": "TraceError: no"}])
    assert "1 of 2 models are exact, 1 refused, 0 failed" in page.replace("\n", " ")
    assert "| resnet18 | exact | 1e-15 | 11.70 → 3.00 | 0.150 → 0.040 | 0.6 |" in page
    assert "| mul (torchvision/models/x.py) runs over it | 2 |" in page and "/home" not in page


def test_results_are_kept_by_state_of_the_code(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row of a model counts, of this state or of any."""
    file = tmp_path / "rows.jsonl"
    rows = [ROW | {"state": "old"}, ROW | {"seconds": 1.0}, ROW | {"model": "r3d_18", "state": "old"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(breadth, "RESULTS", file)
    assert {name: row["seconds"] for name, row in breadth.stored_rows("now").items()} == {"resnet18": 1.0}
    assert set(breadth.stored_rows(None)) == {"resnet18", "r3d_18"} and breadth.stored_rows("other") == {}


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        (lambda name: time.sleep(60), "took longer than 1 s"),
        (lambda name: os._exit(3), "ended with 3"),
        (lambda name: bytearray(2**32), "MemoryError: "),
        (lambda name: {}["no"], "KeyError: 'no'"),
    ],
)
def test_a_process_that_takes_too_long_or_dies_is_a_failure(ends: Callable[[str], Any], reason: str) -> None:
    """With the reason; the run goes on."""
    assert breadth.supervise(ends, "resnet18", 1, 2)["failed"] == reason


def test_a_refusal_is_told_from_a_failure() -> None:
    """An error of the engine's says why it left the model alone."""

    def check(name: str) -> dict[str, Any]:
        raise engine.errors.TraceError("no " + name)

    assert breadth.supervise(check, "resnet18", 60, 2)["refused"] == "TraceError: no resnet18"


def test_a_process_of_its_own_has_a_pool_of_threads_of_its_own() -> None:
    """One from before the fork ends a process in which threads of autograd start at the same time."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert breadth.supervise(lambda name: {"threads": torch.get_num_threads()}, "resnet18", 60, 2)["threads"] == 1
    finally:
        torch.set_num_threads(before)


def test_every_model_has_a_recipe_and_every_architecture_a_quick_one() -> None:
    """109 models; those that the quick run takes are among them, one of each file of torchvision at least."""
    models = [name for task in zoo.TASKS for name in zoo.names(task)]
    assert len(models) == len(set(models)) == 109 and set(zoo.FAMILIES) <= set(models)
    assert {zoo.family_of(name) for name in models} == {zoo.family_of(name) for name in zoo.FAMILIES}
    assert all(zoo.recipe(name).size >= 56 for name in models)


SUPERVISED = """
import json, sys
from benchmarks import breadth
print(json.dumps(breadth.supervise(breadth.check, sys.argv[1], 300, 4)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["squeezenet1_1", "shufflenet_v2_x0_5", "ssdlite320_mobilenet_v3_large"])
def test_a_model_in_a_process_of_its_own(name: str) -> None:
    """Exact, in the time and memory that it is given; this process may have differentiated, and cannot be forked."""
    run = subprocess.run([sys.executable, "-c", SUPERVISED, name], cwd=breadth.ROOT, capture_output=True, check=True)
    row = {"model": name} | json.loads(run.stdout.splitlines()[-1])
    assert breadth.verdict(row) == "exact", breadth.reason(row)


def test_a_reason_names_no_folder_of_a_machine() -> None:
    """Neither where packages are installed, nor where they write code that they generate."""
    generated = f"could be read by the code at {tempfile.gettempdir()}/net_propagate_cv64acaa.py:12, which did not run"
    installed = "mul (/opt/env/lib/site-packages/timm/layers/norm.py:3) combines it"
    assert breadth.general(generated) == "could be read by the code at net_propagate.py, which did not run"
    assert breadth.general(installed) == "mul (timm/layers/norm.py) combines it"

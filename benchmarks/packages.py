"""Exactness on networks of other packages: half of the units of each dependency group go, and the function stays.

    python benchmarks/packages.py [network ...]      (default: all; resumes where it stopped)
    python benchmarks/packages.py --list             (the networks)
    python benchmarks/packages.py --any-state        (take rows of earlier states of the code, too)
    python benchmarks/packages.py --page             (write the page from the rows that there are, and stop)

Networks of packages that people prune, as their authors wrote them and small (``benchmarks/networks/``), everything in
them random, in float64, are taken through what ``families.py`` does. Those of Ultralytics are exported to ONNX by their
own exporter afterwards. Results are kept, line by line, in ``build/packages.jsonl``, by network and state of the code;
the page, ``docs/packages.md``, has those that were run. What has to be installed is in
``benchmarks/networks/requirements.txt``, and what that needs in ``benchmarks/networks/dependencies.txt``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import statistics
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import engine
from benchmarks.breadth import TOLERANCE, general, half_of_each_group, staying, supervise
from benchmarks.networks import sequences, sound, vision, yolo
from benchmarks.networks.network import Network, by_key
from benchmarks.survey import ROOT, Survey, code_state
from engine.program.trees import map_tensors, tensors_in
from tests.engine.exactness import differ, masked, parameters, randomised, relative_error

RESULTS = ROOT / "build" / "packages.jsonl"
PAGE = ROOT / "docs" / "packages.md"
EXPORTED = 1e-4  # the largest difference of an exported network, in float32
FAILURES = {"refused": "refused", "failed": "failed", "unbuilt": "its package does not build it here"}
MUCH = 0.6  # of the parameters left, from which on the page says why

NETWORKS: Mapping[str, Network] = by_key(
    [*yolo.NETWORKS, *sequences.NETWORKS, *vision.NETWORKS, *sound.NETWORKS],
)


# ---------------------------------------------------------------- one network


def import_torchaudio() -> None:
    """Import torchaudio as if without CUDA: it refuses a torch of another CUDA version. This is for the CPU."""
    with mock.patch.object(torch.version, "cuda", None), contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("torchaudio")


def build(key: str) -> nn.Module:
    """Return a network, everything in it random."""
    import_torchaudio()
    torch.manual_seed(0)
    return randomised(NETWORKS[key].make().eval(), dtype=NETWORKS[key].dtype)


def run(model: nn.Module, inputs: Any) -> list[Tensor]:
    """Return the outputs in eval mode as a list, with the same random numbers each time."""
    torch.manual_seed(0)
    with torch.no_grad():
        if isinstance(inputs, dict):
            return list(tensors_in(model.eval()(**inputs)))
        return list(tensors_in(model.eval()(*inputs) if isinstance(inputs, tuple) else model.eval()(inputs)))


def in_precision(inputs: Any, dtype: torch.dtype) -> Any:
    """Return inputs with the floating-point tensors among them in a dtype."""
    return map_tensors(inputs, lambda x: x.to(dtype) if x.is_floating_point() else x)


def costs(model: nn.Module, groups: Iterable[engine.Group]) -> dict[str, int]:
    """Return by reason how many entries the weights have whose outputs stay."""
    total: Counter[str] = Counter()
    for group in groups:
        if group.reason is not None:
            weights = {m.parameter for m in group.members if m.role == "out"}
            total[general(group.reason)] += sum(model.get_parameter(name).numel() for name in weights)
    return dict(total)


def predicted_share(model: nn.Module, example: Any) -> float:
    """Return the share of the parameters that is left where nothing is declared, as counted before the compaction."""
    graph = engine.trace(model, example)
    masks = half_of_each_group(model, engine.dependency_groups(model, example, graph=graph))
    left = engine.count_flops_params(model, example, verbose=False, masks=masks, graph=graph)[1]
    return left / parameters(model)


def check(key: str) -> dict[str, Any]:
    """Compact a network and return what came of it.

    Raises:
        EngineError: where the engine refuses.
    """
    network = NETWORKS[key]
    try:
        model = build(key)
    except Exception as error:  # what a package raises beside this torch is a result, and none of the engine's
        return {"unbuilt": f"{type(error).__name__}: {error}"}
    one, two = (in_precision(network.inputs(batch), network.dtype) for batch in network.batches)
    undeclared = predicted_share(model, one) if network.constants else None
    graph = engine.trace(model, one, constants=network.constants or None)
    groups = engine.dependency_groups(model, one, graph=graph)
    masks, before, whole = half_of_each_group(model, groups), parameters(model), costs(model, groups)
    reference = masked(model, masks)
    expected = [run(reference, x) for x in (one, two)]
    changed = not masks or differ(run(model, one), expected[0])
    predicted = engine.count_flops_params(model, one, verbose=False, masks=masks, graph=graph)
    speedup = engine.ModelSpeedup(model, one, masks, confidence=1, graph=graph)
    model = speedup.speedup_model()
    errors = [relative_error(old, run(model, x)) for old, x in zip(expected, (one, two), strict=True)]
    measured = engine.count_flops_params(model, one, verbose=False)
    row = {
        "error": max(errors),
        "changed": changed,
        "tolerance": TOLERANCE[network.dtype],
        "parameters": [before, parameters(model)],
        "predicted": predicted[:2] == measured[:2],
        "stays": whole,
    }
    if undeclared is not None:
        row["undeclared"] = undeclared
    if network.package == "ultralytics":
        row["exported"] = yolo.exported_error(model.float(), network.label)
    return row


# ---------------------------------------------------------------- the page


def verdict(row: Mapping[str, Any]) -> str:
    """Return ``exact``, or why not."""
    if failure := [f"{text}: {row[key]}" for key, text in FAILURES.items() if key in row]:
        return " ".join(general(failure[0]).split())[:160]
    faults = (
        [] if row["error"] <= row.get("tolerance", TOLERANCE[torch.float64]) else [f"relative error {row['error']:.1e}"]
    )
    faults += [] if row["predicted"] else ["the counted sizes are not the measured ones"]
    faults += [] if row.get("changed", True) else ["the masks change nothing at the outputs"]
    faults += [] if row.get("exported", 0) <= EXPORTED else [f"exported with an error of {row['exported']:.0e}"]
    return "; ".join(faults) or "exact"


def left(row: Mapping[str, Any]) -> float:
    """Return the share of the parameters that is left."""
    before, after = row["parameters"]
    return float(after / before)


def dearest(row: Mapping[str, Any]) -> str:
    """Return the reason that keeps the most weights, where much is left."""
    costs = row["stays"]
    return max(costs, key=lambda reason: costs[reason])[:110] if left(row) > MUCH and costs else ""


def line(row: Mapping[str, Any]) -> str:
    """Return a row of the table."""
    start = f"| {row['network']} | {verdict(row).replace('|', '/')} |"
    if "parameters" not in row:
        return f"{start} | | | | | |"
    before, after = row["parameters"]
    exported = f"{row['exported']:.0e}" if "exported" in row else ""
    sizes = f"{before / 1e3:.0f} → {after / 1e3:.0f} | {left(row):.0%}"
    undeclared = f"{row['undeclared']:.0%}" if "undeclared" in row else ""
    return f"{start} {row['error']:.0e} | {sizes} | {undeclared} | {exported} | {dearest(row)} |"


HEAD = """# Survey of other packages

`make packages` builds small networks of {packages} packages that people prune, by their own constructors, masks half of
the units of each dependency group, compacts the network, and compares it with the masked one. {all} of the {listed}
networks in the list were run: {exact} are exact, {refused} refused, {failed} failed, {unbuilt} cannot be built beside
this torch. The median network keeps {median:.0%} of its parameters, {much} keep more than 60 %. torch {torch}, float64,
on one CPU thread. {older}

Everything that could hide an error is random. The error is the largest difference at two batch sizes, relative to the
largest entry of the output; the counted sizes equal the measured ones. The certificate also compares inside the
network, and at a larger resolution if the network accepts one. Compacted networks of Ultralytics, in float32, are
exported to ONNX by their own exporter; the column says by how much the outputs of ONNX Runtime differ, all of them;
detections whose scores differ by rounding only may come in either order.
Where more than 60 % of the parameters are left, the last column has the reason that costs most. Features that a
flag among the arguments returns (`return_embeddings=`) are outputs; `constants=` declares flags that keep their value.
Ultralytics' argument `embed`, which returns the features of any layer, is declared; a column says what is left without
the declaration: {undeclared:.0%} of the median one of these networks.

{versions}

| network | verdict | error | parameters, k | left | undeclared | ONNX | costs most |
|---|---|---:|---:|---:|---:|---:|---|
"""


def page(rows: Sequence[Mapping[str, Any]], versions: Sequence[str], state: str | None = None) -> str:
    """Return the page; it says how many rows are of other states of the code than the given one."""
    verdicts = [verdict(row) for row in rows]
    refused, unbuilt = (sum(key in row for row in rows) for key in ("refused", "unbuilt"))
    kept = [left(row) for row in rows if "parameters" in row]
    older = sum(row.get("state") != state for row in rows) if state else 0
    head = HEAD.format(
        packages=len(versions),
        exact=verdicts.count("exact"),
        all=len(rows),
        listed=len(NETWORKS),
        refused=refused,
        unbuilt=unbuilt,
        failed=len(rows) - verdicts.count("exact") - refused - unbuilt,
        median=statistics.median(kept or [1.0]),
        much=sum(share > MUCH for share in kept),
        undeclared=statistics.median([row["undeclared"] for row in rows if "undeclared" in row] or [1.0]),
        torch=torch.__version__.split("+")[0],
        older=f"{older} of the rows are of earlier states of the code." if older else "",
        versions=", ".join(versions) + ".",
    )
    return wrapped(head) + "\n".join([*map(line, rows), *staying([dict(row) for row in rows])]) + "\n"


def wrapped(text: str) -> str:
    """Return text whose paragraphs have lines of at most 120 characters; headings and tables stay as they are."""
    fill = functools.partial(textwrap.fill, width=120, break_on_hyphens=False, break_long_words=False)
    return "\n\n".join(part if part.startswith(("#", "|")) else fill(part) for part in text.split("\n\n"))


def installed(packages: Iterable[str]) -> list[str]:
    """Return names and versions of the packages that are installed."""
    lines = []
    for package in sorted(set(packages)):
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return lines


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="network", help="such as 'vit-pytorch ViT'")
    parser.add_argument("--list", action="store_true", help="print the networks, and stop")
    parser.add_argument("--any-state", action="store_true", help="take rows of earlier states of the code, too")
    parser.add_argument("--page", action="store_true", help="write the page from the rows that there are, and stop")
    parser.add_argument("--time", type=float, default=300, metavar="S", help="limit per network, default 300 s")
    parser.add_argument("--memory", type=float, default=12, metavar="GIB", help="limit per network, default 12 GiB")
    args = parser.parse_args()
    if unknown := [key for key in args.networks if key not in NETWORKS]:
        parser.error(f"There is no network {', '.join(unknown)}; there are {', '.join(NETWORKS)}.")
    return args


def main() -> int:
    """Run what has not been run yet, print each row, write the page, and return 1 if a network is not exact."""
    args = arguments()
    if args.list:
        print("\n".join(NETWORKS))
        return 0
    torch.set_num_threads(1)
    versions = installed(network.package for network in NETWORKS.values())
    state = code_state(__file__, torch.__version__, *versions)
    survey = Survey(RESULTS, "network", state, args.any_state)
    exact = True
    for key in () if args.page else args.networks or NETWORKS:
        row = survey.row(key, functools.partial(supervise, check, key, args.time, args.memory))
        print(line(row), flush=True)
        exact &= verdict(row) == "exact" or "unbuilt" in row
    rows = [row for key in NETWORKS if (row := survey.stored(key)) is not None]
    if not args.networks:
        PAGE.write_text(page(rows, installed(NETWORKS[row["network"]].package for row in rows), state))
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())

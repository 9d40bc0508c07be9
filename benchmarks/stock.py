"""Small networks that transformers loads by itself: half of each group masked, compacted, saved, loaded, compared.

    python benchmarks/stock.py [architecture ...]      (default: all; resumes where it stopped)
    python benchmarks/stock.py --load                  (load what was saved, in a process without this project)

For each architecture of ``architectures.py`` the same small model is taken, in float32. Half of the heads, of the
neurons and of the stream is masked, the model is compacted, and `lightning_compress.save_pretrained` writes it. A
model with layer norms is compacted with ``plain_norms=True``: then it is equal to the model in memory, and the masked
model is another function. Where that fails, only heads and neurons are masked. The folder
holds the inputs and the outputs in memory, which ``--load`` compares with those of ``from_pretrained``.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import logging
import re
import shutil
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import engine
from benchmarks.architectures import NotRun, cell, prepared
from benchmarks.breadth import general, supervise
from benchmarks.stock_loading import loaded
from benchmarks.survey import ROOT, Survey, code_state
from engine.errors import EngineError, VerificationError
from engine.program.trees import tensors_in
from engine.sensitivity.importance import cut
from lightning_compress import save_pretrained
from tests.engine.exactness import parameters

RESULTS = ROOT / "build" / "stock.jsonl"
FOLDERS = ROOT / "build" / "stock"
PAGE = ROOT / "docs" / "stock.md"
WAYS = ("all", "heads and neurons")
WIDTH = re.compile(r"hidden_sizes?|hidden_dim|d_model|n_embd|emb(ed)?_dims?|dim")  # of a stream
SHARED = 0.01  # error up to which a network is saved whose norms share an eps

KINDS = {
    "^No .* configuration describes": "no configuration describes the shapes",
    "keeps the statistics": "a norm's weights cannot express the statistics of removed channels",
    "computes something else|computes a different function|One field of": (
        "a configuration with the same shapes computes something else"
    ),
    "does not run": "the class does not run under the configuration that has the shapes",
    "do not (reach|use)": "the inputs do not reach what was narrowed",
    "differs from the masked|VerificationError": "refused by the verification",
    "rejected the example|TraceError": "cannot be recorded",
    "took longer|ended with -24": "time limit",
}  # reasons, by what they say


def masks_of(groups: Sequence[engine.Group], way: str) -> dict[str, dict[str, Tensor]]:
    """Return masks of half of the units of each group; groups of one size keep one number."""
    groups = [group for group in groups if group.reason is None]
    if way == "heads and neurons":
        groups = [group for group in groups if not wide(group)]
    generator = torch.Generator().manual_seed(0)
    order = {g.name: torch.randperm(g.size, generator=generator).double() for g in groups}
    keep = {g.name: cut(order[g.name], 0.5, g.rows) for g in groups}
    return engine.group_masks(groups, keep)


def wide(group: engine.Group) -> bool:
    """Whether a group is a stream: more layers add to it than queries, keys and values."""
    return sum(member.role == "out" and member.units.ndim > 1 for member in group.members) > 3


class Read(nn.Module):
    """A model with a linear layer on each state that it returns, so that what flows through it is not an output."""

    def __init__(self, body: nn.Module, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.body = body
        with torch.no_grad():
            out = body(**inputs)
        self.heads = nn.ModuleDict()
        for name in ("last_hidden_state", "pooler_output", "encoder_last_hidden_state"):
            state = getattr(out, name, None)
            if isinstance(state, Tensor) and state.is_floating_point() and state.ndim in (2, 3, 4):
                self.heads[name] = nn.Conv2d(state.shape[1], 5, 1) if state.ndim == 4 else nn.Linear(state.shape[-1], 5)

    def forward(self, **inputs: Any) -> Any:
        """Return what the layers make of the states."""
        out = self.body(**inputs)
        return [head(getattr(out, name)) for name, head in self.heads.items()]


class Whole(Read):
    """A model without such states: everything that it returns is an output."""

    def forward(self, **inputs: Any) -> Any:
        """Return the outputs of the model."""
        return self.body(**inputs)


def outputs(model: torch.nn.Module, inputs: Any) -> list[Tensor]:
    """Return the outputs of a model, with the same random numbers each time."""
    torch.manual_seed(0)
    with torch.no_grad():
        return [t for t in tensors_in(model(**inputs)) if t.is_floating_point()]


def check(kind: str) -> dict[str, Any]:
    """Compact a model, save it, and return what came of it."""
    torch.set_num_threads(1)  # in this process: the threads of autograd fail on a pool from before the fork
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    rows: list[dict[str, Any]] = []
    for way in WAYS:
        torch.set_default_dtype(torch.float64)
        try:
            body, one, _ = prepared(kind)
        except NotRun as error:
            return {"not run": re.sub(r"\s+", " ", str(error).removeprefix("NotRun: "))[:200]}
        finally:
            torch.set_default_dtype(torch.float32)
        rows.append({"model": type(body).__name__, "way": way} | reading(kind, body, floats(one), way))
        if "error" in rows[-1]:
            return rows[-1] | {"stood in the way": [row["reason"] for row in rows[:-1]]}
    return rows[0] | {"reasons": [row["reason"] for row in rows]}


def reading(kind: str, body: nn.Module, inputs: dict[str, Any], way: str) -> dict[str, Any]:
    """Save a model in one of the ways."""
    body = body.float()
    for module in body.modules():
        if vars(module).get("dtype") == torch.float64:
            module.dtype = torch.float32
        own = vars(module)
        own |= floats({key: value for key, value in own.items() if isinstance(value, Tensor)})  # beside its buffers
        own |= {key: floats(value) for key, value in own.items() if key.endswith("_cache") and isinstance(value, dict)}
    torch.manual_seed(0)
    read = Read(body, inputs).eval()
    return saved(kind, read if read.heads else Whole(body, inputs).eval(), inputs, way)


def floats(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return inputs in float32."""
    return {k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}


def saved(kind: str, model: Read, inputs: dict[str, Any], way: str) -> dict[str, Any]:
    """Compact a model in one of the ways and save it."""
    before, folder = parameters(model.body), FOLDERS / kind
    try:
        graph = engine.trace(model, inputs, dynamic_dims={})  # only these sizes are compared
        groups = engine.dependency_groups(model, inputs, graph=graph)
        masks = masks_of(groups, way)
        plain = any(isinstance(module, (nn.LayerNorm, nn.GroupNorm)) for module in model.body.modules())
        expected = None if plain else outputs(masked(model, masks), inputs)
        speedup = engine.ModelSpeedup(model, inputs, masks, confidence=0, graph=graph, plain_norms=plain)
        speedup.speedup_model()
        check_equal(expected, outputs(model, inputs))
        result = save_pretrained(model.body, folder, example_input=inputs, tolerance=SHARED)
    except EngineError as error:
        return {"reason": f"{type(error).__name__}: {error}"}
    kept = {"class": type(model.body).__name__, "inputs": inputs, "outputs": outputs(model.body, inputs)}
    torch.save(kept, folder / "outputs.pt")
    return {
        "parameters": [before, parameters(model.body)],
        "exact": speedup.certificate.exact,
        "error": result.error,
        "shared": dict(result.shared_eps),
        "config": dict(result.config),
        "stays": dict(Counter(general(group.reason) for group in groups if group.reason is not None)),
        "first": {general(group.reason): group.name for group in groups[::-1] if group.reason is not None},
    }


def masked(model: Read, masks: dict[str, dict[str, Tensor]]) -> Read:
    """Return a copy with its masked weights zero."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, own in masks.items():
            for key, mask in own.items():
                model.get_submodule(name).get_parameter(key).mul_(mask)
    return model


def check_equal(expected: list[Tensor] | None, actual: list[Tensor]) -> None:
    """Refuse a compaction that is meant to be exact and is not; in float64 the survey of architectures says the same.

    Raises:
        VerificationError: where outputs differ.
    """
    pairs = [] if expected is None else list(zip(expected, actual, strict=True))
    error = max((float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in pairs if a.numel()), default=0)
    if not error <= 1e-4:
        raise VerificationError(f"The compacted model differs from the masked one by {error:.1e}.")


# ---------------------------------------------------------------- all of them


def verdict(row: dict[str, Any]) -> str:
    """Return how a row was saved, or why not."""
    if "error" in row:
        if not smaller(row):
            reasons = sorted(row.get("stays", {}).items(), key=lambda item: -item[1])
            layer = f"'{row['first'][reasons[0][0]]}' and others stay whole, as " if row.get("first") else ""
            return "nothing could be removed" + (f": {layer}{reasons[0][0]}" if reasons else "")
        kind = "exact" if row["exact"] else "plain norms"
        kind += f" but for the eps of {len(row['shared'])} norms" if row.get("shared") else ""
        return kind if row["way"] == WAYS[0] else f"{kind}, {row['way']} only"
    return brief(general(str(row.get("reasons", [row.get("failed", row.get("refused", "?"))])[0])))


def brief(reason: str) -> str:
    """Return a reason without the advice that many have in common, and without a long list of fields.

    Example:
        >>> brief("InputError: 'a' has shape [2], and [4] under the nearest one (b=2, c=3). Prune with equal amounts.")
        "'a' has shape [2], and [4] under the nearest one."
    """
    reason = re.sub(r"^(InputError|VerificationError): ", "", reason)
    reason = re.sub(r" under the nearest one \([^()]*\)", " under the nearest one", reason)
    return textwrap.shorten(reason.partition(" Prune with equal amounts")[0], 400, placeholder=" …")


def kind_of(row: dict[str, Any], error: Any) -> str:
    """Return the kind of reason for which a row is not loaded, or loads with an error."""
    reason = verdict(row)
    if "error" in row:
        above = "the error is above 1e-6 in float32, though not in float64"
        return above if smaller(row) else "nothing could be removed"
    return next((kind for pattern, kind in KINDS.items() if re.search(pattern, reason)), "other")


def smaller(row: dict[str, Any]) -> bool:
    """Whether anything was removed and saved."""
    return "error" in row and row["parameters"][1] < row["parameters"][0]


def has_narrow_stream(row: dict[str, Any]) -> bool:
    """Whether a field that changed is the width of a residual stream."""
    return any(WIDTH.fullmatch(re.sub(r"\[\d+\]", "", name.rpartition(".")[2])) for name in row["config"])


def is_back(row: dict[str, Any], error: Any) -> bool:
    """Whether a small network was loaded that computes the same, but for the error that its note says."""
    return smaller(row) and isinstance(error, float) and error <= (1.1 * row["error"] if row.get("shared") else 1e-6)


def line(row: dict[str, Any], error: Any = None) -> str:
    """Return a row of the table."""
    if "error" not in row:
        return f"| {row['architecture']} | {cell(verdict(row))} | | | |"
    before, after = row["parameters"]
    changes = ", ".join(f"{name}={value:g}" for name, value in row["config"].items())
    shown = "" if error is None else f"{error:.0e}" if isinstance(error, float) else cell(str(error))
    return f"| {row['architecture']} | {verdict(row)} | {changes} | {before / 1e3:.0f} → {after / 1e3:.0f} | {shown} |"


HEAD = """# Survey: transformers loads the small network

`python benchmarks/stock.py` takes the small model of an architecture in transformers' `MODEL_MAPPING`, masks half of
the heads, the neurons and the residual stream, compacts the model and calls `lightning_compress.save_pretrained`. Of
{run} architectures that were tried, {back} come back by `from_pretrained` in a process that cannot import this project,
with outputs within 1e-6 of the largest in float32: {exact} as they are, {plain} with `plain_norms=True` (then equal to
the model in memory, while the masked model is another function), {few} with heads and neurons masked only, because the
whole could not be saved. In {streams} of them a width of the residual stream is among the fields that changed; in the
others the stream is kept whole, because no configuration describes it narrow, or because the masked model would be
another one (what did not run, such as an image encoder, could read it). In {shared} of them norms share an eps, and the
error is the one that `save_pretrained` named. Architectures that are not listed were not tried; [another
survey](architectures.md) says which of them are exact.

The other {rest} have a reason:

{reasons}

Where no configuration describes the shapes, the table names the first tensor that does not fit and the fields that its
sizes follow. The error goes on to say what to do: prune with equal amounts in the layers that share a field
(`uniform=True`), to widths that fields can express (`round_to`), in whole heads (`attention="heads"`); leave the layers
that it lists whole (`exclude=`); or save `model.state_dict()`, which holds the plan.

Each folder was loaded once after it was written, some by earlier code. torch {torch}, transformers {transformers}, one
CPU thread.

| architecture | saved, or why not | fields that changed | parameters, k | error |
|---|---|---|---:|---:|
"""


def page(rows: Sequence[dict[str, Any]], errors: dict[str, Any]) -> str:
    """Return the page."""
    run = sorted((row for row in rows if "not run" not in row), key=lambda row: str(row["architecture"]))
    back = [row for row in run if is_back(row, errors.get(row["architecture"]))]
    ways = Counter(row["way"] if row["way"] != WAYS[0] else "exact" if row["exact"] else "plain" for row in back)
    others = [row for row in run if not is_back(row, errors.get(row["architecture"]))]
    kinds = Counter(kind_of(row, errors.get(row["architecture"])) for row in others)
    numbers = {"run": len(run), "back": len(back), "streams": sum(map(has_narrow_stream, back)), "rest": len(others)}
    numbers["shared"] = sum(bool(row.get("shared")) for row in back)
    reasons = "\n".join(f"- {kind}: {count}" for kind, count in kinds.most_common())
    numbers |= {name: ways[way] for name, way in (("exact", "exact"), ("plain", "plain"), ("few", WAYS[1]))}
    versions = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    table = "\n".join(line(row, errors.get(row["architecture"])) for row in run)
    return HEAD.format(**numbers, **versions, reasons=reasons) + table + "\n"


def latest() -> dict[str, dict[str, Any]]:
    """Return the last row of each architecture, whatever the state of the code."""
    rows = map(json.loads, RESULTS.read_text().splitlines() if RESULTS.exists() else [])
    return {row["architecture"]: row for row in rows}


def main() -> int:
    """Run what has not been run yet, print each row, load all, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="architecture", help="keys of MODEL_MAPPING (bert, vit …)")
    parser.add_argument("--load", action="store_true", help="load what was saved")
    parser.add_argument("--partial", action="store_true", help="write the page of what has run so far")
    parser.add_argument("--any-state", action="store_true", help="keep what earlier code saved; it is loaded anew")
    parser.add_argument("--time", type=float, default=60, metavar="S", help="limit per model, default 60 s")
    parser.add_argument("--memory", type=float, default=8, metavar="GIB", help="limit per model, default 8 GiB")
    args = parser.parse_args()
    torch.set_num_threads(1)
    everything = sorted(MODEL_MAPPING_NAMES)
    survey = Survey(RESULTS, "architecture", code_state(__file__, torch.__version__, transformers.__version__))
    names = args.architectures or everything
    if not args.load:
        check("llama")  # what torch and transformers import at a first run: once, and not in each process
        for name in names:
            if args.any_state and "error" in latest().get(name, {}):
                continue
            shutil.rmtree(FOLDERS / name, ignore_errors=True)
            row = survey.row(name, functools.partial(supervise, check, name, args.time, args.memory))
            print(f"| {name} | not run |" if "not run" in row else line(row), flush=True)
    earlier = latest() if args.any_state else {}
    rows = [row for name in names if (row := survey.stored(name) or earlier.get(name)) is not None]
    errors = loaded(FOLDERS, [row["architecture"] for row in rows if "error" in row])
    print(f"{sum(is_back(row, errors.get(row['architecture'])) for row in rows)} of {len(rows)} load")
    if args.partial or survey.all(everything) is not None and not args.architectures:
        others = PAGE.read_text().partition("\n## ")  # of other packages
        PAGE.write_text("".join([page(rows, errors), *others[1:]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Exactness on every architecture of transformers: half of the units of each dependency group go, the function stays.

    python benchmarks/architectures.py [architecture ...]      (default: all; resumes where it stopped)

For each entry of transformers' ``MODEL_MAPPING`` a model of a few layers and some tens of channels is built from its
configuration, in float64, everything in it random, with a linear layer on its last hidden state as a task would put
there, and taken through what ``families.py`` does: the outputs of the masked and of the compacted model are compared at
two batch sizes, and inside by the engine's certificate. What a model converts to float32 stays in float64 for that, or
rounding could not be told from a mistake. An architecture that transformers does not build that small, or does not run
on random inputs, is *not run*: that says nothing about it. Results are kept, line by line, in
``build/architectures.jsonl``, by architecture and state of the code; the page is ``docs/architectures.md``.
"""

from __future__ import annotations

import argparse
import functools
import logging
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import modalities
from benchmarks.breadth import general, staying, supervise
from benchmarks.families import compacted, verdict
from benchmarks.modalities import Inputs, NotRun, accepted, is_fed, outputs, small_identifier
from benchmarks.survey import ROOT, Survey, code_state
from tests.engine.exactness import parameters, randomised

RESULTS = ROOT / "build" / "architectures.jsonl"
PAGE = ROOT / "docs" / "architectures.md"
LARGEST = 60_000_000  # parameters of a model that is still taken where not all of its sizes can be made small

# ---------------------------------------------------------------- a small configuration

# What a number in a configuration becomes where it is larger, by the first pattern that its name matches.
SMALL: dict[str, int] = {
    r".*(num_key_value_heads|kv_heads|multi_query_group_num|num_key_heads)": 2,
    r".*(attention_heads|num_heads|n_heads?|_heads|num_attn_heads)": 4,
    r".*(hidden_layers|num_layers|n_layers?|encoder_layers|decoder_layers|depth|num_blocks)": 2,
    r".*(experts_per_tok|num_experts_per_token|topk|top_k|n_group|topk_group)": 2,
    r".*(routed_experts|local_experts|num_experts|n_experts)": 4,
    r".*(intermediate_size|ffn_dim|ffn_hidden_size|d_ff|n_inner|mlp_dim|feedforward_dim|inner_dim)": 96,
    r".*vocab_size(_per_layer_input)?": 99,
    r"qk_head_dim": 32,
    r"(head_dim|d_kv|dim_head|attention_head_dim|.*_head_dim|d_head)": 16,
    r".*(max_position_embeddings|n_positions|max_source_positions|max_target_positions)": 64,
    r".*image_size": 32,
    r"window_size": 4,
    r"rotary_dim": 8,
    r".*(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|projection_dim|emb_dim)": 64,
}
WIDTHS = re.compile(r"(encoder_)?hidden_sizes|embed_dims?|channels|conv_dim|.*out_channels|neck_.*sizes")
DEPTHS = re.compile(r"depths|num_blocks|stage_num_blocks|depth|layers|.*blocks_per_stage")
FIXED = {
    "attention_types": [[["global", "local"], 1]],
    "upsample_groups": 64,
    "image_grid_pinpoints": [[32, 64], [64, 32]],
}
LARGER_PICTURES = {  # where patches are put together before text reads them, and for sound
    "patch_size": 8, "spatial_merge_size": 2, "scale_factor": 2, "mm_tokens_per_image": 4, "window_size": 32,
    "intermediate_size": 128,
}  # fmt: skip
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")
BACKBONE = {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "out_indices": [2, 3, 4]}


def small(name: str, value: Any, only: str = "") -> Any:
    """Return a small value for a field of a configuration, or the value itself.

    Args:
        name: of the field.
        value: its default.
        only: pattern of the numbers that become small; all of them where it is empty.
    """
    if name == "head_dim" and value is None:
        return 16
    if name in FIXED:
        return FIXED[name]
    if isinstance(value, dict) and "mrope_section" in value:
        return {**value, "mrope_section": [4, 2, 2]}
    if isinstance(value, int) and not isinstance(value, bool):
        if re.search(r"token_id|token_index|_id$", name):
            return small_identifier(name, value)
        if only and not re.fullmatch(only, name):
            return value
        return min(value, next((size for pattern, size in SMALL.items() if re.fullmatch(pattern, name)), value))
    if isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value) and not only:
        if name.endswith("heads"):
            return type(value)(2 for _ in value)
        if DEPTHS.fullmatch(name):
            return type(value)(min(v, 1) for v in value)
        if WIDTHS.fullmatch(name):
            return type(value)(16 * (place + 1) if v > 16 else v for place, v in enumerate(value))
    return value


def shrunk(cls: type[PretrainedConfig], only: str = "", **sizes: Any) -> PretrainedConfig:
    """Return a configuration of a class, and of its parts, with small sizes."""
    default = cls()
    fields: dict[str, Any] = {}
    for name, value in vars(default).items():
        if isinstance(value, PretrainedConfig):
            timm = value.model_type == "timm_backbone"
            fields[name] = transformers.ResNetConfig(**BACKBONE) if timm else shrunk(type(value), only, **sizes)
        elif not name.startswith("_") and (new := small(name, value, only)) != value:
            fields[name] = new
    fields |= {name: value for name, value in sizes.items() if name in fields or name in vars(default)}
    for name in KINDS:
        kinds = getattr(default, name, None)
        if isinstance(kinds, (list, tuple)) and kinds and not isinstance(getattr(cls, name, None), property):
            several = list(dict.fromkeys(kinds))
            layers = max(2, len(several))  # each kind of layer once
            fields[name] = (several * 2)[:layers]
            fields |= {n: layers for n in ("num_hidden_layers", "n_layer", "num_layers") if n in fields}
    return cls(**fields)


def configurations(kind: str) -> Iterator[tuple[PretrainedConfig | Exception, bool]]:
    """Yield configurations of an architecture, smallest first, or why there is none; and whether widths are whole."""
    cls = CONFIG_MAPPING[kind]
    few = r".*(vocab_size|layers|n_layers?|depth|experts)"
    tries: list[dict[str, Any]] = [{}, {"num_key_value_heads": 4}, {"num_heads": 8}, {"rope_parameters": SECTIONS}]
    tries += [LARGER_PICTURES, {**LARGER_PICTURES, "rope_parameters": SECTIONS}]
    for only, kwargs in (*(("", sizes) for sizes in tries), (few, {})):
        try:
            config: PretrainedConfig | Exception = shrunk(cls, only, **kwargs)
        except Exception as error:  # sizes that do not go together; what it says is listed if no others do
            config = error
        yield config, bool(only)


# ---------------------------------------------------------------- a model and its inputs


class Headed(nn.Module):
    """A model with a linear layer on its last hidden state, so that the residual stream is not an output."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, **inputs: Any) -> Tensor:
        """Return what the head computes from the last hidden state."""
        return self.head(self.body(**inputs).last_hidden_state)


class Scored(nn.Module):
    """A model that compares pictures with texts, of which a task reads how similar they are."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, **inputs: Any) -> Tensor:
        """Return a score for each pair."""
        return self.body(**inputs).logits_per_image


def headed(body: nn.Module, inputs: Inputs) -> nn.Module:
    """Return a model that returns what a task reads: a head's outputs or scores; else the model itself."""
    try:
        with torch.no_grad():
            out = body(**inputs)
    except Exception as error:  # by itself, before the engine has seen it
        raise NotRun(f"{type(error).__name__}: {error}") from error
    if isinstance(getattr(out, "logits_per_image", None), Tensor):
        return Scored(body)
    hidden = getattr(out, "last_hidden_state", None)
    if not isinstance(hidden, Tensor) or not hidden.is_floating_point() or hidden.ndim not in (2, 3, 4):
        return body
    head = nn.Conv2d(hidden.shape[1], 5, 1) if hidden.ndim == 4 else nn.Linear(hidden.shape[-1], 5)
    return Headed(body, head.double())


def stirred(model: nn.Module) -> nn.Module:
    """Make random what is one number everywhere (norms, layer scales, tokens), and large enough what is tiny."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if not p.numel():
                continue
            value = float(p.flatten()[0])
            if bool((p == value).all()):
                scales = torch.rand(p.shape, generator=generator, dtype=p.dtype) + 0.5
                p.copy_(scales * (value if abs(value) > 0.1 else 1.0) if value else (scales - 1) * 0.6)
            elif p.ndim > 1 and float(p.std()) < 0.05:
                p.mul_(1 / float(p.std()) / p[0].numel() ** 0.5)
    return model


def built(kind: str, config: PretrainedConfig, wide: bool) -> nn.Module:
    """Return a small model of an architecture, in float64, everything in it random; ``wide``: it may be too large."""
    names = MODEL_MAPPING_NAMES[kind]
    cls = getattr(transformers, names if isinstance(names, str) else names[0])
    config._experts_implementation = "batched_mm"  # torch has no grouped product in float64
    if wide:
        with torch.device("meta"):
            size = parameters(cls(config))
        if size > LARGEST:
            raise NotRun(f"{size / 1e6:.0f} M parameters are left")
    torch.manual_seed(0)
    model = cls(config)
    for module in model.modules():
        if isinstance(vars(module).get("dtype"), torch.dtype):  # a router that converts its own layer when it runs
            module.dtype = torch.float64
    return stirred(randomised(model))


def prepared(kind: str) -> tuple[nn.Module, Inputs, Inputs]:
    """Return a small model that runs, and inputs of two batch sizes: one that reads pictures and sound if any does."""
    failure, text_only = None, None
    for config, wide in configurations(kind):
        try:
            if isinstance(config, Exception):
                raise config
            model = built(kind, config, wide)
            pair = accepted(model)
            if is_fed(model, pair[0]):
                return model, *pair
            text_only = text_only or (model, *pair)
        except Exception as error:  # another configuration may do
            failure = failure or error
    if text_only is not None:
        return text_only
    raise NotRun(f"{type(failure).__name__}: {failure}")


def check(kind: str) -> dict[str, Any]:
    """Compact a model and return what came of it.

    Raises:
        EngineError: where the engine refuses.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_default_dtype(torch.float64)
    try:
        body, one, two = prepared(kind)
        model = headed(body, one)
    except NotRun as error:
        return {"not run": re.sub(r"\s+", " ", str(error).removeprefix("NotRun: "))[:200]}
    names = sorted(one.keys() - {"use_cache"})
    return {"model": type(body).__name__, "inputs": names} | compacted(model, one, two, outputs)


# ---------------------------------------------------------------- all of them


HEAD = """# Survey of transformers

`python benchmarks/architectures.py` builds a model with a few layers and some tens of channels for each architecture in
transformers' `MODEL_MAPPING`, masks half of the units of each dependency group, compacts the model, and compares it
with the masked one. Of {run} architectures that run on random inputs, {exact} are exact, {refused} refused, {failed}
failed and {late} timed out; {rest} were not run. torch {torch}, transformers {transformers}, float64, on one CPU
thread.

Everything that could hide an error is random, and a linear layer reads the last hidden state, so that the stream is not
an output; of a model that compares pictures with texts, the scores are read. The error is the largest difference at two
batch sizes, relative to the largest entry of the output; the counted sizes equal the measured ones. A model is given
whatever it takes and reads of text, pictures, videos and sound, with as many tokens for the features of pictures and
sound as it asks for; the part whose inputs are not listed did not run, and stays. Seconds are CPU time for tracing,
planning, compacting and verifying.

| architecture | inputs | verdict | error | parameters, k | left | seconds |
|---|---|---|---:|---:|---:|---:|
"""

REST = """
## Not run

Transformers could not build these from a small configuration, or could not run them on the random inputs above:
packages that are not installed, sizes that do not fit together once they are small, other kinds of inputs. This says
nothing about whether they can be compacted.

| architecture | why |
|---|---|
"""


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    if "parameters" not in row:
        return f"| {row['architecture']} | | {cell(verdict(row))} | | | | |"
    before, after = row["parameters"]
    return (
        f"| {row['architecture']} | {', '.join(row['inputs'])} | {verdict(row)} | {row['error']:.0e} "
        f"| {before / 1e3:.0f} → {after / 1e3:.0f} | {after / before:.0%} | {row['seconds']:.1f} |"
    )


def causes(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose reasons do not name what is another in each model: files, modules, sizes."""
    reasons = {
        re.sub(r" \(\S+\.py\)| ?\(?body\.\S+| = \d+", "", general(r)): n for r, n in row.get("stays", {}).items()
    }
    return row | {"stays": reasons}


def cell(text: str) -> str:
    """Return a text as it can stand in a table."""
    return general(text).replace("|", "\\|").replace("\n", " ")


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page."""
    run = [row for row in rows if "not run" not in row]
    counts = Counter(verdict(row).split(":")[0] for row in run)
    numbers = {"run": len(run), "rest": len(rows) - len(run), "exact": counts["exact"], "refused": counts["refused"]}
    numbers["late"] = sum("took longer" in row.get("failed", "") for row in run)
    numbers["failed"] = len(run) - counts["exact"] - counts["refused"] - numbers["late"]
    versions = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    rest = [f"| {row['architecture']} | {cell(row['not run'])[:120]} |" for row in rows if "not run" in row]
    head = HEAD.format(**numbers, **versions)
    return head + "\n".join([*map(line, run), *staying(map(causes, run))]) + "\n" + REST + "\n".join(rest) + "\n"


def main() -> int:
    """Run what has not been run yet, print each row, write the page, and return 1 if a model that runs is not exact."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="architecture", help="keys of MODEL_MAPPING (bert, vit …)")
    parser.add_argument("--time", type=float, default=60, metavar="S", help="limit per model, default 60 s")
    parser.add_argument("--memory", type=float, default=8, metavar="GIB", help="limit per model, default 8 GiB")
    args = parser.parse_args()
    torch.set_num_threads(1)
    everything = sorted(MODEL_MAPPING_NAMES)
    if unknown := [name for name in args.architectures if name not in everything]:
        parser.error(f"transformers has no architecture {', '.join(unknown)}; it has {', '.join(everything)}")
    versions = torch.__version__, transformers.__version__, Path(modalities.__file__).read_text()
    survey = Survey(RESULTS, "architecture", code_state(__file__, *versions))
    check("bert")  # what torch and transformers import at a first run: once, and not in each process
    exact = True
    for name in args.architectures or everything:
        row = survey.row(name, functools.partial(supervise, check, name, args.time, args.memory))
        print(f"| {name} | not run: {cell(row['not run'])} |" if "not run" in row else line(row), flush=True)
        exact &= "not run" in row or verdict(row) == "exact"
    if (rows := survey.all(everything)) is not None:
        PAGE.write_text(page(rows))
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())

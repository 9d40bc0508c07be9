"""Command line ``python -m lightning_compress``: summarize models; inspect, compact, export and verify checkpoints."""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import engine
from engine.compaction import KEY, entries
from engine.errors import EngineError, InputError
from engine.files import read_archive, read_checkpoint
from lightning_compress.checkpoints.compacted import load_compacted
from lightning_compress.checkpoints.export import (
    another_batch,
    difference,
    export_onnx,
    export_program,
    export_torchscript,
)
from lightning_compress.checkpoints.offline import compact_checkpoint, example_of, load_masked
from lightning_compress.summary import summarize
from lightning_compress.trainer.packages import MisconfigurationException
from lightning_compress.trainer.target import find_model, from_shape, to_device

__all__ = ["main"]

_ABOUT = """\
Compacted checkpoints of Lightning, from which pruned channels are physically removed.

  summarize show what pruning can achieve for a model, before training
  inspect   show what was removed, the certificate, and sizes before and after
  compact   remove masked and zero channels from a checkpoint, and verify the result
  export    write ONNX, an exported program, TorchScript or safetensors, run it, and compare it
  verify    run a masked and a compacted checkpoint on the same inputs

Files are read with weights_only=True and their digests are checked, so that no code in them runs.
"""

_CLASS = """\
CLASS is the LightningModule that was trained, as package.module:Class, importable from the current folder. Its
arguments come from the hyperparameters in the checkpoint; pass missing ones with --arg, as in --arg width=8. The
example input is its example_input_array, a random tensor of the shape --example, or the content of the file --input.
"""

_MODEL = """\
CLASS is a LightningModule, another module, or a function that returns one, as package.module:Class, importable from the
current folder. Pass its arguments with --arg, as in --arg width=8. The example input is its example_input_array, a
random tensor of the shape --example, or the content of the file --input.
"""

_NOT_COMPACTED = (  # advice of the Python API for other checkpoints
    "Load it with `load_from_checkpoint` of its LightningModule, or as the state dict of a plain model."
)

_COMMANDS = "See {summarize,inspect,compact,export,verify} --help for details and examples.\n"

_EXAMPLES = {
    "summarize": """\
  python -m lightning_compress summarize train:Classifier --arg width=8 --example 1,3,224,224
  python -m lightning_compress summarize torchvision.models:resnet18 --example 1,3,224,224 --html summary.html
  python -m lightning_compress summarize train:Classifier --input batch.pt --amounts 0.5 --stock
""",
    "inspect": "  python -m lightning_compress inspect compacted.ckpt\n",
    "compact": """\
  python -m lightning_compress compact last.ckpt train:Classifier --out compacted.ckpt --example 1,3,224,224
  python -m lightning_compress compact last.ckpt train:Classifier --out compacted.ckpt --input batch.pt --arg width=8
  python -m lightning_compress compact dense.ckpt train:Classifier --out compacted.ckpt --masks masks.pt
""",
    "export": """\
  python -m lightning_compress export compacted.ckpt train:Classifier --example 1,3,224,224 --onnx net.onnx
  python -m lightning_compress export compacted.ckpt train:Classifier --onnx net.onnx --dynamic batch size
  python -m lightning_compress export compacted.ckpt train:Classifier --safetensors net.safetensors
""",
    "verify": """\
  python -m lightning_compress verify last.ckpt compacted.ckpt train:Classifier --example 8,3,224,224
  python -m lightning_compress verify last.ckpt compacted.ckpt train:Classifier --input batch.pt --tolerance 1e-5
""",
}

_ABOUT_EACH = {
    "summarize": """\
Show what pruning can achieve for a model, before training: which channels are coupled, which cannot be removed and why
(the most expensive reasons first), and the predicted multiply-accumulates and parameters at 25, 50 and 75 % of the
channels. No checkpoint is needed, because costs only depend on shapes.
""",
    "inspect": """\
Show what was removed from which tensor, where constants were folded, the certificate of the verification, and the
number of values and bytes before and after. Only the file is needed. An error means that it is damaged.
""",
    "compact": """\
Remove masked and zero channels from a checkpoint, compare the small model with the masked one on random samples, and
write the compacted checkpoint, which load_compacted(path, Class) loads. Accepts checkpoints of ChannelPruning, of
ModelPruning, of torch.nn.utils.prune, of anything else that sets channels to zero, and folders of sharded FSDP
checkpoints. Nothing is written if the small model computes a different function.
""",
    "export": """\
Export the network of a checkpoint for deployment. Each file is loaded and run at two batch sizes (with --dynamic size
also at twice the size), and is not written if its outputs differ from the model's by more than 1e-5.
""",
    "verify": """\
Run the masked and the compacted network on the same inputs, at two batch sizes, and print the largest difference,
relative to the largest output. The exit code is 0 if they agree, 1 if they differ, 2 if one of them cannot be run.
""",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: command line arguments; ``None``: those of the process.

    Returns:
        0 on success; 1 if two models differ; 2 on errors, which are printed to stderr.
    """
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            return run(options)
    except (EngineError, MisconfigurationException, OSError) as error:
        sys.stderr.write(f"lightning_compress: {as_options(str(error))}\n")
        return 2


def as_options(message: str) -> str:
    """Replace arguments of the Python API in an error message by command line options.

    Example:
        >>> as_options("Pass one, as in `example_input=torch.ones(1, 3, 32, 32)`; name one, as in `model='net'`.")
        'Pass one, as in `--example 1,3,32,32`; name one, as in `--model net`.'
    """
    message = re.sub(r"`example_input=torch\.\w+\(([\d, ]+)\)`", _example_option, message)
    message = re.sub(r"`(model|masks)='?([^'`]*)'?`", r"`--\1 \2`", message)
    message = message.replace(_NOT_COMPACTED, "`compact` writes a compacted checkpoint.")
    return message.replace("pass `masks`", "pass `--masks`").replace("`example_input`", "`--example`")


def _example_option(shape: re.Match[str]) -> str:
    return f"`--example {shape[1].replace(' ', '')}`"


def _parser() -> argparse.ArgumentParser:
    form: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    examples = f"{_COMMANDS}\nexamples:\n{''.join(_EXAMPLES.values())}"
    parser = argparse.ArgumentParser("python -m lightning_compress", description=_ABOUT, epilog=examples, **form)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, about, fill, run in (
        ("summarize", "show what pruning can achieve for a model", _add_summarize, _summarize),
        ("inspect", "show what was removed, the certificate, and sizes", _add_inspect, _inspect),
        ("compact", "remove masked and zero channels from a checkpoint", _add_compact, _compact),
        ("export", "write ONNX and other formats, run and compare them", _add_export, _export),
        ("verify", "compare a masked and a compacted checkpoint", _add_verify, _verify),
    ):
        more = {"inspect": "", "summarize": f"{_MODEL}\n"}.get(name, f"{_CLASS}\n") + f"examples:\n{_EXAMPLES[name]}"
        command = commands.add_parser(name, help=about, description=_ABOUT_EACH[name], epilog=more, **form)
        fill(command)
        command.set_defaults(run=run)
    return parser


def _add_summarize(command: argparse.ArgumentParser) -> None:
    _add_model(command)
    command.add_argument(
        "--amounts", type=float, nargs="+", default=[0.25, 0.5, 0.75], help="fractions of the channels"
    )
    command.add_argument("--html", metavar="FILE", help="write the summary as HTML, too")
    about = "test whether transformers or diffusers could load the small model, and which groups prevent it"
    command.add_argument("--stock", action="store_true", help=about)


def _add_inspect(command: argparse.ArgumentParser) -> None:
    command.add_argument("checkpoint", help="a compacted checkpoint, *.ckpt or *.safetensors")


def _add_compact(command: argparse.ArgumentParser) -> None:
    command.add_argument("checkpoint", help="a masked or pruned checkpoint, or FSDP's folder of shards")
    _add_model(command)
    command.add_argument("--out", required=True, help="path of the compacted checkpoint; may be the same file")
    command.add_argument("--masks", help="a file with masks, {module: {parameter: 0/1 tensor}}; default: zeros count")
    command.add_argument("--confidence", type=int, default=8, help="random samples to verify with (default: 8)")


def _add_export(command: argparse.ArgumentParser) -> None:
    command.add_argument("checkpoint", help="a checkpoint, compacted or not")
    _add_model(command)
    command.add_argument("--onnx", metavar="FILE", help="an ONNX file")
    command.add_argument("--program", metavar="FILE", help="an exported program of torch.export, *.pt2")
    command.add_argument("--torchscript", metavar="FILE", help="a TorchScript file")
    command.add_argument("--safetensors", metavar="FILE", help="the weights, with the plan in the header")
    about = "dynamic sizes: batch (the default), and size, the dimensions from the third on"
    command.add_argument("--dynamic", nargs="+", default=["batch"], choices=["batch", "size"], help=about)


def _add_verify(command: argparse.ArgumentParser) -> None:
    command.add_argument("checkpoint", help="the masked checkpoint")
    command.add_argument("compacted", help="the compacted checkpoint")
    _add_model(command)
    command.add_argument("--tolerance", type=float, default=1e-4, help="largest relative difference (default: 1e-4)")


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("cls", metavar="CLASS", help="the LightningModule, as package.module:Class")
    command.add_argument("--model", help="path of the model inside the LightningModule, if it is ambiguous")
    command.add_argument("--example", help="shape of the example input, as in 1,3,224,224; batch first")
    command.add_argument(
        "--input", help="a file with the example input: a tensor, a tuple of arguments or a dict of keywords"
    )
    command.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="an argument of the class")


def _print_lines(*lines: Any) -> None:
    sys.stdout.write("\n".join(str(line) for line in lines) + "\n")


def _summarize(options: argparse.Namespace) -> int:
    make, arguments = _class(options.cls), _arguments(options)
    try:
        model = make(**arguments)
    except TypeError as error:
        raise InputError(
            f"{options.cls} cannot be built: {error}. Pass its arguments with --arg NAME=VALUE."
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"{options.cls} must be a module or return one, got a {type(model).__name__}.")
    summary = summarize(model, _example(options), amounts=options.amounts, path=options.model, stock=options.stock)
    _print_lines(summary)
    if options.html:
        Path(options.html).write_text(f'<!doctype html>\n<meta charset="utf-8">\n{summary._repr_html_()}\n', "utf-8")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    checkpoint = read_checkpoint(options.checkpoint)
    content = checkpoint[KEY]
    sealed = "digests are right" if content.get("sha256") else "no digests: not written by lightning_compress"
    _print_lines(f"{options.checkpoint}: format {content['version']}, {sealed}")
    for path, entry in entries(content).items():
        plans = [engine.Plan.from_state_dict(plan) for plan in entry["plans"]]
        for number, (plan, certificate) in enumerate(zip(plans, entry["certificates"], strict=True), 1):
            _print_lines("", f"Compaction {number} of {len(plans)}, of {path or 'the whole module'}", plan)
            _print_lines("No certificate." if certificate is None else engine.Certificate.from_state_dict(certificate))
    _print_lines("", *_sizes(checkpoint))
    return 0


def _sizes(checkpoint: dict[str, Any]) -> list[str]:
    """Return the table of sizes now and before all compactions."""
    after = {name: value.numel() for name, value in checkpoint["state_dict"].items() if hasattr(value, "numel")}
    bytes_each = {name: checkpoint["state_dict"][name].element_size() for name in after}
    before = dict(after)
    for path, entry in entries(checkpoint[KEY]).items():
        for plan in reversed(entry["plans"]):
            for name, cut in engine.Plan.from_state_dict(plan).slices.items():
                full = f"{path}.{name}".strip(".")
                before[full] = int(torch.Size(cut.before).numel())
                bytes_each.setdefault(full, 4)
    rows = [("", "before", "after", "remaining"), ("values", *_row(sum(before.values()), sum(after.values())))]
    size = [sum(n * bytes_each[name] for name, n in table.items()) for table in (before, after)]
    rows.append(("bytes", *_row(*size)))
    return ["  ".join([f"{row[0]:<8}", *(f"{cell:>16}" for cell in row[1:])]) for row in rows]


def _row(before: int, after: int) -> tuple[str, str, str]:
    return f"{before:,}", f"{after:,}", f"{after / max(before, 1):.1%}"


def _compact(options: argparse.Namespace) -> int:
    cls, example = _class(options.cls), _example(options)
    arguments = {
        "masks": options.masks,
        "model": options.model,
        "confidence": options.confidence,
        **_arguments(options),
    }
    compact_checkpoint(options.checkpoint, cls, options.out, example, **arguments)
    return _inspect(argparse.Namespace(checkpoint=options.out))


def _export(options: argparse.Namespace) -> int:
    wanted: dict[str, Callable[..., float | None]] = {
        "onnx": lambda model, path, example: export_onnx(model, path, example, options.dynamic),
        "program": lambda model, path, example: export_program(model, path, example, options.dynamic),
        "torchscript": export_torchscript,
        "safetensors": lambda model, path, example: engine.save_safetensors(model, path),
    }
    files = {form: getattr(options, form) for form in wanted if getattr(options, form)}
    if not files:
        raise InputError(f"Specify at least one format: {', '.join(f'--{form} FILE' for form in wanted)}.")
    targets = [Path(path).resolve() for path in (options.checkpoint, *files.values())]
    if twice := sorted({str(path) for path in targets if targets.count(path) > 1}):
        raise InputError(f"{twice[0]} would be overwritten: each file needs a name of its own, the checkpoint too.")
    module = load_masked(options.checkpoint, _class(options.cls), **_arguments(options))[0]
    target = find_model(module, options.model)[1]
    example = None if set(files) == {"safetensors"} else _placed(example_of(module, _example(options)), target)
    for form, path in files.items():
        error = wanted[form](target, path, example)
        _print_lines(
            f"{path}: {form}, {Path(path).stat().st_size:,} bytes"
            + ("" if error is None else f", differs by {error:.1e}")
        )
    return 0


def _verify(options: argparse.Namespace) -> int:
    cls, arguments = _class(options.cls), _arguments(options)
    masked = load_masked(options.checkpoint, cls, **arguments)[0]
    compacted = load_compacted(options.compacted, cls, map_location="cpu", **arguments).eval()
    reference, small = (find_model(module, options.model)[1] for module in (masked, compacted))
    example = _placed(example_of(masked, _example(options)), reference)
    error = difference(reference, small, [example, another_batch(example)])
    before, after = (sum(p.numel() for p in model.parameters()) for model in (reference, small))
    same = error <= options.tolerance
    verdict = "the same" if same else "DIFFERENT"
    _print_lines(f"parameters {before:,} -> {after:,}; largest relative difference {error:.1e}: {verdict}")
    return 0 if same else 1


def _placed(example: Any, model: torch.nn.Module) -> Any:
    """Convert a floating-point example to the dtype of the model's weights."""
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    moved = to_device(example, "cpu")
    return moved.to(dtype) if isinstance(moved, torch.Tensor) and moved.is_floating_point() else moved


def _class(name: str) -> Any:
    module, _, cls = name.replace(":", ".").rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"There is no class {name!r}; pass it as package.module:Class: {error}.") from error


def _example(options: argparse.Namespace) -> Any:
    if options.input:
        return read_archive(options.input)
    if not options.example:
        return None
    try:
        return from_shape(tuple(int(n) for n in options.example.split(",")))
    except ValueError as error:
        raise InputError(f"--example must be a shape, as in 1,3,224,224; got {options.example!r}.") from error


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Parse the arguments of the class, as Python literals if possible."""
    arguments: dict[str, Any] = {}
    for pair in options.arg:
        name, equals, value = pair.partition("=")
        if not equals:
            raise InputError(f"--arg must be NAME=VALUE, got {pair!r}.")
        try:
            arguments[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[name] = value
    return arguments

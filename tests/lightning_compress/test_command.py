"""The command line."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

from lightning_compress import ChannelPruning, load_compacted
from lightning_compress.command import _parser, main
from tests.lightning_compress.checkpoints.test_export import ONNX
from tests.lightning_compress.models import Reference, Wrapped, fit, seeded

CLASS = "tests.lightning_compress.models:Wrapped"
SHAPE = "2,3,8,8"


@pytest.fixture
def masked(tmp_path: Path) -> Path:
    """A masked checkpoint."""
    fit(seeded(Wrapped), tmp_path, Reference(), ChannelPruning(amount=0.5)).save_checkpoint(tmp_path / "masked.ckpt")
    return tmp_path / "masked.ckpt"


def run(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code, and what is on both outputs."""
    code = main(shlex.split(command))
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def test_compact_inspect_verify(masked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A masked checkpoint becomes a compacted one that loads, is described, and is found to compute the same."""
    out = tmp_path / "small.ckpt"
    code, shown = run(f"compact {masked} {CLASS} --out {out} --example {SHAPE}", capsys)
    assert code == 0 and load_compacted(out, Wrapped).net.wide.out_channels == 8
    assert run(f"inspect {out}", capsys) == (0, shown)
    dense = sum(value.numel() for value in seeded(Wrapped).state_dict().values())
    for part in ("digests are right", "of net", "wide.weight", "Certificate: verified", f"{dense:,}"):
        assert part in shown, shown
    code, shown = run(f"verify {masked} {out} {CLASS} --example {SHAPE}", capsys)
    assert code == 0 and "the same" in shown


def test_verify_finds_a_difference(masked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another checkpoint than the masked one is told apart, by exit code 1."""
    main(shlex.split(f"compact {masked} {CLASS} --out {tmp_path}/small.ckpt --example {SHAPE}"))
    checkpoint = torch.load(masked, weights_only=True)
    checkpoint["state_dict"]["net.fc.bias"] += 1
    torch.save(checkpoint, tmp_path / "other.ckpt")
    code, shown = run(f"verify {tmp_path}/other.ckpt {tmp_path}/small.ckpt {CLASS} --example {SHAPE}", capsys)
    assert code == 1 and "DIFFERENT" in shown


@ONNX
def test_export(masked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every form is written and compared; the input may come from a file."""
    for package in ("onnxruntime", "onnxscript", "safetensors"):
        pytest.importorskip(package)
    main(shlex.split(f"compact {masked} {CLASS} --out {tmp_path}/small.ckpt --example {SHAPE}"))
    torch.save(torch.randn(2, 3, 8, 8), tmp_path / "x.pt")
    files = {"onnx": "m.onnx", "program": "m.pt2", "torchscript": "m.pt", "safetensors": "m.safetensors"}
    wanted = " ".join(f"--{form} {tmp_path}/{name}" for form, name in files.items())
    code, shown = run(
        f"export {tmp_path}/small.ckpt {CLASS} {wanted} --input {tmp_path}/x.pt --dynamic batch size", capsys
    )
    assert code == 0 and shown.count("differs by") == 3, shown
    assert all((tmp_path / name).stat().st_size > 5000 for name in files.values())
    assert run(f"inspect {tmp_path}/m.safetensors", capsys)[0] == 0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("inspect {folder}/none.ckpt", "no checkpoint"),
        ("inspect {masked}", "contains no compaction plan"),
        ("compact {masked} nowhere:Net --out x --example 1,3,8,8", "no class 'nowhere:Net'"),
        ("compact {masked} {cls} --out x", "no example input"),
        ("compact {masked} torch.nn:Linear --out x --example 1,3,8,8", "class of the LightningModule that was trained"),
        ("export {masked} {cls} --example 1,3,8,8 --safetensors {masked}", "would be overwritten"),
        ("export {masked} {cls} --example 1,3,8,8 --onnx x --program ./x", "x would be overwritten"),
        ("compact {masked} {cls} --out x --example 1,a", "--example must be a shape"),
        ("compact {masked} {cls} --out x --example 1,3,8,8 --arg width", "--arg must be NAME=VALUE"),
        ("compact {masked} {cls} --out x --example 1,3,8,8 --arg width=6", "does not fit `Wrapped`"),
        ("export {masked} {cls} --example 1,3,8,8", "Specify at least one format"),
    ],
)
def test_errors(
    masked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, message: str, monkeypatch: Any
) -> None:
    """What cannot be done is one sentence and exit code 2, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    code, shown = run(command.format(folder=tmp_path, masked=masked, cls=CLASS), capsys)
    assert code == 2 and message in shown and not (tmp_path / "x").exists()


@pytest.mark.parametrize("command", ["", "summarize", "inspect", "compact", "export", "verify"])
def test_help_teaches(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """The help of each command shows commands that can be copied: they are read as they stand; and explains itself."""
    with pytest.raises(SystemExit, match="0"):
        main([*command.split(), "--help"])
    shown = capsys.readouterr().out
    examples = [line.split()[3:] for line in shown.splitlines() if line.startswith("  python -m lightning_compress")]
    assert examples and all(_parser().parse_args(words).run for words in examples)
    assert not command or all(words[0] == command for words in examples)
    assert max(map(len, shown.splitlines())) <= 130


def test_the_entry_point() -> None:
    """What is installed as a command is this one."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert resolve_name(re.search(r'^lightning-compress = "(.*)"$', text, re.MULTILINE)[1]) is main


@pytest.mark.parametrize("command", ["compact {masked} {cls} --out x", "verify {masked} {small} {cls}"])
def test_errors_speak_of_options(
    masked: Path, capsys: pytest.CaptureFixture[str], command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever types a command reads an option, not Python code."""
    monkeypatch.chdir(tmp_path)
    main(shlex.split(f"compact {masked} {CLASS} --out small.ckpt --example {SHAPE}"))
    capsys.readouterr()
    code, shown = run(command.format(masked=masked, small="small.ckpt", cls=CLASS), capsys)
    assert code == 2 and "`--example 1,3,32,32`" in shown and "torch." not in shown and "example_input=" not in shown


def test_errors_of_lightning_are_sentences(masked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that is raised for a choice among models has no traceback, and names the option."""
    code, shown = run(f"export {masked} {CLASS} --model nothing --example {SHAPE} --onnx x.onnx", capsys)
    assert code == 2 and "`--model nothing` is not a module of `Wrapped`" in shown


def test_a_checkpoint_that_is_not_compacted(masked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The answer names the command that compacts, and no methods of Python."""
    for command in (f"inspect {masked}", f"verify {masked} {masked} {CLASS} --example {SHAPE}"):
        code, shown = run(command, capsys)
        assert code == 2 and "`compact` writes a compacted checkpoint" in shown and "load_from" not in shown


def test_summarize(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a LightningModule, or of a function that returns a network; as text, and as HTML where asked for."""
    code, shown = run(f"summarize {CLASS} --arg width=4 --example {SHAPE} --html {tmp_path}/s.html", capsys)
    assert code == 0 and shown.startswith("Net: ") and "50%" in shown and "Frozen, and why" in shown
    assert "<table>" in (tmp_path / "s.html").read_text()
    code, shown = run("summarize tests.lightning_compress.models:Net --example 1,3,8,8 --amounts 0.1", capsys)
    assert code == 0 and "10%" in shown and "50%" not in shown


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("summarize torch.nn:Linear --example 1,3", "Pass its arguments with --arg"),
        ("summarize builtins:dict --example 1,3", "must be a module"),
        (f"summarize {CLASS}", "`--example 1,3,32,32`"),
    ],
)
def test_summarize_says_what_is_missing(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, exit code 2."""
    code, shown = run(command, capsys)
    assert code == 2 and message in shown

"""Loads saved networks by ``from_pretrained``, in a process that cannot import this project, and compares them."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["loaded"]

LOADER = """
import json, sys
from pathlib import Path
import torch, transformers
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("engine", "lightning_compress"):
            raise ImportError(f"{name} is not there")
sys.meta_path.insert(0, Blocked())
transformers.logging.set_verbosity_error()
def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict) or hasattr(value, "values") and callable(value.values):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
for folder in map(Path, sys.argv[1:]):
    try:
        saved = torch.load(folder / "outputs.pt", weights_only=True)
        model = getattr(transformers, saved["class"]).from_pretrained(folder, dtype=torch.float32).eval()
        torch.manual_seed(0)
        with torch.no_grad():
            outputs = [t for t in tensors(model(**saved["inputs"])) if t.is_floating_point()]
        pairs = list(zip(outputs, saved["outputs"], strict=True))
        error = max(float((a - b).abs().max() / (b.abs().max() or 1)) for a, b in pairs)
        print(json.dumps({"architecture": folder.name, "loaded": error}), flush=True)
    except Exception as problem:
        text = f"{type(problem).__name__}: {problem}"[:200]
        print(json.dumps({"architecture": folder.name, "loaded": text}), flush=True)
"""


def loaded(folders: Path, names: Sequence[str]) -> dict[str, Any]:
    """Return the errors of saved networks, or what was raised, by name.

    Args:
        folders: of all networks. Errors are kept beside it, so that each folder is loaded once after it was written.
        names: of the folders in it.
    """
    results = folders.with_name(f"{folders.name}_loaded.jsonl")
    written = {name: (folders / name / "outputs.pt").stat().st_mtime for name in names}
    rows = map(json.loads, results.read_text().splitlines() if results.exists() else [])
    errors = {row["architecture"]: row["loaded"] for row in rows if written.get(row["architecture"]) == row["written"]}
    with results.open("a") as out:
        for name, error in _load([folders / name for name in names if name not in errors]).items():
            errors[name] = error
            out.write(json.dumps({"architecture": name, "written": written[name], "loaded": error}) + "\n")
    return errors


def _load(folders: Sequence[Path]) -> dict[str, Any]:
    """Load networks in a process of their own."""
    if not folders:
        return {}
    with tempfile.TemporaryDirectory() as elsewhere:
        script = Path(elsewhere, "load.py")
        script.write_text(LOADER)
        command = [sys.executable, "-I", str(script), *map(str, folders)]
        run = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True)
    if run.returncode:
        print(run.stderr[-2000:])
    rows = map(json.loads, filter(lambda text: text.startswith("{"), run.stdout.splitlines()))
    return {row["architecture"]: row["loaded"] for row in rows}

"""What `make release-check` runs in an environment that has the wheel only: the version, the lines of the README that
work when pasted, the command, `summarize` of a class in the current folder, and the demo."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ORIGIN = """
import sys, engine, lightning_compress
from pathlib import Path
for package in (engine, lightning_compress):
    assert Path(package.__file__).is_relative_to(sys.prefix), package.__file__
    assert package.__version__ == sys.argv[1], package.__version__
net = lightning_compress.summarize(__import__("torch").nn.Linear(4, 2), (1, 4))
assert "frozen" in net._repr_html_()
"""
MODULE = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
"""


def check(environment: Path) -> None:
    """Run all from an empty folder, without this checkout on the path."""
    (wheel,) = (ROOT / "dist").glob("*.whl")
    python = environment.resolve() / "bin" / "python"
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    with tempfile.TemporaryDirectory() as folder:

        def run(*arguments: str) -> None:
            subprocess.run([str(python), *arguments], cwd=folder, env=variables, check=True)

        run("-c", ORIGIN, wheel.name.split("-")[1])
        pasted = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
        assert pasted is not None
        run("-c", pasted[1])
        run("-m", "lightning_compress", "--help")
        Path(folder, "mine.py").write_text(MODULE, encoding="utf-8")
        run("-m", "lightning_compress", "summarize", "mine:Net", "--example", "1,4")
        run("-m", "lightning_compress", "summarize", "torchvision.models:resnet18", "--example", "1,3,64,64")
        shutil.copytree(ROOT / "examples", Path(folder, "examples"))
        run("examples/digits.py")
    sys.stdout.write(f"{wheel.name}: installed; the README, the command and the demo ran.\n")


if __name__ == "__main__":
    check(Path(sys.argv[1]))

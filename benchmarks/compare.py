"""What a change costs in removal: the surveys' pages of two states of the project, model by model.

    python benchmarks/compare.py <revision>      (a commit; its pages are compared with those of the working tree)

Printed are, for each survey, the median share of the parameters left before and after, and every model whose share
changed by more than one point or whose verdict changed.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("breadth", "families", "architectures", "packages")
POINT = 1.0


class Row(NamedTuple):
    """One model of a survey.

    Attributes:
        verdict: its first word.
        left: percentage of the parameters left, NaN where the model was not compacted.
    """

    verdict: str
    left: float


def rows(page: str) -> dict[str, Row]:
    """Return the models of a survey's page, by name.

    Example:
        >>> rows("| net | exact | 1e-16 | 10.0 → 2.5 | 1 → 1 | 0.3 |")
        {'net': Row(verdict='exact', left=25.0)}
    """
    table: dict[str, Row] = {}
    for line in (line for line in page.splitlines() if line.lstrip().startswith("|")):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        verdict = next((c.split()[0].rstrip(":") for c in cells if re.match(r"(exact|refused|failed)\b", c)), None)
        if verdict is not None:
            sizes = next((re.findall(r"[\d.]+", c) for c in cells if "→" in c), None)
            left = 100 * float(sizes[1]) / float(sizes[0]) if sizes and float(sizes[0]) else float("nan")
            table[cells[0]] = Row(verdict, left)
    return table


def differences(before: dict[str, Row], after: dict[str, Row]) -> Iterator[str]:
    """Yield a line for each model that changed its verdict, or its share by more than a point; then the medians."""
    both = [name for name in before if name in after]
    for name in both:
        old, new = before[name], after[name]
        if old.verdict != new.verdict or abs(old.left - new.left) > POINT:
            yield f"  {name}: {old.verdict} {old.left:.1f} % -> {new.verdict} {new.left:.1f} %"
    for name in before.keys() ^ after.keys():
        yield f"  {name}: only {'before' if name in before else 'after'}"
    compacted = [
        name for name in both if before[name].left == before[name].left and after[name].left == after[name].left
    ]
    if compacted:
        medians = (statistics.median(t[name].left for name in compacted) for t in (before, after))
        yield "  median of {} models: {:.1f} % -> {:.1f} %".format(len(compacted), *medians)


def main() -> int:
    """Compare the pages of a revision with those of the working tree."""
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    for name in PAGES:
        path = f"docs/{name}.md"
        shown = subprocess.run(
            ["git", "show", f"{sys.argv[1]}:{path}"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        print(name)
        print("\n".join(differences(rows(shown.stdout), rows((ROOT / path).read_text()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The verdict on a compaction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from engine import html

__all__ = ["TOLERANCE", "Certificate"]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Relative errors up to which outputs agree, by the dtype that they are computed in."""


@dataclass(frozen=True)
class Certificate:
    """The verdict on a compaction.

    Attributes:
        verified: whether numbers were compared; False if only shapes were predicted (``confidence=0``).
        max_error: largest relative error found.
        tolerance: the tolerance that it was compared with.
        dtype: dtype of the comparison.
        samples: number of random samples that were run.
        shapes: shapes of their inputs.
        compared: number of tensors compared inside the model, per run.
        exact_in_train: whether train mode is exact too (no constant was folded).
        notes: what could not be compared, and why.
        entries: names of the entries that were compared, by their results and writes, and in train mode by gradients.
        exact: whether the model is meant to compute the same function; False if ordinary norms over the remaining
            channels were requested. Then ``max_error`` is that of the outputs, and nothing is verified.

    Example:
        >>> import engine
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
        >>> mask = torch.tensor([1, 0, 1, 0])
        >>> masks = {"0": {"weight": mask.view(4, 1, 1, 1), "bias": mask}}
        >>> speedup = engine.ModelSpeedup(net, torch.rand(2, 1, 4, 4), masks)
        >>> _ = speedup.speedup_model()
        >>> speedup.certificate.verified, speedup.certificate.max_error < 1e-9, speedup.certificate.exact_in_train
        (True, True, True)
    """

    verified: bool = False
    max_error: float = math.nan
    tolerance: float = math.nan
    dtype: str = ""
    samples: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    compared: int = 0
    exact_in_train: bool = False
    notes: tuple[str, ...] = ()
    exact: bool = True
    entries: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return the certificate as primitives."""
        state = asdict(self)
        names = {"notes": list(self.notes), "entries": list(self.entries)}
        return state | {"shapes": [list(s) for s in self.shapes]} | names

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Certificate:
        """Load a state written by `state_dict`."""
        fields = {name: state[name] for name in cls.__dataclass_fields__ if name in state}
        fields["shapes"] = tuple(tuple(int(n) for n in s) for s in fields.get("shapes", ()))
        return cls(**{**fields, **{name: tuple(fields.get(name, ())) for name in ("notes", "entries")}})

    def __str__(self) -> str:
        otherwise = "eval mode (constants were folded, or norms changed their scale)"
        train = "train mode too" if self.exact_in_train else otherwise
        lines = [f"exact in {train}"]
        if not self.exact:
            measured = "" if math.isnan(self.max_error) else f"; the outputs differ by {self.max_error:.1e}"
            lines = [f"not exact: norms use the statistics of the remaining channels{measured}"]
        elif self.verified:
            lines = [
                f"verified: relative error {self.max_error:.1e} (tolerance {self.tolerance:.0e}, {self.dtype}) on "
                f"{self.samples} samples, outputs and {self.compared} inner tensors; {lines[0]}"
            ]
            lines += [f"entries compared: {', '.join(self.entries)}"] if self.entries else []
        else:
            lines = [f"not verified numerically; by the rules {lines[0]}"]
        return "Certificate: " + "\n  ".join([*lines, *self.notes])

    def _repr_html_(self) -> str:
        rows = [(name.replace("_", " "), value) for name, value in self.state_dict().items() if name != "notes"]
        return html.table(str(self).partition("\n")[0], ("", "verdict"), rows, self.notes)

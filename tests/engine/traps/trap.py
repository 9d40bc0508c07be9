"""What a trap is: a small network whose function an analysis could get wrong, and how a user runs it afterwards.

A trap is one idiom of public code in a network of a few channels. The network is masked, compacted with the example
input, and then run in ways that the certificate did not see: `uses`. The masked network is run in the same ways, and
whatever both leave behind has to agree. Where the engine refuses, or keeps the channels, the trap says which reason it
has to give, so that a refusal for another reason fails as well.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import EngineError
from engine.program.stored import stored_tensors
from tests.engine.exactness import Masks, channel_masks, masked, parameters, randomised

__all__ = ["Ablation", "Trap", "Use", "catalogue", "check", "not_contiguous", "once"]

Use = Callable[[nn.Module], Any]
"""Runs a network as a user would, and returns all that is observed of it: tensors and numbers in any containers."""

TOLERANCE = 1e-9


def once(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Use:
    """Return a use that calls the network once, in eval mode, on noise of a shape."""

    def use(model: nn.Module) -> Any:
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
        with torch.no_grad():
            return model.eval()(noise)

    return use


def at_other_length(name: str, source: str, make: Callable[[], nn.Module], **options: Any) -> Trap:
    """Return a trap whose code does something else for 77 rows: the example has four of three entries.

    Args:
        name, source, make: as for `Trap`.
        options: further attributes of it.
    """
    uses = [once(4, 3), once(77, 3)]
    return Trap(name, source, make, lambda model: torch.zeros(4, 3, dtype=torch.float64), uses, **options)


def not_contiguous(*shape: int) -> Use:
    """Return a use that calls the network once, in eval mode, on noise of a shape in another memory order."""

    def use(model: nn.Module) -> Any:
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        with torch.no_grad():
            return model.eval()(noise.transpose(1, 2).contiguous().transpose(1, 2))

    return use


@dataclass(frozen=True)
class Trap:
    """One idiom that an analysis could get wrong.

    Attributes:
        name: of the idiom.
        source: where public code does this: a paper, a repository, a page of documentation.
        make: builds the network; its parameters are randomised afterwards, in float64.
        example: the example input that is traced, made for one network of `make`.
        uses: runs whose results have to agree; the inputs are others than those of the certificate.
        refused: a pattern that the error matches, where the engine may refuse; None where it must not.
        kept: a pattern that the plan's notes, the certificate's, or the reasons of `not_safe_to_prune` match.
        shrinks: whether the compacted network must have fewer parameters: a trap that is whole for no reason is none;
            "repaired" where it must under repaired masks only, as constants of masked channels do not go.
        masks: gives the masks by seed; half of the channels of each layer by default.
        seeds: for the masks.
        trace: keyword arguments for `engine.trace`.
        tolerance: relative error, in float64.
        trains: runs in train mode, whose results have to agree where the certificate says that train mode is exact.
        exact_in_train: what the certificate has to say of that; None where either is right.
    """

    name: str
    source: str
    make: Callable[[], nn.Module]
    example: Callable[[nn.Module], Any]
    uses: Sequence[Use]
    refused: str | None = None
    kept: str | None = None
    shrinks: bool | str = False
    masks: Callable[[nn.Module, int], Masks] = channel_masks
    seeds: Sequence[int] = (0, 1)
    trace: Callable[[nn.Module], dict[str, Any]] | None = None
    tolerance: float = TOLERANCE
    trains: Sequence[Use] = ()
    exact_in_train: bool | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Ablation:
    """One mechanism of the engine, and a trap that catches the engine without it.

    Attributes:
        mechanism: what it does, as `docs/soundness.md` names it.
        disable: patches the engine so that it does without.
        trap: name of a trap that fails then.
        repaired: whether the trap fails under repaired masks.
    """

    mechanism: str
    disable: Callable[[pytest.MonkeyPatch], None]
    trap: str
    repaired: bool = False

    def __str__(self) -> str:
        return self.mechanism


def catalogue(attribute: str) -> list[Any]:
    """Return what all modules of this folder list under a name (``TRAPS``, ``ABLATIONS``)."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith("test_"))
    modules = [importlib.import_module(f"tests.engine.traps.{name}") for name in names]
    return [entry for module in modules for entry in getattr(module, attribute, [])]


def check(trap: Trap, *, repaired: bool) -> None:
    """Compact the network under each seed's masks, and compare it with the masked one in all uses.

    Args:
        trap: the idiom.
        repaired: whether the masks are repaired first, so that masked channels are zero and not constant.
    """
    shrunk = False
    for seed in trap.seeds:
        torch.manual_seed(seed)
        model = randomised(trap.make(), seed)
        shrunk |= _check_seed(trap, model, seed, repaired)
    must = trap.shrinks is True or (trap.shrinks == "repaired" and repaired)
    assert shrunk or not must, "nothing was removed"


def _check_seed(trap: Trap, model: nn.Module, seed: int, repaired: bool) -> bool:
    compacted = copy.deepcopy(model)
    before = {name: t.clone() for name, t in stored_tensors(compacted).items()}
    try:
        options = {} if trap.trace is None else trap.trace(compacted)
        graph = engine.trace(compacted, trap.example(compacted), **options)
        masks = trap.masks(model, seed)
        if repaired:
            masks = dict(engine.fix_mask_conflict(masks, compacted, trap.example(compacted), graph=graph))
        reference = masked(model, masks)
        speedup = engine.ModelSpeedup(compacted, trap.example(compacted), masks, confidence=2, graph=graph)
        speedup.speedup_model()
    except EngineError as error:
        assert trap.refused is not None, f"refused: {error}"
        assert re.search(trap.refused, str(error)), f"refused for another reason: {error}"
        after = stored_tensors(compacted)
        assert before.keys() == after.keys()
        assert all(_same_bits(before[name], after[name]) for name in before), "changed by a refusal"
        return False
    if trap.kept is not None:
        notes = "\n".join([*speedup.plan.notes, *speedup.certificate.notes])
        if not re.search(trap.kept, notes):
            reasons = "\n".join(engine.not_safe_to_prune(model, trap.example(model)).reasons.values())
            assert re.search(trap.kept, reasons), f"no such reason: {reasons}\n{notes}"
    exact = speedup.certificate.exact_in_train
    assert trap.exact_in_train in (None, exact), f"exact in train: {exact}; {speedup.certificate.notes}"
    for use in (*trap.uses, *(trap.trains if exact else ())):
        expected, actual = use(reference), use(compacted)
        error = difference(expected, actual)
        assert error <= trap.tolerance, f"{getattr(use, '__name__', use)}: {error:.1e}"
    return parameters(compacted) < parameters(model)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())


def difference(expected: Any, actual: Any) -> float:
    """Return the largest relative difference between two trees of tensors and numbers; infinite where they differ."""
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        return _tensors_differ(expected.detach(), actual.detach())
    if isinstance(expected, float) and isinstance(actual, float):
        return _tensors_differ(torch.tensor(expected).double(), torch.tensor(actual).double())
    if isinstance(expected, dict) and isinstance(actual, dict):
        if list(expected) != list(actual):
            return float("inf")
        return max((difference(expected[key], actual[key]) for key in expected), default=0.0)
    if isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)):
        if len(expected) != len(actual):
            return float("inf")
        return max((difference(a, b) for a, b in zip(expected, actual, strict=True)), default=0.0)
    assert isinstance(expected, (int, str, bool, type(None))), f"cannot compare a {type(expected).__name__}"
    return 0.0 if expected == actual else float("inf")


def _tensors_differ(expected: Tensor, actual: Tensor) -> float:
    if expected.shape != actual.shape:
        return float("inf")
    expected, actual = expected.double(), actual.double()
    if not torch.equal(expected.isfinite(), actual.isfinite()):
        return float("inf")
    finite = expected.isfinite()
    expected, actual = expected[finite], actual[finite]
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    gap = float((expected - actual).abs().max()) if expected.numel() else 0.0
    return gap / scale if scale else gap

"""The device and the mode that a process sets for new tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.program.defaults import callers_defaults, own_defaults

X = torch.rand(2, 1, 8, 8)
SEEN: set[str] = set()


class Net(nn.Module):
    """Two convolutions and a norm; notes the device on which its forward creates tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return pixels."""
        SEEN.add(torch.get_default_device().type)
        pixels: Tensor = self.last(self.norm(self.first(x)).relu())
        return pixels


def some_masks() -> dict[str, dict[str, Tensor]]:
    """Two of four channels."""
    kept = torch.tensor([1.0, 0.0, 1.0, 0.0])
    return {"first": {"weight": kept[:, None, None, None].expand(4, 1, 3, 3).clone()}}


def compacted(model: nn.Module, masks: Any) -> nn.Module:
    """Compact a model."""
    return engine.ModelSpeedup(model, X, masks).speedup_model()


def measured(model: nn.Module, masks: Any) -> Any:
    """Analyse the sensitivity of a model."""
    analysis = engine.SensitivityAnalysis(model, lambda: float(model(X).detach().sum()), sparsities=[0.5])
    return analysis.analysis()


CALLS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "dependency": lambda model, masks: engine.ChannelDependency(model, X).dependency_sets,
    "inputs": lambda model, masks: engine.InputChannelDependency(model, X).dependency_sets,
    "groups": lambda model, masks: engine.GroupDependency(model, X).dependency,
    "safe": lambda model, masks: engine.not_safe_to_prune(model, X),
    "repair": lambda model, masks: engine.fix_mask_conflict(masks, model, X),
    "count": lambda model, masks: engine.count_flops_params(model, X, masks=masks, verbose=False),
    "compact": lambda model, masks: compacted(model, masks).state_dict(),
    "compensate": lambda model, masks: str(engine.compensate(model, X, masks, [torch.rand(8, 1, 8, 8, device="cpu")])),
    "recalibrate": lambda model, masks: sorted(engine.recalibrate_norms(model, [X])),
    "sensitivity": measured,
}


def equal(a: Any, b: Any) -> bool:
    """Whether two results are the same, also of tensors."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


@pytest.mark.parametrize("outside", [lambda: torch.device("meta"), torch.inference_mode], ids=["device", "inference"])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "compensate"])
def test_the_results_are_the_same(name: str, outside: Callable[[], AbstractContextManager[Any]]) -> None:
    """Under a default device (on which tables of an analysis would have no entries), and in inference mode."""
    torch.manual_seed(0)
    model, other = Net().eval(), Net().eval()
    other.load_state_dict(model.state_dict())
    masks = some_masks()
    expected = CALLS[name](model, masks)
    with outside():
        result = CALLS[name](other, masks)
    assert equal(result, expected)


@pytest.mark.parametrize("name", ["compact", "compensate", "recalibrate"])
def test_parameters_can_be_trained_afterwards(name: str) -> None:
    """Those that were exchanged in inference mode are no tensors of that mode."""
    model, masks = Net().eval(), some_masks()
    with torch.inference_mode():
        CALLS[name](model, masks)
    assert not any(tensor.is_inference() for tensor in model.state_dict().values())
    model.train()(X).sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_files_are_read(tmp_path: Path, suffix: str) -> None:
    """They were called damaged, and weights that were read in inference mode could not be trained."""
    path, model = tmp_path / f"small.{suffix}", compacted(Net().eval(), some_masks())
    if suffix == "pt":
        torch.save(model.state_dict(), path)
    else:
        engine.save_safetensors(model, path)
    nets = [Net().eval() for _ in range(2)]
    with torch.device("meta"):
        engine.load_compacted_state(nets[0], path)
    with torch.inference_mode():
        engine.load_compacted_state(nets[1], path)
    assert all(equal(net.state_dict(), model.state_dict()) for net in nets)
    assert not any(p.is_inference() for p in nets[1].parameters())


def test_the_code_of_the_model_runs_with_the_callers_device() -> None:
    """In every run, as forwards rely on it: ``torch.zeros(n)``."""
    SEEN.clear()
    model, masks = Net().eval(), some_masks()
    with torch.device("meta"):
        compacted(model, masks)
        measured(model, None)
    assert {"meta"} == SEEN


def test_nested() -> None:
    """A call within the caller's code, in a call of this package, and what is as before afterwards."""
    with torch.device("meta"):
        with own_defaults(), callers_defaults():
            with own_defaults():
                assert torch.zeros(1).device.type == "cpu"
            assert torch.zeros(1).device.type == "meta"
        assert torch.zeros(1).device.type == "meta"
    with callers_defaults():
        assert torch.zeros(1).device.type == "cpu"

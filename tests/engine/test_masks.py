"""Masks as users have them, good and bad."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import engine
from engine.errors import MaskError
from engine.masks import canonical_masks, load_masks, narrowed, parameter_name
from tests.engine.exactness import masked, randomised, relative_error, run
from tests.engine.nets import Mean, dead, image, plain, snapshot, unchanged

FULL = torch.ones(6, 3, 3, 3)
BAD: dict[str, tuple[Any, str]] = {
    "unknown module": ({"conv1": {"weight": FULL}}, "'conv1'"),
    "unknown parameter": ({"0": {"kernel": FULL}}, "'kernel' of '0', which has: bias, weight"),
    "no parameters at all": ({"2": {"weight": FULL}}, "'weight' of '2', which has: none"),
    "a buffer": ({"1": {"running_mean": torch.ones(6)}}, "'running_mean' of '1'"),
    "wrong shape": ({"0": {"weight": torch.ones(6)}}, r"'0.weight' has shape \(6,\); the parameter has \(6, 3, 3, 3\)"),
    "NaN": ({"0": {"weight": FULL * float("nan")}}, "'0.weight' has entries other than 0 and 1"),
    "half": ({"0": {"weight": FULL * 0.5}}, "'0.weight' has entries other than 0 and 1"),
    "minus one": ({"0": {"bias": -torch.ones(6, dtype=torch.int64)}}, "'0.bias' has entries other than 0 and 1"),
    "infinite": ({"0": {"weight": FULL * float("inf")}}, "'0.weight' has entries other than 0 and 1"),
    "complex": ({"0": {"weight": FULL.to(torch.complex64)}}, "'0.weight' has entries other than 0 and 1"),
    "no tensor": ({"0": {"weight": [1, 0]}}, "'0.weight' is a list"),
    "a list": ([FULL], "got list"),
    "a number": (3, "got int"),
    "a flat mapping": ({"0.weight": FULL}, r"got dict with a Tensor under '0.weight': write {'0': {'weight': …}}"),
    "a mask of a module": ({"layer.0": FULL}, r"under 'layer.0': write {'layer.0': {'weight': …}}"),
    "no such file": ("/nowhere/masks.pt", "/nowhere/masks.pt"),
}


@pytest.mark.parametrize("call", ["speedup", "repair", "count"])
@pytest.mark.parametrize("name", BAD)
def test_bad_masks_are_refused_with_the_culprit(name: str, call: str) -> None:
    """By everything that takes masks; the model is as before."""
    model = plain()
    state, training = snapshot(model), model.training
    bad, message = BAD[name]
    with pytest.raises(MaskError, match=message) as caught:
        if call == "speedup":
            engine.ModelSpeedup(model, image(), bad)
        elif call == "repair":
            engine.fix_mask_conflict(bad, model, image())
        else:
            engine.count_flops_params(model, image(), verbose=False, masks=bad)
    assert isinstance(caught.value, ValueError)
    assert unchanged(model, state) and model.training == training


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)

    def __init__(self, path: str) -> None:
        self.path = path


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    """And does not run it."""
    file, trap = tmp_path / "masks.pt", tmp_path / "trap"
    torch.save({"0": {"weight": _Evil(str(trap))}}, file)
    with pytest.raises(MaskError, match="masks.pt"):
        engine.ModelSpeedup(plain(), image(), str(file))
    assert not trap.exists()


@pytest.mark.parametrize("content", [b"", b"no file of masks", b"junk", b"\x80\x02h\x05.", b"PK\x03\x04 damaged"])
def test_an_unreadable_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """With its path."""
    file = tmp_path / "masks.pt"
    file.write_bytes(content)
    with pytest.raises(MaskError, match="masks.pt"):
        load_masks(file)


def test_a_directory_is_no_mask_file(tmp_path: Path) -> None:
    """With its path."""
    with pytest.raises(MaskError, match=tmp_path.name):
        load_masks(tmp_path)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    """A tensor is not a mapping."""
    torch.save(FULL, tmp_path / "masks.pt")
    with pytest.raises(MaskError, match="got Tensor"):
        load_masks(str(tmp_path / "masks.pt"))


def test_masks_from_a_file(tmp_path: Path) -> None:
    """Give what the mapping itself gives."""
    model = plain()
    masks = dead(model, {"0": [0, 1]}, bias=True)
    torch.save(masks, tmp_path / "masks.pt")
    reference = run(masked(model, masks), image())
    engine.ModelSpeedup(model, image(), tmp_path / "masks.pt", map_location="cpu").speedup_model()
    assert relative_error(reference, run(model, image())) < 1e-9 and len(model[0].weight) < 6


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.uint16, torch.uint64, torch.int64, torch.float16, torch.float32, torch.float64],
)
def test_any_dtype_of_zeros_and_ones(dtype: torch.dtype) -> None:
    """Whatever the model's own dtype."""
    masks = {"0": {"weight": dead(plain(), {"0": [2]})["0"]["weight"].to(dtype)}}
    found = canonical_masks(masks, plain())["0.weight"]
    assert found.dtype == torch.bool and not found[2].any() and found[:2].all()


def test_expanded_masks_are_not_materialised() -> None:
    """A dimension of stride 0 stays narrow."""
    mask = torch.ones(6, 1, 1, 1).expand(6, 3, 3, 3)
    assert narrowed(mask).shape == (6, 1, 1, 1) and narrowed(FULL).shape == FULL.shape
    assert canonical_masks({"0": {"weight": mask}}, plain())["0.weight"].shape == (6, 1, 1, 1)


def test_the_root_module_is_the_empty_name() -> None:
    """For a model that is a layer, and parameters of the model itself."""
    layer = nn.Linear(3, 4)
    assert list(canonical_masks({"": {"bias": torch.ones(4)}}, layer)) == ["bias"]


def test_names_of_a_tied_parameter_share_the_product() -> None:
    """Masked under either name is masked."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    one, two = torch.ones(3, 3), torch.ones(3, 3)
    one[0], two[1] = 0, 0
    found = canonical_masks({"0": {"weight": one}, "1": {"weight": two}}, model)
    assert torch.equal(found["0.weight"].expand(3, 3), (one * two).bool()) and len(found) == 1


def test_pruned_and_parametrised_names() -> None:
    """``weight`` also means ``weight_orig`` and ``parametrizations.weight.original0``."""
    model = nn.Sequential(nn.Linear(3, 4), parametrizations.weight_norm(nn.Linear(4, 2)))
    prune.random_unstructured(model[0], "weight", 0.5)
    names = dict(model.named_parameters())
    assert parameter_name("0", "weight", names) == "0.weight_orig"
    assert parameter_name("1", "weight", names) == "1.parametrizations.weight.original0"
    assert parameter_name("1", "bias", names) == "1.bias" and parameter_name("1", "scale", names) is None


def pruned() -> nn.Module:
    """A network whose first layer is pruned by torch's own means."""
    model = randomised(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), Mean(), nn.Linear(4, 2)))
    prune.ln_structured(model[0], "weight", 0.5, n=1, dim=0)
    prune.custom_from_mask(model[0], "bias", model[0].weight_mask[:, 0, 0, 0])
    return model


def test_masks_of_torch_prune_are_read() -> None:
    """From its buffers; a model without any has none."""
    model = pruned()
    found = engine.read_masks(model)
    assert set(found) == {"0"} and set(found["0"]) == {"weight", "bias"}
    assert torch.equal(found["0"]["weight"], model[0].weight_mask)
    found["0"]["weight"].zero_()
    assert model[0].weight_mask.any()
    assert engine.read_masks(plain()) == {}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantised_mask_is_refused() -> None:
    """By its name; it has no entries that could be read."""
    mask = torch.quantize_per_tensor(dead(plain(), {"0": [2]})["0"]["weight"].float(), 1.0, 0, torch.quint8)
    with pytest.raises(MaskError, match=r"mask of '0\.weight' is of torch\.quint8"):
        canonical_masks({"0": {"weight": mask}}, plain())


@pytest.mark.parametrize("masks", ["read", "zeros", "none"])
def test_masks_of_torch_prune_are_compacted(masks: str) -> None:
    """Given as masks or found as zeros: the pruned model shrinks, computes the same, and its state stays loadable."""
    model = pruned()
    reference = run(model, image())
    given = engine.read_masks(model) if masks == "read" else None
    counted = engine.count_flops_params(model, image(), verbose=False, masks=given or engine.ZEROS)
    engine.ModelSpeedup(model, image(), given).speedup_model()
    assert model[0].out_channels == 3 and model[0].weight_orig.shape == (3, 3, 3, 3)
    assert relative_error(reference, run(model, image())) < 1e-9
    assert engine.count_flops_params(model, image(), verbose=False)[:2] == counted[:2]
    prune.remove(model[0], "weight")
    prune.remove(model[0], "bias")
    assert relative_error(reference, run(model, image())) < 1e-9


def test_masks_are_left_untouched() -> None:
    """Neither compaction nor repair nor counting writes to them."""
    model = plain()
    masks = dead(model, {"0": [0, 1]}, bias=True)
    before = {k: {n: t.clone() for n, t in v.items()} for k, v in masks.items()}
    engine.fix_mask_conflict(masks, model, image())
    engine.count_flops_params(model, image(), verbose=False, masks=masks)
    engine.ModelSpeedup(model, image(), masks).speedup_model()
    assert masks.keys() == before.keys()
    same: list[Tensor] = [t for k, v in masks.items() for n, t in v.items() if torch.equal(t, before[k][n])]
    assert len(same) == 2


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32])
def test_masks_of_whole_rows_or_columns_are_kept_small(dtype: torch.dtype) -> None:
    """Size 1 along what they do not depend on, expanded or not; a mask of single entries stays in full."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    kept = torch.tensor([1, 0, 1, 1], dtype=dtype).view(4, 1, 1, 1)
    for rows in (kept.expand(4, 3, 3, 3), kept.expand(4, 3, 3, 3).clone()):
        found = canonical_masks({"0": {"weight": rows}}, model)["0.weight"]
        assert torch.equal(found, kept.bool())
    columns = kept[:3].movedim(0, 1).expand(4, 3, 3, 3)
    assert torch.equal(
        canonical_masks({"0": {"weight": columns.clone()}}, model)["0.weight"], kept[:3].movedim(0, 1).bool()
    )
    single = torch.ones(4, 3, 3, 3, dtype=dtype)
    single[0, 1, 2, 0] = 0
    assert torch.equal(canonical_masks({"0": {"weight": single}}, model)["0.weight"], single.bool())


def test_nan_in_a_mask_is_no_uniform_row() -> None:
    """It is refused, as anything else that is not 0 or 1."""
    mask = torch.ones(4, 3)
    mask[2] = torch.nan
    with pytest.raises(MaskError, match="other than 0 and 1"):
        canonical_masks({"": {"weight": mask}}, nn.Linear(3, 4))


def test_masks_in_forms_that_few_ops_take() -> None:
    """A sparse mask and one in eight-bit floats are as good as a dense one; one without entries is refused."""
    net, mask = nn.Linear(3, 2), torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    for form in (mask.to_sparse(), mask.to(torch.float8_e4m3fn)):
        [canonical] = canonical_masks({"": {"weight": form}}, net).values()
        assert torch.equal(canonical.expand(2, 3), mask.bool())
        repaired = engine.fix_mask_conflict({"": {"weight": form}}, net, torch.rand(1, 3))
        assert torch.equal(repaired[""]["weight"].float(), mask)
    with pytest.raises(MaskError, match="meta device"):
        canonical_masks({"": {"weight": mask.to("meta")}}, net)

"""Every way of saving a compacted part of a LightningModule: it comes back as it was, or there is an error."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import LightningModule
from torch import Tensor, nn

import engine
from engine.errors import CheckpointError, EngineError


class Body(nn.Module):
    """A network with a norm that keeps the statistics of the channels that it lost."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.ReLU())
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 4) -> (N, 2)."""
        return self.head(self.block(x))


class Module(LightningModule):
    """A LightningModule around it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Body()

    def forward(self, x: Tensor) -> Tensor:
        """(N, 4) -> (N, 2)."""
        return self.model(x)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def module() -> Module:
    """One that lost half of the channels; the plan hangs on the LightningModule."""
    torch.manual_seed(0)
    own = Module().eval()
    keep = torch.arange(8) < 4
    masks = {
        "model.block.0": {"weight": keep[:, None].expand(8, 4), "bias": keep},
        "model.block.1": {"weight": keep, "bias": keep},
    }
    engine.ModelSpeedup(own, X, masks).speedup_model()
    assert own.model.head.in_features == 4
    return own


def by_state_dict(part: nn.Module, fresh: nn.Module, file: Path) -> nn.Module:
    """``torch.save`` of the weights."""
    torch.save(part.state_dict(), file)
    return engine.load_compacted_state(fresh, file)


def by_safetensors(part: nn.Module, fresh: nn.Module, file: Path) -> nn.Module:
    """The weights in the format of Hugging Face."""
    pytest.importorskip("safetensors")
    engine.save_safetensors(part, file.with_suffix(".safetensors"))
    return engine.load_compacted_state(fresh, file.with_suffix(".safetensors"))


def by_load_state_dict(part: nn.Module, fresh: nn.Module, file: Path) -> nn.Module:
    """``load_state_dict`` of a model that follows what it loads."""
    torch.save(part.state_dict(), file)
    fresh = engine.compactable(fresh)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    return fresh


def by_torch_save(part: nn.Module, fresh: nn.Module, file: Path) -> nn.Module:
    """``torch.save`` of the module itself."""
    torch.save(part, file)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


def by_pickle(part: nn.Module, fresh: nn.Module, file: Path) -> nn.Module:
    """A copy that went through pickle, as to another process."""
    return pickle.loads(pickle.dumps(part))  # type: ignore[no-any-return]


def by_copy(part: nn.Module, fresh: nn.Module, file: Path) -> nn.Module:
    """A deep copy."""
    return copy.deepcopy(part)


WAYS = [by_state_dict, by_safetensors, by_load_state_dict, by_torch_save, by_pickle, by_copy]
PARTS: dict[str, Callable[[], nn.Module]] = {"model": Body, "model.block": lambda: Body().block}


@pytest.mark.parametrize("path", PARTS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_part_comes_back(module: Module, tmp_path: Path, way: Any, path: str) -> None:
    """The same bits, and what came back can be saved and loaded once more: it has the plan."""
    part = module.get_submodule(path)
    again = way(part, PARTS[path](), tmp_path / "part.pt").eval()
    assert torch.equal(again(X), part(X))
    third = by_state_dict(again, PARTS[path](), tmp_path / "again.pt").eval()
    assert torch.equal(third(X), part(X))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_whole_comes_back(module: Module, tmp_path: Path, way: Any) -> None:
    """The LightningModule that was compacted."""
    again = way(module, Module(), tmp_path / "whole.pt").eval()
    assert torch.equal(again(X), module(X))


def test_weights_without_the_plan_are_refused(module: Module, tmp_path: Path) -> None:
    """A mapping of tensors alone, also as safetensors writes it: by a wide network, and by one narrowed by hand.

    The norm's weights would have the right shapes there, and compute something else.
    """
    bare = {name: tensor.clone() for name, tensor in module.model.state_dict().items()}
    for fresh in (Body(), Body(width=4)):
        with pytest.raises(RuntimeError, match=r"Unexpected key.*block\.1\._extra_state"):
            fresh.load_state_dict(bare)
    torch.save(bare, tmp_path / "bare.pt")
    with pytest.raises(EngineError):
        engine.load_compacted_state(Body(), tmp_path / "bare.pt")
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(module.model.state_dict(), tmp_path / "bare.safetensors")
    for fresh in (Body(), Body(width=4)):
        with pytest.raises(RuntimeError, match=r"Unexpected key.*block\.1\._extra_state"):
            fresh.load_state_dict(safetensors.load_file(tmp_path / "bare.safetensors"))
    safetensors.save_model(module.model, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"Unexpected key.*block\.1\._extra_state"):
        safetensors.load_model(Body(width=4), tmp_path / "model.safetensors")


class Holder(LightningModule):
    """A LightningModule around a model of another package."""

    def __init__(self, model: Any, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self, **inputs: Any) -> Tensor:
        """Return the model's main output."""
        return self.model(**inputs)[0]


def compacted(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """A part of a LightningModule that lost half of each group."""
    whole = Holder(model.eval(), inputs)
    free = [group for group in engine.dependency_groups(whole, inputs) if group.reason is None]
    masks = engine.group_masks(free, {group.name: torch.arange(group.size) < group.size // 2 for group in free})
    engine.ModelSpeedup(whole, inputs, masks, confidence=1).speedup_model()
    return whole.model


def copies(model: Any) -> list[Any]:
    """The model, and copies of it."""
    return [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]


def test_models_of_transformers_refuse_their_own_method(tmp_path: Path) -> None:
    """It would write the old configuration; of a model, copies, a part, the class, and with weights passed."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=8, max_position_embeddings=8)
    inputs = {"input_ids": torch.randint(3, 19, (2, 4))}
    small = compacted(transformers.BertForSequenceClassification(config), inputs)
    for model in (*copies(small), small.bert):
        with pytest.raises(CheckpointError, match="lightning_compress.save_pretrained"):
            model.save_pretrained(tmp_path / "small")
        with pytest.raises(CheckpointError, match="lightning_compress.save_pretrained"):
            model.save_pretrained(tmp_path / "small", state_dict=model.state_dict())
    with pytest.raises(CheckpointError, match="lightning_compress.save_pretrained"):
        transformers.PreTrainedModel.save_pretrained(small, tmp_path / "small")
    assert not list(tmp_path.glob("*/*.safetensors"))


def test_models_of_diffusers_refuse_their_own_method(tmp_path: Path) -> None:
    """Also where a pipeline saves them."""
    diffusers = pytest.importorskip("diffusers")
    blocks = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",), "layers_per_block": 1}
    unet = diffusers.UNet2DModel(sample_size=4, block_out_channels=(8,), norm_num_groups=2, **blocks)
    inputs = {"sample": torch.randn(1, 3, 4, 4), "timestep": torch.tensor([1])}
    small = compacted(unet, inputs)
    for model in (*copies(small), diffusers.DDPMPipeline(small, diffusers.DDPMScheduler())):
        with pytest.raises(CheckpointError, match="lightning_compress.save_pretrained"):
            model.save_pretrained(tmp_path / "small")
    with pytest.raises(CheckpointError, match="lightning_compress.save_pretrained"):
        type(small).save_pretrained(small, tmp_path / "small")
    assert not list(tmp_path.glob("**/*.safetensors"))

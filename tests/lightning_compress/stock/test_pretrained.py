"""Networks of transformers that come back by ``from_pretrained``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.errors import CheckpointError, EngineError, InputError, VerificationError
from lightning_compress import save_pretrained

transformers = pytest.importorskip("transformers")

from tests.lightning_compress.stock import models  # noqa: E402
from tests.lightning_compress.stock.models import CONFIGS, GROUPED, built, compacted, inputs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

LOAD = """
import sys, torch, transformers
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("engine", "lightning_compress"):
            raise ImportError(f"{name} is not there")
sys.meta_path.insert(0, Blocked())
for folder in sys.argv[1:]:
    saved = torch.load(folder + "/check.pt")
    model = getattr(transformers, saved["class"]).from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(**saved["inputs"]).logits
    print(float((logits - saved["logits"]).abs().max() / saved["logits"].abs().max()))
"""


def logits(model: Any) -> torch.Tensor:
    """Return the logits of the inputs."""
    with torch.no_grad():
        return model(**inputs(model)).logits


def narrowed(name: str, **fields: int) -> Any:
    """Return a network that somebody narrowed by hand."""
    cls = getattr(transformers, CONFIGS[name][0])
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    return cls(cls.config_class(**{**CONFIGS[name][1], **sizes, **fields})).eval()


@pytest.mark.slow
def test_models_come_back_in_a_process_without_this_project(tmp_path: Path) -> None:
    """Half of the heads, the neurons and the stream are gone; the outputs are within 1e-6 of the largest."""
    folders = []
    for name in CONFIGS:
        model = compacted(name)
        saved = save_pretrained(model, tmp_path / name)
        assert saved.error <= 1e-6 and saved.config, name
        note = json.loads((tmp_path / name / "lightning_compress.json").read_text())
        assert note == {"config": dict(saved.config), "error": saved.error}
        check = {"class": CONFIGS[name][0], "inputs": inputs(model), "logits": logits(model)}
        torch.save(check, tmp_path / name / "check.pt")
        folders.append(str(tmp_path / name))
    script = tmp_path / "load.py"
    script.write_text(LOAD)
    run = subprocess.run([sys.executable, "-I", str(script), *folders], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    errors = [float(text) for text in run.stdout.split()]
    assert len(errors) == len(CONFIGS) and max(errors) <= 1e-6, dict(zip(CONFIGS, errors, strict=True))


def test_the_configuration_says_heads_and_eps(tmp_path: Path) -> None:
    """Four heads of eight channels have the shapes of two heads of sixteen, and are another network."""
    saved = save_pretrained(compacted("llama"), tmp_path / "small")
    assert saved.config == {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": pytest.approx(2e-6),
    }


def test_norms_that_share_an_eps_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of queries and keys did not narrow; their eps scales no weight."""
    monkeypatch.setitem(CONFIGS, "qwen3", ("Qwen3ForCausalLM", GROUPED))
    saved = save_pretrained(compacted("qwen3"), tmp_path / "small", tolerance=1e-2)
    assert saved.config["rms_norm_eps"] == pytest.approx(2e-6)
    assert all(name.endswith(("q_norm", "k_norm")) for name in saved.shared_eps)


def test_norms_that_are_ordinary_already_may_share_an_eps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a compaction with ``plain_norms`` the eps of other norms is no scale of their weights."""
    monkeypatch.setitem(CONFIGS, "qwen3", ("Qwen3ForCausalLM", GROUPED))
    monkeypatch.setattr(models, "PLAIN", ("qwen3",))
    model = compacted("qwen3")
    with pytest.raises(VerificationError, match="One field of Qwen3ForCausalLM's configuration is the eps"):
        save_pretrained(model, tmp_path / "small")
    saved = save_pretrained(model, tmp_path / "small", tolerance=1e-2)
    assert saved.config["rms_norm_eps"] == pytest.approx(2e-6)
    assert all(name.endswith(("q_norm", "k_norm")) for name in saved.shared_eps)


def test_save_pretrained_of_transformers_is_refused(tmp_path: Path) -> None:
    """It would write the old configuration; nothing is there afterwards that could be loaded."""
    model = compacted("bert")
    with pytest.raises(CheckpointError, match="lightning_compress.save_pretrained"):
        model.save_pretrained(tmp_path / "small")
    assert not list(tmp_path.glob("*/*"))


def test_what_transformers_would_write_does_not_load(tmp_path: Path) -> None:
    """Also by the class's own method: there is nothing that ``ignore_mismatched_sizes=True`` could load wrongly.

    What `save_pretrained` of this project writes has no sizes that mismatch.
    """
    model = compacted("bert")
    with pytest.raises(CheckpointError, match="lightning_compress.save_pretrained"):
        type(model).save_pretrained(model, tmp_path / "small")
    assert not list(tmp_path.glob("*/*.safetensors"))
    save_pretrained(model, tmp_path / "small")
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path / "small", ignore_mismatched_sizes=True).eval()
    assert float((logits(again) - logits(model)).abs().max()) <= 1e-6


def test_a_hand_narrowed_configuration_does_not_pass(tmp_path: Path) -> None:
    """Exact norms say in the state dict that they span more channels: an ordinary network does not take it.

    Nor does `save_pretrained` write anything.
    """
    model = compacted("bert", plain_norms=False)
    narrow = narrowed("bert")
    with pytest.raises(RuntimeError, match=r"Unexpected key.*LayerNorm\._extra_state"):
        narrow.load_state_dict(model.state_dict())
    odd = narrow.load_state_dict(model.state_dict(), strict=False).unexpected_keys
    assert len(odd) == sum(isinstance(module, nn.LayerNorm) for module in model.modules())
    assert float((logits(narrow) - logits(model)).abs().max()) > 1e-3
    with pytest.raises(InputError, match=r"LayerNorm.*16 channels of which 8 remain.*plain_norms=True"):
        save_pretrained(model, tmp_path / "small")
    assert not list(tmp_path.iterdir())


def test_a_hand_narrowed_decoder_does_not_pass() -> None:
    """The same where a mean over the squares is written out in the code of the norm."""
    model, narrow = compacted("llama"), narrowed("llama", num_key_value_heads=1)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*input_layernorm\._extra_state"):
        narrow.load_state_dict(model.state_dict())


def test_a_hand_written_folder_is_reported(tmp_path: Path) -> None:
    """``from_pretrained`` raises no error for names that its network lacks: it lists them, and returns them."""
    safetensors = pytest.importorskip("safetensors.torch")
    model, narrow = compacted("bert", plain_norms=False), narrowed("bert")
    narrow.config.save_pretrained(tmp_path)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    safetensors.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    _, report = type(narrow).from_pretrained(tmp_path, output_loading_info=True)
    assert any(name.endswith("LayerNorm._extra_state") for name in report["unexpected_keys"])


def test_layers_that_differ_are_named(tmp_path: Path) -> None:
    """One field is the number of neurons of all layers."""
    model = compacted("llama", **{"layers.1.mlp": 6})
    with pytest.raises(InputError, match=r"mlp\.(gate|up|down)_proj.*`intermediate_size`.*one value.*uniform"):
        save_pretrained(model, tmp_path / "small")
    assert not list(tmp_path.iterdir())


def test_shapes_that_fit_prove_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that has the shapes of its class and computes a different function is refused."""
    model = compacted("llama")
    model.model.layers[0].self_attn.scaling = 1.0
    with pytest.raises(VerificationError, match="computes a different function"):
        save_pretrained(model, tmp_path / "small")
    assert not list(tmp_path.iterdir())


def test_a_directory_stays_as_it_is_where_saving_fails(tmp_path: Path) -> None:
    """What was there before is there afterwards."""
    target = tmp_path / "small"
    save_pretrained(compacted("llama"), target)
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    with pytest.raises(EngineError):
        save_pretrained(compacted("bert", plain_norms=False), target)
    assert before == {file.name: file.read_bytes() for file in target.iterdir()}


def test_the_model_stays_as_it_is(tmp_path: Path) -> None:
    """Its mode, its weights and its configuration."""
    model = compacted("llama").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_pretrained(model, tmp_path / "small")
    assert model.training and model.config.hidden_size == 16
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_whole_model_is_saved_as_it_is(tmp_path: Path) -> None:
    """Nothing changes in the configuration of a model that was not compacted."""
    saved = save_pretrained(built("llama"), tmp_path / "whole")
    assert saved.config == {} and saved.error == 0.0


def test_a_processor_goes_along(tmp_path: Path) -> None:
    """It is saved beside the weights."""

    class Processor:
        def save_pretrained(self, folder: str) -> None:
            Path(folder, "tokenizer.json").write_text("{}")

    save_pretrained(compacted("llama"), tmp_path / "small", processor=Processor())
    assert (tmp_path / "small" / "tokenizer.json").read_text() == "{}"


def test_other_networks_are_refused(tmp_path: Path) -> None:
    """There is no configuration; the message says what to call or which part to pass."""
    with pytest.raises(InputError, match="save_stock"):
        save_pretrained(nn.Sequential(nn.Linear(1, 1)), tmp_path / "small")
    with pytest.raises(InputError, match="Pass its submodule '0'"):
        save_pretrained(nn.Sequential(built("llama")), tmp_path / "small")

"""The run over the architectures of transformers and what its page makes of the rows."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from torch import nn
from transformers import BertConfig, LlamaConfig, Qwen2VLTextConfig

from benchmarks import architectures, modalities

ROW: dict[str, Any] = {
    "architecture": "bert",
    "inputs": ["input_ids"],
    "error": 1e-16,
    "parameters": [74_000, 21_000],
    "macs": [2e6, 5e5],
    "predicted": True,
    "seconds": 0.5,
    "stays": {"is an output of the model": 1},
}


def test_the_page() -> None:
    """A row per architecture that runs, a list of those that do not, how many are exact, and why groups stay."""
    wrong = ROW | {"architecture": "net", "error": 1e-3, "stays": {"mean (nets/net.py) runs over it": 2}}
    refused = {"architecture": "odd", "refused": "TraceError: a | b"}
    absent = {"architecture": "none", "not run": "ImportError: no package"}
    late = {"architecture": "slow", "failed": "took longer than 9 s"}
    text = architectures.page([ROW, wrong, refused, late, absent])
    told = text.replace("\n", " ")
    assert "Of 4 architectures that run on random inputs, 1 are exact, 1 refused, 1 failed and 1 timed out" in told
    assert "; 1 were not run." in told
    assert "| bert | input_ids | exact | 1e-16 | 74 → 21 | 28% | 0.5 |" in text
    assert "| net | input_ids | relative error 1.0e-03 |" in text
    assert "| odd | | refused: TraceError: a \\| b | | | | |" in text
    assert "| is an output of the model | 1 |" in text and "| mean runs over it | 1 |" in text
    assert "| none | ImportError: no package |" in text


def test_small_configurations() -> None:
    """Sizes are small and fit, and parts and identifiers of tokens do so too."""
    config = architectures.shrunk(LlamaConfig)
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (64, 4, 2)
    assert (config.num_hidden_layers, config.intermediate_size, config.vocab_size) == (2, 96, 99)
    few = architectures.shrunk(BertConfig, only=r".*(layers|vocab_size)")
    assert (few.hidden_size, few.num_hidden_layers, few.vocab_size) == (768, 2, 99)
    several = architectures.shrunk(Qwen2VLTextConfig)
    assert len(several.layer_types) == several.num_hidden_layers == 2
    assert architectures.small("eos_token_id", 50256) == 90 and architectures.small("depths", (3, 2)) == (1, 1)


def test_all_is_random() -> None:
    """What is one number everywhere is no longer, and what is tiny is large enough to show."""
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
    with torch.no_grad():
        model[1].weight.normal_(0, 0.001)
        model[1].bias.zero_()
    architectures.stirred(model)
    assert all(float(p.detach().std()) > 0.05 for p in model.parameters())


def test_what_would_be_rounded_is_not() -> None:
    """A norm that computes in float32 does so in float64."""
    with modalities.Wide():
        assert torch.ones(2, dtype=torch.float64).to(torch.float32).dtype == torch.float64
        assert torch.ones(2).to(torch.float16).dtype == torch.float16


def test_an_architecture_that_is_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Is named, with those that there are."""
    monkeypatch.setattr("sys.argv", ["architectures.py", "bert-large"])
    with pytest.raises(SystemExit):
        architectures.main()
    assert "transformers has no architecture bert-large; it has" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["bert", "gpt2", "llama", "phi", "phi3", "falcon", "bart", "t5", "vit", "convnext", "dinov3_vit", "llava", "clip"],
)
def test_small_models(name: str) -> None:
    """Exact, and more than half of the parameters gone, but where an option hands out the stream."""
    dtype = torch.get_default_dtype()
    try:
        row = architectures.check(name)
    finally:
        torch.set_default_dtype(dtype)
    assert architectures.verdict(row) == "exact"
    assert row["parameters"][1] < (0.8 if name == "falcon" else 0.5) * row["parameters"][0]
    assert name != "llava" or row["inputs"] == ["input_ids", "pixel_values"]

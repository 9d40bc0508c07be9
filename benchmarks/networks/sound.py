"""Speech, separation of sources, and speakers."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from benchmarks.networks.network import Network, integers, noise

__all__ = ["NETWORKS"]


def _call(module: str, name: str, *args: Any, **options: Any) -> nn.Module:
    net: nn.Module = getattr(importlib.import_module(module), name)(*args, **options)
    return net


_TASNET = {"n_blocks": 2, "n_repeats": 1, "bn_chan": 16, "hid_chan": 24, "skip_chan": 16, "n_filters": 32}


def _lengths(batch: int) -> tuple[Any, ...]:
    return noise(20, 16)(batch), torch.full((batch,), 20)


def _whisper() -> nn.Module:
    model = importlib.import_module("whisper.model")
    sizes = model.ModelDimensions(
        n_mels=8, n_audio_ctx=16, n_audio_state=32, n_audio_head=4, n_audio_layer=2,
        n_vocab=40, n_text_ctx=12, n_text_state=32, n_text_head=4, n_text_layer=2,
    )  # fmt: skip
    net: nn.Module = model.Whisper(sizes)
    return net


def _speech_and_text(batch: int) -> tuple[Any, ...]:
    return noise(8, 32)(batch).float(), integers(40, 6)(batch)


_WAV2VEC2 = {
    "extractor_mode": "layer_norm",
    "extractor_conv_layer_config": [(16, 10, 5), (16, 3, 2)],
    "extractor_conv_bias": True,
    "encoder_embed_dim": 32,
    "encoder_projection_dropout": 0.0,
    "encoder_pos_conv_kernel": 8,
    "encoder_pos_conv_groups": 4,
    "encoder_num_layers": 2,
    "encoder_num_heads": 4,
    "encoder_attention_dropout": 0.0,
    "encoder_ff_interm_features": 48,
    "encoder_ff_interm_dropout": 0.0,
    "encoder_dropout": 0.0,
    "encoder_layer_norm_first": True,
    "encoder_layer_drop": 0.0,
    "aux_num_out": 5,
}

NETWORKS = [
    Network("asteroid", "ConvTasNet", lambda: _call("asteroid.models", "ConvTasNet", 2, **_TASNET), noise(400)),
    Network(
        "asteroid",
        "DPRNNTasNet",
        lambda: _call(
            "asteroid.models", "DPRNNTasNet", 2, n_filters=16, bn_chan=16, hid_size=12, chunk_size=10, n_repeats=1
        ),
        noise(400),
    ),
    Network(
        "asteroid",
        "SuDORMRFNet",
        lambda: _call("asteroid.models", "SuDORMRFNet", 2, bn_chan=16, num_blocks=1, upsampling_depth=2, n_filters=32),
        noise(800),
    ),
    Network(
        "torchaudio", "Conformer", lambda: _call("torchaudio.models", "Conformer", 16, 4, 24, 2, 7), _lengths, (2, 3)
    ),
    Network(
        "torchaudio",
        "Emformer",
        lambda: _call("torchaudio.models", "Emformer", 16, 4, 24, 2, 4, right_context_length=0),
        _lengths,
        (2, 3),
    ),
    Network(
        "torchaudio",
        "ConvTasNet",
        lambda: _call("torchaudio.models", "ConvTasNet", 2, 16, 32, 3, 16, 24, 2, 1),
        noise(1, 400),
    ),
    Network(
        "torchaudio", "Wav2Letter", lambda: _call("torchaudio.models", "Wav2Letter", 8, "mfcc", 16), noise(16, 100)
    ),
    Network("torchaudio", "DeepSpeech", lambda: _call("torchaudio.models", "DeepSpeech", 8, 32, 5), noise(1, 12, 8)),
    Network("torchaudio", "Wav2Vec2", lambda: _call("torchaudio.models", "wav2vec2_model", **_WAV2VEC2), noise(800)),
    Network(
        "torchaudio",
        "WaveRNN",
        lambda: _call("torchaudio.models", "WaveRNN", (2, 2), 16, 4, 1, 16, 16, 5, 8, 24, 16),
        lambda b: (noise(1, 16)(b), noise(1, 8, 8)(b)),
    ),
    Network("openai-whisper", "Whisper", _whisper, _speech_and_text, dtype=torch.float32),
    Network(
        "speechbrain",
        "ECAPA_TDNN",
        lambda: _call(
            "speechbrain.lobes.models.ECAPA_TDNN",
            "ECAPA_TDNN",
            16,
            channels=[32, 32, 32, 32, 96],
            attention_channels=16,
            lin_neurons=24,
            res2net_scale=4,
            se_channels=16,
        ),
        noise(30, 16),
        (2, 3),
    ),
    Network(
        "speechbrain",
        "Xvector",
        lambda: _call(
            "speechbrain.lobes.models.Xvector",
            "Xvector",
            in_channels=16,
            tdnn_channels=[32, 32, 32, 32, 48],
            lin_neurons=24,
        ),
        noise(30, 16),
        (2, 3),
    ),
    Network(
        "resemblyzer", "VoiceEncoder", lambda: _call("resemblyzer", "VoiceEncoder", "cpu", verbose=False), noise(20, 40)
    ),
    Network("torchcrepe", "Crepe tiny", lambda: _call("torchcrepe.model", "Crepe", "tiny"), noise(1024)),
    Network(
        "conformer",
        "Conformer",
        lambda: _call("conformer", "Conformer", 32, depth=2, dim_head=8, heads=4),
        noise(10, 32),
    ),
    Network(
        "demucs",
        "Demucs",
        lambda: _call("demucs.demucs", "Demucs", ["a", "b"], channels=8, depth=2, lstm_layers=1, dconv_mode=0),
        noise(2, 2048),
    ),
]

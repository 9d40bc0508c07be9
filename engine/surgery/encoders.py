"""A `nn.TransformerEncoder` without torch's fused layers, which read a layer's weights without calling its modules.

With a padding mask, in eval mode and without gradients, torch's encoder packs the tokens, passes them to one fused op
per layer, and returns zeros for padding. The fused op supports neither a changed number of heads nor norms that keep
the statistics of removed channels. Once a layer contains such modules, the encoder calls its layers as written and
fills in zeros where torch would.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.transformer import _detect_is_causal_mask, _get_seq_len

__all__ = ["PaddedEncoder", "RecordedEncoder", "unfused"]


class PaddedEncoder(nn.TransformerEncoder):
    """An encoder that calls its layers one by one and fills in zeros for padding where torch does."""

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Return tokens like `nn.TransformerEncoder`."""
        padding = F._canonical_mask(
            src_key_padding_mask, "src_key_padding_mask", F._none_or_dtype(mask), "mask", src.dtype
        )
        mask = F._canonical_mask(mask, "mask", None, "", src.dtype, False)
        causal = _detect_is_causal_mask(mask, is_causal, _get_seq_len(src, self.layers[0].self_attn.batch_first))
        output = src
        for layer in self.layers:
            output = layer(output, src_mask=mask, is_causal=causal, src_key_padding_mask=padding)
        if padding is not None and mask is None and self.zeroes(src, padding):
            output = output.masked_fill(padding.ne(0).unsqueeze(-1), 0.0)
        return output if self.norm is None else self.norm(output)

    def zeroes(self, src: Tensor, padding: Tensor) -> bool:
        """Whether torch would pack the tokens of this call."""
        first = self.layers[0]
        packs = self.use_nested_tensor and not first.training and src.dim() == 3 and not src.is_nested
        if not packs or not torch.backends.mha.get_fastpath_enabled() or torch.is_autocast_enabled():
            return False
        if torch.is_grad_enabled() and (src.requires_grad or any(p.requires_grad for p in first.parameters())):
            return False
        return not self.mask_check or torch._nested_tensor_from_mask_left_aligned(src, padding.logical_not())


class RecordedEncoder(PaddedEncoder):
    """An encoder for recording: in eval mode, a padding mask always leads to zeros, whatever the data."""

    def zeroes(self, src: Tensor, padding: Tensor) -> bool:
        """Whether torch may pack the tokens of a call like this one."""
        return self.use_nested_tensor and not self.layers[0].training and src.dim() == 3


def unfused(
    modules: Mapping[str, nn.Module], exchanged: Collection[str]
) -> Iterator[tuple[nn.Module, type[nn.Module], dict[str, Any]]]:
    """Yield modules that must not take a fused path, with the class and attributes that prevent it.

    Args:
        modules: modules of the model by name.
        exchanged: names of modules whose class has been exchanged.
    """

    def holds(name: str) -> bool:
        return any(inner.startswith(f"{name}." if name else "") for inner in exchanged)

    for name, module in modules.items():
        if isinstance(module, nn.TransformerEncoderLayer) and holds(name):
            yield module, type(module), {"activation_relu_or_gelu": 0}
        elif type(module) is nn.TransformerEncoder and holds(name):
            yield module, PaddedEncoder, {}
        elif isinstance(module, nn.TransformerEncoder) and type(module) is not PaddedEncoder and holds(name):
            yield module, type(module), {"use_nested_tensor": False}

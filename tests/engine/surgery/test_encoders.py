"""Stock encoders whose layers are no longer torch's own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from engine.surgery.encoders import PaddedEncoder, unfused


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_it_computes_what_the_stock_encoder_does(left: bool) -> None:
    """With zeros for padding exactly where torch puts them."""
    stock = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2).double().eval()
    own = copy.deepcopy(stock)
    own.__class__ = PaddedEncoder
    x, padding = torch.randn(2, 5, 8).double(), torch.arange(5) >= torch.tensor([[3], [5]])
    padding = padding if left else padding.flip(1)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            one, other = (model(x, src_key_padding_mask=padding) for model in (stock, own))
        torch.testing.assert_close(one, other)
        assert bool((one[padding] == 0).all()) == (left and not grad)


def test_only_what_holds_an_exchanged_module_is_unfused() -> None:
    """The layer and its encoder, and no other layer."""
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2)
    modules = dict(net.named_modules())
    changes = list(unfused(modules, ["layers.1.self_attn"]))
    assert [module for module, *_ in changes] == [net, net.layers[1]]
    assert changes[0][1] is PaddedEncoder and changes[1][2] == {"activation_relu_or_gelu": 0}
    assert not list(unfused(modules, []))

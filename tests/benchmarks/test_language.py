"""Language models without weights, in their shapes but with two layers."""

from __future__ import annotations

import pytest

from benchmarks import language

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", [name for name in language.SHAPES if not name.startswith("Mixtral")])
def test_heads_neurons_and_the_stream_go(name: str) -> None:
    """Half of each group leaves a quarter of what is not the vocabulary, and that is predicted exactly."""
    model = language.build(name, num_hidden_layers=2, vocab_size=64)
    assert all(p.is_meta for p in model.parameters())
    found = language.planned(model)
    before, after = found["parameters"]
    assert found["groups"] == [5, 6] and 0.2 < after / before < 0.3
    assert found["macs"][1] < 0.3 * found["macs"][0]


def test_experts_go_beside_heads_and_the_stream() -> None:
    """What a router chooses among stays, one group per layer."""
    found = language.planned(language.build("Mixtral 8 x 7 B", num_hidden_layers=2, vocab_size=64))
    before, after = found["parameters"]
    assert found["groups"] == [5, 8] and 0.2 < after / before < 0.3
    assert found["macs"][1] < 0.3 * found["macs"][0]
    assert sum("softmax" in reason for reason in found["stays"]) == 2 and len(found["stays"]) == 3

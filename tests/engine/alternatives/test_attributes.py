"""Attributes that code sets later are recorded at other values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import engine
from engine.alternatives.attributes import Attribute, Settings


class Gate(nn.Module):
    """A branch behind a number, a switch, a counter and a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.alpha, self.flag, self.step, self.mode, self.unused = 0.0, False, 0, None, 0.0
        self.period, self.fixed = 5, 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Run the branch as its attributes say."""
        y = self.stem(x)
        if self.flag:
            y = y.tanh()
        if self.step > 2 * self.period:
            y = y.sigmoid()
        if self.mode is not None:
            y = y.relu()
        return self.head(y * 2.0 + self.alpha * self.body(y) + self.fixed)  # type: ignore[no-any-return]

    def update(self, alpha: float) -> None:
        """Set what a callback would."""
        self.alpha, self.flag, self.mode, self.unused = alpha, True, None, 1.0
        self.step += 1


def _state(model: nn.Module) -> dict[str, object]:
    return {name: value for name, value in vars(model).items() if not name.startswith("_")}


def test_what_code_sets_varies_and_other_ways_are_recorded() -> None:
    """A number varies, a switch and a counter have both ways; the model is left as it was."""
    model = Gate()
    before = _state(model)
    graph = engine.trace(model, torch.zeros(2, 3))
    ops = {node.op for node in graph.nodes}
    assert {"tanh", "sigmoid"} <= ops
    assert "relu" not in ops
    [scaled] = [n for n in graph.nodes if n.path == "eval" and n.op == "mul" and 0.0 in n.args.values()]
    assert scaled.index in {index for index, _ in graph.varying}
    [doubled] = [n for n in graph.nodes if n.path == "eval" and n.op == "mul" and 2.0 in n.args.values()]
    assert doubled.index not in {index for index, _ in graph.varying}
    assert _state(model) == before
    assert "alpha" not in vars(Gate)


def test_what_cannot_be_recorded_is_named() -> None:
    """None has no other value: a note names the attribute that is read."""
    [note] = [note for note in engine.trace(Gate(), torch.zeros(2, 3)).notes if "later" in note]
    assert "Gate.mode" in note
    assert "unused" not in note


def test_declared_attributes_stay() -> None:
    """Names in `constants` are taken as they are."""
    graph = engine.trace(Gate(), torch.zeros(2, 3), constants=["alpha", "flag", "step", "mode"])
    assert not graph.varying
    assert {node.path for node in graph.nodes} == {"eval"}
    assert not graph.notes


def test_attributes_that_are_not_read_are_left() -> None:
    """What the body does not read is not recorded again; a probability stays one."""
    module = Gate()
    settings = Settings([Attribute("", module, name) for name in ("alpha", "flag", "unused")], {"": module})
    with settings.watching():
        assert module.alpha == 0.0
        assert hasattr(module, "flag")
    assert [[(str(a), value) for a, value in s] for s in settings.others([])] == [
        [("alpha", 0.25)],
        [("alpha", 1.0)],
        [("flag", True)],
    ]


def test_settings_that_fail_together_are_tried_one_by_one() -> None:
    """Only what fails alone is missing."""
    module = Gate()
    settings = Settings([Attribute("", module, name) for name in ("alpha", "fixed")], {"": module})
    with settings.watching():
        assert module.alpha == module.fixed

    def accepts(setting: object) -> bool:
        return [str(attribute) for attribute, _ in setting] == ["fixed"]  # type: ignore[attr-defined]

    assert settings.record([], accepts) == ["Gate.alpha"]


class Words(nn.Module):
    """Embeddings of which a method sets the padding, as methods do that resize vocabularies."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.table, self.head, self.counts = nn.Embedding(9, 4), nn.Linear(4, 2), counts

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, T) -> (N, 2)."""
        padding = self.table.padding_idx if self.counts else 0
        words = self.table(tokens)
        return self.head(words.mean(1) if padding is None else words[:, padding])  # type: ignore[no-any-return]

    def set_padding(self, index: int) -> None:
        """Set what an embedding takes for padding."""
        self.table.padding_idx = index


def test_what_only_gradients_depend_on_is_not_recorded_otherwise() -> None:
    """An embedding reads its padding for its gradient; other code that reads it may do otherwise."""
    tokens = torch.zeros(2, 3, dtype=torch.long)
    assert not engine.trace(Words(counts=False), tokens).notes
    assert any("Embedding.padding_idx" in note for note in engine.trace(Words(counts=True), tokens).notes)


class Pools(nn.Module):
    """Summarises by a text that code sets, and compares with words."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.pool = nn.Linear(4, 4), "avg"

    def reset(self, pool: str) -> None:
        """Summarise otherwise."""
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean over tokens, or the first one."""
        x = self.body(x)
        return x.mean(1) if self.pool == "avg" else x[:, 0]


def test_a_text_that_is_compared_with_words() -> None:
    """What runs with another text is recorded."""
    graph = engine.trace(Pools(), torch.zeros(2, 3, 4))
    assert {"mean", "select"} <= {node.op for node in graph.nodes}

"""Modules whose class was exchanged go wherever the original goes."""

from __future__ import annotations

import abc
import copy
import inspect
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.compaction.history import history
from engine.surgery.classes import derived, legible
from tests.engine import golden


class Abstract(nn.Module, abc.ABC):
    """Has a metaclass of its own."""


def doubled(cls: type[nn.Module], factor: int) -> type[nn.Module]:
    """A subclass that multiplies."""
    return derived(cls, {"forward": lambda self, x: factor * x}, doubled, factor)


@pytest.mark.parametrize("cls", [nn.Identity, Abstract])
def test_made_classes_pickle(cls: type[nn.Module]) -> None:
    """Class and instance go through pickle and deepcopy; the name is that of the base class."""
    module = cls()
    module.__class__ = doubled(cls, 3)
    for other in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        assert other(torch.ones(1)) == 3 and isinstance(other, cls) and repr(other) == repr(cls())
    made = pickle.loads(pickle.dumps(type(module)))
    assert issubclass(made, cls) and made.__qualname__ == cls.__qualname__


def compacted(name: str) -> tuple[nn.Module, Tensor]:
    """A network with exchanged classes, and an input of another batch size than it was compacted with."""
    model, x = golden.made(name)
    engine.load_compacted_state(model, golden.FOLDER / f"{name}-2.golden")
    assert name == "convolutional" or any(
        type(m) is not type(o) for m, o in zip(model.modules(), golden.made(name)[0].modules(), strict=True)
    )
    return model.eval(), torch.cat([x, x[:1]])


@pytest.mark.parametrize("name", golden.NETWORKS)
def test_whole_models_pickle(name: str) -> None:
    """Pickled, saved as a whole and deep-copied, a compacted network puts out the same bits, and remembers."""
    model, x = compacted(name)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), model(x)) and len(history(other)) == 1


def test_annotations_are_not_evaluated() -> None:
    """Their names may be there for a type checker only; they stay in the text that is read, and in the function."""

    def plain(x: Unknown) -> Unknown:  # type: ignore[name-defined] # noqa: F821
        return x

    made = legible("def plain(x: Unknown) -> Unknown:\n    return x + 1", "label", plain)  # type: ignore[arg-type]
    assert made(1) == 2 and made.__annotations__ == {"x": "Unknown", "return": "Unknown"}
    assert "x: Unknown" in inspect.getsource(made)


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")  # and many ship with it
@pytest.mark.parametrize("name", golden.NETWORKS)
def test_torchscript(name: str, tmp_path: Path) -> None:
    """Pinned forwards, norms that span what was removed, and attention without fixed sizes are read by TorchScript."""
    model, x = compacted(name)
    torch.jit.script(model).save(tmp_path / "m.pt")
    assert torch.equal(torch.jit.load(tmp_path / "m.pt")(x), model(x))


@pytest.mark.parametrize("name", golden.NETWORKS)
def test_exported_program(name: str) -> None:
    """`torch.export` takes them at any batch size, and so does the compiler in one graph."""
    model, x = compacted(name)
    program = torch.export.export(model, (x[:2],), dynamic_shapes=({0: torch.export.Dim("n", min=1, max=9)},))
    torch.testing.assert_close(program.module()(x), model(x))
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x))


def test_taken_back_after_a_second_compaction() -> None:
    """A network whose pinned module was pinned anew pickles with its history, and grows back."""
    model, x = golden.made("attention")
    expected, state = model(x), copy.deepcopy(model.state_dict())
    for rows in ([0, 1, 8, 9, 16, 17], [0, 1, 6, 7, 12, 13]):
        mask = torch.ones(model[1].qkv.weight.shape)
        mask[rows] = 0
        engine.ModelSpeedup(model, x, {"1.qkv": {"weight": mask, "bias": mask[:, 0]}}).speedup_model()
    other = pickle.loads(pickle.dumps(model))
    assert len(history(other)) == 2 and torch.equal(other(x), model(x))
    with pytest.warns(UserWarning, match="grows back"):
        other.load_state_dict(state)
    assert torch.equal(other(x), expected) and type(other[1]) is golden.HandAttention

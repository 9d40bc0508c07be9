"""Which runs a verdict rests on, and in which dtype."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import engine
from engine.errors import VerificationError
from engine.proof import Trial, check_shapes, masked_tensors, random_inputs
from engine.slices import Slice
from tests.engine.exactness import masked, run
from tests.engine.nets import Net, analysis_of, dead, image, plain, snapshot, unchanged


def verdict(model: nn.Module, example: object, rows: dict[str, list[int]], **arguments: object) -> engine.Certificate:
    """Compact, and return the certificate."""
    speedup = engine.ModelSpeedup(model, example, dead(model, rows, bias=True), **arguments)
    speedup.speedup_model()
    return speedup.certificate


def test_a_float32_model_is_verified_in_float64() -> None:
    """At the example's size and at a larger one, with the asked number of samples."""
    found = verdict(plain().float(), image(dtype=torch.float32), {"0": [0, 1]}, confidence=5)
    assert found.verified and found.dtype == "float64" and found.max_error <= 1e-9 == found.tolerance
    assert found.shapes == ((5, 3, 6, 6), (2, 3, 12, 12)) and found.samples == 7 and found.compared == 5


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_half_precision_models(dtype: torch.dtype, bound: float) -> None:
    """Stay in their dtype, shrink, are verified in float64, and agree up to rounding."""
    model = plain().to(dtype)
    x = image(dtype=dtype)
    masks = dead(model, {"0": [0, 1, 2]})
    reference = run(masked(model, masks), x)[0]
    speedup = engine.ModelSpeedup(model, x, masks)
    speedup.speedup_model()
    assert all(p.dtype == dtype for p in model.parameters()) and len(model[0].weight) == 4
    assert speedup.certificate.verified and speedup.certificate.max_error < 1e-9
    assert float((run(model, x)[0] - reference).abs().max()) <= bound * float(reference.abs().max())


def test_a_model_that_needs_its_own_dtype() -> None:
    """Where float64 does not run, the model's own dtype is used, and the notes say so."""

    def forward(m: Net, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("Only float32 runs here.")
        return m.head(torch.relu(m.conv(x)).mean((2, 3)))

    model = Net(forward, conv=nn.Conv2d(3, 6, 1), head=nn.Linear(6, 2))
    found = verdict(model, image(dtype=torch.float32), {"conv": [0, 1]})
    assert found.verified and found.dtype == "float32" and found.tolerance == 1e-4
    assert any("float64" in note for note in found.notes)


def test_a_model_of_one_size_only() -> None:
    """A flatten fixes the resolution: the larger run is noted as not compared, the rest is verified."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(144, 2)).double()
    found = verdict(model, image(), {"0": [0]})
    assert found.verified and found.shapes == ((8, 3, 6, 6),)
    assert any("larger resolution" in note for note in found.notes)


def test_weights_are_masked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many inputs the model rejects, there is one float64 copy of its weights at a time."""
    made = []

    def counted(*args: object) -> dict[str, Tensor]:
        made.append(args[-1])
        return masked_tensors(*args)

    monkeypatch.setattr("engine.proof.masked_tensors", counted)
    model = Net(lambda m, x: m.head(torch.relu(m.stem(x)).flatten(1)), stem=nn.Conv2d(3, 4, 1), head=nn.Linear(144, 2))
    found = verdict(model, image(dtype=torch.float32), {"stem": [0]})
    assert found.verified and any("larger" in note for note in found.notes) and made == [torch.float64]


def test_a_model_of_one_batch_size_only() -> None:
    """The example's batch size is used where another does not run."""

    def forward(m: Net, x: Tensor) -> Tensor:
        assert len(x) == 2
        return m.head(m.conv(x).mean((2, 3)))

    model = Net(forward, conv=nn.Conv2d(3, 6, 1), head=nn.Linear(6, 2)).double()
    found = verdict(model, image(), {"conv": [0, 1]})
    assert found.verified and found.shapes[0] == (2, 3, 6, 6)


def test_a_model_that_runs_on_no_random_input_is_refused() -> None:
    """Nothing can be proved, so nothing is changed."""
    example = image()

    def forward(m: Net, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and type(x) is Tensor and not torch.equal(x, example):
            raise ValueError("only the example will do")
        return m.head(m.conv(x).mean((2, 3)))

    model = Net(forward, conv=nn.Conv2d(3, 6, 1), head=nn.Linear(6, 2)).double()
    state = snapshot(model)
    with pytest.raises(VerificationError, match="no random input.*only the example will do"):
        verdict(model, example, {"conv": [0, 1]})
    assert unchanged(model, state)


def test_random_inputs_are_like_the_example() -> None:
    """Floating ones with its mean and deviation, at another batch size and resolution; integers are repeated."""
    example = (image(8) * 3 + 5, {"index": torch.tensor([3, 1]), "scale": torch.ones(4)})
    graph = engine.trace(
        Net(lambda m, x, extra: m.conv(x) * extra["scale"].sum(), conv=nn.Conv2d(3, 4, 1)).double(), example
    )
    (x, extra), keywords = random_inputs(graph, Trial(5, False, torch.float64), 0)
    assert x.shape == (5, 3, 8, 8) and abs(float(x.mean()) - 5) < 0.5 and abs(float(x.std()) - 3) < 0.5
    assert extra["index"].tolist() == [3, 1, 3, 1, 3] and extra["scale"].shape == (4,) and keywords == {}
    assert random_inputs(graph, Trial(None, True, None), 0)[0][0].shape == (2, 3, 16, 16)


def test_masked_tensors_are_the_masked_model() -> None:
    """Parameter times mask, by canonical name, in the asked dtype; the model is untouched."""
    model = plain().float()
    graph = engine.trace(model, image(dtype=torch.float32))
    masks = {"0.weight": torch.tensor([0, 1, 1, 1, 1, 1]).bool().view(6, 1, 1, 1)}
    found = masked_tensors(model, graph, masks, torch.float64)
    assert found["0.weight"].dtype == torch.float64 and not found["0.weight"][0].any() and model[0].weight[0].any()
    assert all(t.dtype == torch.float64 for t in found.values() if t.is_floating_point())


def test_trials_can_be_read() -> None:
    """For the notes."""
    assert str(Trial(8, True, torch.float64)) == "at a larger resolution, batch size 8, float64"
    assert "the example's batch size, the model's own dtype" in str(Trial(None, False, None))


def test_the_stored_weights_are_the_verified_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A swap that stores something else is an error, and the model is as it was."""
    model = plain().float()
    state = snapshot(model)
    apply = Slice.apply
    monkeypatch.setattr(Slice, "apply", lambda cut, tensor: apply(cut, tensor) * (1 + (tensor.dtype == torch.float32)))
    with pytest.raises(VerificationError, match="does not hold the verified weights"):
        verdict(model, image(dtype=torch.float32), {"0": [0, 1]})
    assert unchanged(model, state)


def test_random_numbers_of_the_forward_are_drawn_alike() -> None:
    """A forward that draws numbers of a fixed shape is comparable: both models see the same ones."""
    model = Net(
        lambda m, x: m.head(torch.tanh(m.conv(x) + torch.randn(1).to(x)).mean((2, 3))),
        conv=nn.Conv2d(3, 6, 1),
        head=nn.Linear(6, 2),
    ).double()
    columns = torch.ones(2, 6)
    columns[:, :2] = 0
    speedup = engine.ModelSpeedup(model, image(), {"head": {"weight": columns}})
    speedup.speedup_model()
    assert speedup.certificate.verified and model.conv.out_channels == 4


def test_a_list_of_pictures_is_compared_as_it_is() -> None:
    """It is no batch that could be larger: the runs are those of the example's number, in float64, at a larger size."""

    def forward(m: Net, pictures: list[torch.Tensor]) -> torch.Tensor:
        mean = torch.tensor([0.1, 0.2, 0.3]).to(pictures[0])[:, None, None]
        stacked = torch.stack([picture - mean for picture in pictures])
        return m.head(torch.relu(m.conv(stacked)).mean((2, 3)))

    model = Net(forward, conv=nn.Conv2d(3, 6, 3), head=nn.Linear(6, 2))
    pictures = ([torch.rand(3, 64, 64), torch.rand(3, 64, 64)],)
    speedup = engine.ModelSpeedup(model, pictures, dead(model, {"conv": [0, 1]}), confidence=2)
    speedup.speedup_model()
    assert model.conv.out_channels == 4 and speedup.certificate.dtype == "float64"
    assert speedup.certificate.shapes == ((3, 64, 64), (3, 64, 96)) and speedup.certificate.max_error < 1e-12


class Trains(nn.Module):
    """Takes another way while it trains; ``extra`` says what it does there."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.extra = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 2, 3), ""

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, (batch, 2)."""
        x = self.stem(x)
        if self.training and self.extra == "copy":
            x = x.clone()
        if self.training and self.extra == "layer":
            x = x + self.stem(F.pad(x[:, :3], (1, 1, 1, 1)))
        return self.head(x.relu()).mean((2, 3))


@pytest.mark.parametrize(("before", "after"), [("", "copy"), ("copy", ""), ("", "layer"), ("layer", "")])
def test_what_runs_while_training(before: str, after: str) -> None:
    """A copy more or less in train mode is the same way through the layers; a layer more or less is not."""
    model = Trains()
    model.extra = before
    analysis = analysis_of(model, torch.randn(2, 3, 8, 8), {})
    model.extra = after
    if "layer" in (before, after):
        with pytest.raises(VerificationError, match="another path"):
            check_shapes(model, analysis)
    else:
        check_shapes(model, analysis)

"""Which runs a verdict rests on, and in which dtype."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.compaction import compact
from engine.errors import VerificationError
from engine.running.recomputed import RecomputedTensor
from engine.verification import proof
from tests.engine.exactness import masked, randomised, run
from tests.engine.nets import Mean, Net, dead, image, plain, snapshot, unchanged


def verdict(model: nn.Module, example: object, rows: dict[str, list[int]], **arguments: object) -> engine.Certificate:
    """Compact, and return the certificate."""
    speedup = engine.ModelSpeedup(model, example, dead(model, rows, bias=True), **arguments)
    speedup.speedup_model()
    return speedup.certificate


def test_a_float32_model_is_verified_in_float64() -> None:
    """At the example's size, at smaller and larger odd ones, with the asked number of samples."""
    found = verdict(plain().float(), image(dtype=torch.float32), {"0": [0, 1]}, confidence=5)
    assert found.verified and found.dtype == "float64" and found.max_error <= 1e-9 == found.tolerance
    assert found.shapes == ((5, 3, 6, 6), (1, 3, 3, 5), (1, 3, 15, 13))
    assert found.samples == 7 and found.compared == 5 and not found.notes


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


class OnlyIn(nn.Module):
    """A network that refuses all dtypes but some."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.dtypes, self.conv, self.norm = dtypes, nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return two numbers per image."""
        if x.dtype not in self.dtypes:
            raise TypeError(f"{x.dtype} does not run here.")
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def test_half_precision_without_float64_is_verified_in_float32() -> None:
    """Which is sharper than the model's own dtype."""
    model = randomised(OnlyIn(torch.float32, torch.bfloat16)).bfloat16()
    result = verdict(model, image(dtype=torch.bfloat16), {"conv": [0, 1], "norm": [0, 1]})
    assert result.verified and result.dtype == "float32" and result.tolerance == 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_tolerance_of_half_precision_is_measured(dtype: torch.dtype) -> None:
    """It is a few times the model's own rounding: a replacement that is 6 % off is refused, a faithful one is not."""
    x, rows = image(dtype=dtype), {"conv": [0, 1], "norm": [0, 1]}
    result = verdict(randomised(OnlyIn(dtype)).to(dtype), x, rows)
    assert result.verified and result.dtype == str(dtype).removeprefix("torch.")
    assert result.max_error <= result.tolerance < 0.06

    def wrong(module: nn.Linear, *_: object) -> nn.Module:
        replaced = copy.deepcopy(module)
        replaced.weight = nn.Parameter(1.06 * module.weight.detach()[:, 2:])
        return replaced

    with pytest.raises(VerificationError, match="differs from the masked one"):
        verdict(randomised(OnlyIn(dtype)).to(dtype), x, rows, customized_replace_func={"Linear": wrong})


def test_a_model_of_its_own_dtype_may_widen_inside() -> None:
    """What it converts to float64 and back stays as its code has it, where it does not run in float64 as a whole."""

    def forward(m: Net, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("Only float32 runs here.")
        return m.head(torch.relu(m.conv(x)).double().mean((2, 3)).to(torch.float32))

    model = Net(forward, conv=nn.Conv2d(3, 6, 1), head=nn.Linear(6, 2))
    result = verdict(model, image(dtype=torch.float32), {"conv": [0, 1]})
    assert result.verified and result.dtype == "float32"


def test_a_model_of_one_size_only() -> None:
    """A flatten fixes the resolution: the larger run is noted as not compared, the rest is verified."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(144, 2)).double()
    found = verdict(model, image(), {"0": [0]})
    assert found.verified and found.shapes == ((8, 3, 6, 6), (1, 3, 6, 6))
    assert any("larger resolution" in note for note in found.notes)
    assert any("at other sizes (dimension 2 of input 0: 3 for 6" in note for note in found.notes)


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


def test_the_stored_weights_are_the_verified_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A swap that stores something else is an error, and the model is as it was."""
    model = plain().float()
    state = snapshot(model)
    stored = compact.compacted
    monkeypatch.setattr("engine.compaction.compact.compacted", lambda *args: stored(*args) * 2)
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
    assert speedup.certificate.shapes == ((3, 64, 64), (3, 41, 43), (3, 99, 97))
    assert speedup.certificate.max_error < 1e-12


def large() -> nn.Module:
    """A model whose activations take much more than its weights, with statistics that are its own."""
    return randomised(nn.Sequential(nn.Conv2d(3, 24, 1), nn.BatchNorm2d(24), nn.ReLU(), Mean(), nn.Linear(24, 2)))


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs take no more memory than the weights."""
    monkeypatch.setattr("engine.verification.proof._FREE", 0)


@pytest.mark.usefixtures("little")
def test_samples_run_apart_where_they_are_large() -> None:
    """Two together at half the resolution, one of them again, one as large as the example, and two at other sizes."""
    found = verdict(large(), image(12), {"0": range(8)}, confidence=3)
    other = (1, 3, 7, 9), (1, 3, 7, 25)
    assert found.shapes == ((2, 3, 6, 6), (1, 3, 6, 6), (1, 3, 12, 12), (1, 3, 6, 6), *other)
    assert found.verified and found.samples == 6 and not found.notes


@pytest.mark.usefixtures("little")
def test_samples_that_depend_on_each_other_run_together() -> None:
    """Statistics of the batch say nothing of a single sample."""

    def forward(m: Net, x: Tensor) -> Tensor:
        y = torch.relu(m.conv(x)).mean((2, 3))
        return m.head(y - y.mean(0))

    model = randomised(Net(forward, conv=nn.Conv2d(3, 24, 1), head=nn.Linear(24, 2)))
    found = verdict(model, image(12), {"conv": range(8)}, confidence=5)
    assert found.shapes == ((2, 3, 6, 6), (5, 3, 12, 12), (1, 3, 7, 9), (1, 3, 27, 25))
    assert found.verified and not found.notes


@pytest.mark.usefixtures("little")
def test_a_single_sample_that_is_rejected() -> None:
    """All run together, as a model that looks at the batch size wants it."""

    def forward(m: Net, x: Tensor) -> Tensor:
        assert len(x) > 1
        return m.head(torch.relu(m.conv(x)).mean((2, 3)))

    model = randomised(Net(forward, conv=nn.Conv2d(3, 24, 1), head=nn.Linear(24, 2)))
    found = verdict(model, image(12), {"conv": range(8)}, confidence=5)
    assert found.shapes == ((2, 3, 6, 6), (5, 3, 12, 12), (2, 3, 24, 24)) and found.verified
    assert found.notes and all("batch size 1, float64: the model rejects that" in note for note in found.notes)


@pytest.mark.usefixtures("little")
def test_models_of_one_resolution_run_apart_too() -> None:
    """Two together at the example's resolution then."""
    model = randomised(nn.Sequential(nn.Conv2d(3, 24, 1), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 36, 2)))
    found = verdict(model, image(6), {"0": range(8)}, confidence=3)
    assert found.shapes == ((2, 3, 6, 6), (1, 3, 6, 6), (1, 3, 6, 6)) and found.samples == 3
    assert [note for note in found.notes if "larger" in note or "at other sizes" in note] == list(found.notes)


@pytest.mark.usefixtures("little")
def test_an_error_in_one_of_the_samples_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of their own are compared like runs together."""
    model = large()
    state = snapshot(model)
    monkeypatch.setattr("engine.compaction.folds.Fold.apply", lambda self, t: t)
    with pytest.raises(VerificationError, match="differs from the masked one"):
        engine.ModelSpeedup(model, image(12), dead(model, {"0": range(8)})).speedup_model()
    assert unchanged(model, state)


def test_weights_are_in_float64_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many large weights the float64 copy that is being read is alive, and that of no other."""
    made: list[weakref.ref[Tensor]] = []
    most = [0]

    def read(self: RecomputedTensor, keep: bool) -> Tensor:
        found = original(self, keep)
        made.append(weakref.ref(found))
        most[0] = max(most[0], sum(ref() is not None for ref in made))
        return found

    original = RecomputedTensor._read
    monkeypatch.setattr(RecomputedTensor, "_read", read)
    layers = [nn.Linear(64, 64, bias=False) for _ in range(5)]
    model = nn.Sequential(nn.Linear(3, 64), *layers, nn.Linear(64, 2))
    found = verdict(model, torch.randn(2, 3), {"0": range(9)}, confidence=2)
    assert found.verified and found.dtype == "float64" and most == [1] and len(made) >= 10


@pytest.mark.parametrize(("activation", "count"), [(nn.GELU(), 2), (nn.ReLU(), 8)])
def test_of_an_analytic_network_that_takes_long_two_samples_run(
    monkeypatch: pytest.MonkeyPatch, activation: nn.Module, count: int
) -> None:
    """They run together, and one of them alone; where it is not analytic, or takes little, all of them run."""

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), activation, nn.Linear(8, 3)).double()

    x = torch.randn(1, 5, dtype=torch.float64)
    assert verdict(network(), x, {"0": [0, 1]}).shapes[0] == (8, 5)
    monkeypatch.setattr(proof, "_HEAVY", 0)
    certificate = verdict(network(), x, {"0": [0, 1]})
    assert certificate.verified and certificate.shapes[0] == (count, 5) and (1, 5) in certificate.shapes

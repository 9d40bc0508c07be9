"""What pruning can do for a model, before anybody trains."""

from __future__ import annotations

import pytest
import torch
from markupsafe import escape
from torch import Tensor, nn

import engine
from engine.errors import InputError
from lightning_compress import summarize
from lightning_compress.report.content import Section
from lightning_compress.trainer.packages import MisconfigurationException
from tests.lightning_compress.models import Net, Root, Wrapped
from tests.lightning_compress.reports import Sized
from tests.lightning_compress.stock.test_forecast import Decoder

X = torch.ones(1, 3, 8, 8)


def test_predictions_are_what_compaction_leaves() -> None:
    """Half of the channels of each group: the same MACs and parameters as measured afterwards."""
    net = Net()
    summary = summarize(net, X, amounts=(0.0, 0.5))
    assert [p.macs for p in summary.predictions][0] == summary.macs
    groups = engine.dependency_groups(net, X)
    keep = {g.name: torch.arange(g.size) >= g.size // 2 for g in groups if g.reason is None}
    masks = engine.group_masks(groups, keep)
    small = engine.ModelSpeedup(net, X, masks, confidence=1).speedup_model()
    macs, params, _ = engine.count_flops_params(small, X, verbose=False)
    assert (summary.predictions[1].macs, summary.predictions[1].params) == (macs, params)


def test_the_most_expensive_reason_comes_first() -> None:
    """A size in code freezes more than the output does."""
    summary = summarize(Sized(), (1, 1, 2, 2))
    assert [entry.layers for entry in summary.frozen][0] == ("last",)
    costs = [entry.macs for entry in summary.frozen]
    assert costs == sorted(costs, reverse=True) and "reports.py" in summary.frozen[0].reason


@pytest.mark.parametrize("module", [Wrapped, Root])
def test_lightning_modules(module: type) -> None:
    """The model inside is found as the callbacks find it; the example is the module's own, where it has one."""
    own = module()
    assert summarize(own, X).macs == summarize(Net(), X).macs
    own.example_input_array = X
    assert summarize(own).params == sum(p.numel() for p in Net().parameters())


def test_text_and_html_hold_the_same() -> None:
    """Each cell of each table; nothing of a name is markup."""
    summary = summarize(Sized(), (1, 1, 2, 2))
    text, page = str(summary), summary._repr_html_().replace("<wbr>", "")
    sections: list[Section] = summary._sections()
    assert [section.title for section in sections] == ["Predicted", "Groups", "Frozen, and why"]
    for section in sections:
        for row in section.rows:
            assert all(cell in text for cell in row)
            assert all(escape(cell) in page for cell in row)


def test_a_long_table_says_where_the_rest_is() -> None:
    """Of twenty groups, fifteen; the others are in an attribute."""
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(21)))
    summary = summarize(net, (1, 4))
    assert len(summary.groups) == 20 and "The first 15 of 20; all are in `.groups`" in str(summary)


def test_a_model_on_meta() -> None:
    """Costs depend on shapes alone."""
    with torch.device("meta"):
        net, x = Net(), torch.ones(1, 3, 8, 8)
    assert summarize(net, x).predictions == summarize(Net(), X).predictions


class Fixed(nn.Module):
    """Nothing of it can go."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 4) -> (N, 4)."""
        return self.layer(x)


def test_a_model_of_which_nothing_can_go() -> None:
    """It has no predictions to show, and says why."""
    text = str(summarize(Fixed(), (1, 4)))
    assert "Predicted" not in text and "is an output of the model" in text


def test_the_configuration_is_spoken_of_where_there_is_one() -> None:
    """For a model of transformers; for others there is nothing to say."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    summary = summarize(transformers.BertModel(config).eval(), {"input_ids": torch.ones(1, 4, dtype=torch.long)})
    assert any("BertConfig" in note for note in summary.notes) and "BertConfig" in str(summary)
    assert summarize(Net(), X).notes == ()


def test_a_part_of_a_plain_module() -> None:
    """A path selects it, as in a LightningModule; amounts may be read once."""
    whole = nn.ModuleDict({"net": Net()})
    part, alone = (summarize(whole, X, amounts=iter([0.5]), path="net"), summarize(Net(), X, amounts=[0.5]))
    assert str(part) == str(alone)
    with pytest.raises(MisconfigurationException, match="`model='nope'` is not a module of `ModuleDict`"):
        summarize(whole, X, path="nope")


def test_what_is_wrong_is_named() -> None:
    """No example, and amounts that are not fractions."""
    with pytest.raises(MisconfigurationException, match="no `example_input_array`"):
        summarize(Wrapped())
    with pytest.raises(MisconfigurationException, match="fractions in \\[0, 1\\], got 50"):
        summarize(Net(), X, amounts=(50,))


def test_a_dry_run_says_what_could_be_loaded() -> None:
    """Layer norms stand in the way of the stream; with ordinary ones the configuration says all."""
    summary = summarize(Decoder(), torch.randn(2, 4), amounts=(0.5,), stock=True)
    exact, plain = summary.stock
    assert not exact.is_loadable and plain.is_loadable and plain.config == {"width": 4, "inner": 6}
    text = str(summary)
    page = summary._repr_html_().replace("<wbr>", "")
    for cell in ("without 1 group", "plain_norms=True", "width=4", "inner=6", "keep the statistics of 8 channels"):
        assert cell in text and cell in page


def test_a_dry_run_needs_a_configuration_and_weights() -> None:
    """There is nothing that a package could load, or nothing to compact."""
    with pytest.raises(InputError, match="save_stock"):
        summarize(Net(), X, stock=True)
    with torch.device("meta"):
        model, x = Decoder(), torch.randn(2, 4)
    with pytest.raises(InputError, match="meta device"):
        summarize(model, x, stock=True)

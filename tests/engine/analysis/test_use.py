"""Which entries have an influence on an output."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.analysis.constants import Constants
from engine.analysis.use import Use
from tests.engine.exactness import KINDS, check_exact, column_masks, masked, randomised, run
from tests.engine.nets import Net, constants_of, dead, image, plain, structure


def use_of(model: nn.Module, masks: dict[str, dict[str, Tensor]]) -> Use:
    """Trace and go backward."""
    return Use(structure(model, image()), constants_of(model, image(), masks))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_unused_can_be_anything(kind: str) -> None:
    """Noise on channels that are said to be unused changes no output, for every kind of mask."""
    model = plain()
    masks = KINDS[kind](model, 4)
    use = use_of(model, masks)
    small = masked(model, masks)
    before = run(small, image())
    noisy = copy.deepcopy(small)
    for node in use.graph.nodes:
        if node.module and node.output.ndim == 4:
            unused = ~use.along(node.output, 1)

            def disturb(m: nn.Module, a: object, out: Tensor, unused: Tensor = unused) -> Tensor:
                return out + 5 * unused.view(1, -1, 1, 1) * torch.randn_like(out)

            noisy.get_submodule(node.module).register_forward_hook(disturb)
    for old, new in zip(before, run(noisy, image()), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=1e-12)


def test_masked_columns_make_channels_unused() -> None:
    """And the channels before them, through norm and relu."""
    model = plain()
    mask = torch.ones(5, 6, 3, 3)
    mask[:, [1, 4]] = 0
    use = use_of(model, {"3": {"weight": mask}})
    nodes = {n.module: n for n in use.graph.nodes}
    for name in ("0", "1", "2"):
        assert (~use.along(nodes[name].output, 1)).nonzero()[:, 0].tolist() == [1, 4]
    assert use.along(nodes["3"].output, 1).all()


def test_an_unused_branch() -> None:
    """What is computed and thrown away is unused, and goes."""

    def forward(m: Net, x: Tensor) -> Tensor:
        m.lost(x)
        return m.head(m.stem(x).mean((2, 3)))

    model = randomised(Net(forward, stem=nn.Conv2d(3, 4, 1), lost=nn.Conv2d(3, 5, 1), head=nn.Linear(4, 2)))
    use = use_of(model, {})
    lost = next(n for n in use.graph.nodes if n.module == "lost")
    assert not use[lost.output].any()
    check_exact(model, dead(model, {"stem": [0]}), image())


def test_use_is_compact_along_axes_without_slots() -> None:
    """Positions and batch are not told apart; what is added is reduced to that form."""
    found = structure(plain(), image())
    use = Use(
        found,
        Constants(found.graph, engine.RULES, dict(plain().named_parameters()) | dict(plain().named_buffers()), {}),
    )
    node = found.graph.nodes[0]
    assert use.shape(node.output) == [1, 6, 1, 1]
    use.add_all(node.output)
    assert use[node.output].shape == (1, 6, 1, 1) and use.along(node.output, 1).all()
    assert use.along(found.graph.inputs[0], 1).shape == (3,)


def test_columns_that_are_masked_everywhere_compact() -> None:
    """Unused channels go although they vary."""
    model = plain()
    masks = column_masks(model, 2)
    plan = check_exact(model, masks, image(), image(9))
    assert plan.slices["0.weight"].shape[0] < 6 and not plan.folds

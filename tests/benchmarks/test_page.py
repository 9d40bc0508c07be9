"""What the page of benchmarks makes of its rows."""

from __future__ import annotations

from typing import Any

from benchmarks.page import page


def analysis(ours: float, peer: float) -> dict[str, Any]:
    """A row of two rounds, with a floor of 1 s."""
    own = {"trace": ours / 2, "repair": ours / 4, "plan and swap": ours / 4, "ours": ours}
    stages = own | {"recording": 0.9, "writing": 0.1, "peer": peer}
    return {"nodes": 7, "stages": {name: [seconds, seconds] for name, seconds in stages.items()}}


def test_shortcomings_come_first() -> None:
    """Missed targets, and networks on which Torch-Pruning is faster, are at the top; targets that were met are not."""
    text = page({"analysis": {"slow": analysis(3.0, 1.0), "fast": analysis(0.5, 10.0)}}, "a machine", 2)
    top, rest = text.split("## Analysis")
    assert "2 of 3 targets met" in top
    assert "worst network (slow): 3.00 (target: at most 1.5): **missed**" in top
    assert "Slower than Torch-Pruning on slow" in top
    assert "floor" not in top and "floor, geometric mean: 1.22 (target: at most 2): met" in rest
    assert "| slow | 7 | 1500 | 750 | 750 | 3000 (3000–3000) | 1000 (1000–1000) | 1000 (1000–1000) | 3.00" in rest


def test_the_first_analysis_beside_that_of_the_peer() -> None:
    """Where the peer is faster is said at the top."""
    seconds = {"a": 0.5, "a, peer": 0.25, "b": 0.1, "b, peer": 1.0}
    text = page({"first": {name: {"seconds": value} for name, value in seconds.items()}}, "a machine", 2)
    assert "| a | 500 | 250 |" in text and "| b | 100 | 1000 |" in text
    assert "Slower than Torch-Pruning in the first analysis on a (2.00 × its time)." in text.split("## ")[0]


def test_no_shortcomings() -> None:
    """Then that is said."""
    text = page({"analysis": {"fast": analysis(0.5, 10.0)}}, "a machine", 2)
    assert "3 of 3 targets met. Shortcomings:\n\n- none.\n" in text


def test_latency_against_a_network_built_by_hand() -> None:
    """The target applies to the median of the paired ratios; a network with a different function is only reported."""
    times = {"dense": [4.0, 4.0], "compacted": [2.0, 2.02], "by hand": [2.0, 2.0]}
    other = times | {"compacted": [3.0, 3.0]}
    rows = {"net": {"times": times, "same function": True}, "net, stream": {"times": other, "same function": False}}
    text = page({"latency": rows}, "a machine", 2)
    assert "largest: 1.005 (target: at most 1.03): met" in text and "| net, stream | 4.0 | 3.0 | 2.0 | 1.500" in text


def test_why_groups_of_a_language_model_stay() -> None:
    """Each reason once, without layers and folders; that the vocabulary stays is not a loss."""
    stays = [
        "is an output of the model",
        "softmax in 'layers.0.gate' (/some/where/modeling.py:106) sums over it",
        "softmax in 'layers.1.gate' (/some/where/modeling.py:106) sums over it",
    ]
    seconds = {"trace": 1.0, "masks": 2.0, "plan": 3.0, "count": 4.0}
    row = {"nodes": 3, "groups": [1, 2], "stays": stays, "seconds": seconds, "parameters": [2e9, 1e9], "peak": 2000.0}
    text = page({"language": {"Llama 70 B": row}}, "a machine", 2)
    assert text.count("softmax (modeling.py:106) sums over it") == 2  # at the top and in its section
    assert "is an output" not in text and "/some" not in text
    assert "traced, counted and planned, seconds: 10.00 (target: at most 60): met" in text


def test_overhead_of_training() -> None:
    """The target applies to the median of the paired ratios, except for plain fits and the smallest batches."""
    rows = {
        name: {"plain": 100.0, "ratios": [ratio - 0.1, ratio, ratio + 0.2]}
        for name, ratio in {"nothing, batch 32": 1.3, "all, batch 8": 1.2, "all, batch 32": 1.01}.items()
    }
    text = page({"overhead": rows}, "a machine", 2)
    assert "1 of 1 targets met" in text
    assert "with all, batch 32, relative to a plain step: 1.010 (target: at most 1.02): met" in text
    assert "| all, batch 8 | 100.0 | 1.200 (1.100–1.400) | 1.233 |" in text

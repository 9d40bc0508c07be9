"""Results that a survey keeps."""

from __future__ import annotations

from pathlib import Path

from benchmarks.survey import Survey, code_state


def test_a_survey_is_resumed_where_it_stopped(tmp_path: Path) -> None:
    """What is known of this state of the code is not run again; rows of another state stay in the file, unread."""
    file, ran = tmp_path / "build" / "rows.jsonl", []

    def run() -> dict[str, int]:
        ran.append(1)
        return {"error": len(ran)}

    first = Survey(file, "model", "old")
    assert first.row("a", run) == {"model": "a", "state": "old", "error": 1} and first.all(["a", "b"]) is None
    again = Survey(file, "model", "old")
    assert again.row("a", run)["error"] == 1 and again.row("b", run)["error"] == 2
    assert [row["model"] for row in again.all(["b", "a"]) or ()] == ["b", "a"]
    assert Survey(file, "model", "new").row("a", run)["error"] == 3 and len(ran) == 3
    assert len(file.read_text().splitlines()) == 3 and Survey(file, "model", "old").row("a", run)["error"] == 1


def test_the_state_is_that_of_the_code_and_of_the_versions() -> None:
    """Of another benchmark or package results are others."""
    states = {code_state(__file__, "1.0"), code_state(__file__, "1.1"), code_state(code_state.__code__.co_filename)}
    assert len(states) == 3 and code_state(__file__, "1.0") in states

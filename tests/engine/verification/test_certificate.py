"""A certificate is stored, read back and printed."""

from __future__ import annotations

from engine.verification.certificate import Certificate


def test_a_certificate_survives_storage() -> None:
    """As primitives."""
    certificate = Certificate(True, 1e-12, 1e-9, "float64", 10, ((8, 3, 6, 6), (2, 3, 12, 12)), 5, True, ("a note",))
    state = certificate.state_dict()
    assert Certificate.from_state_dict(state) == certificate
    assert state["shapes"] == [[8, 3, 6, 6], [2, 3, 12, 12]] and state["notes"] == ["a note"]
    assert Certificate.from_state_dict({"verified": True}).verified


def test_a_certificate_can_be_read() -> None:
    """What was compared, how far apart it was, and in which modes it is exact."""
    text = str(Certificate(True, 1e-12, 1e-9, "float64", 10, (), 5, True, ("a note",)))
    assert "relative error 1.0e-12 (tolerance 1e-09, float64) on 10 samples" in text and "5 inner tensors" in text
    assert "train mode too" in text and text.endswith("a note")
    assert "constants were folded" in str(Certificate()) and "not verified" in str(Certificate())

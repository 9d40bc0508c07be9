"""Rendering of the templates."""

from __future__ import annotations

import pytest
from jinja2 import UndefinedError

from lightning_compress.report.templating import render


def test_whatever_is_put_in_is_escaped() -> None:
    """Titles, leads and cells; the places where a name may break are the only markup that is added."""
    evil = "<script>alert(1)</script>"
    text = render("table.html", title=evil, lead=evil, columns=(evil,), rows=((evil,),))
    assert "<script" not in text and text.count("&lt;script&gt;") == 4


def test_a_name_without_a_value_is_an_error() -> None:
    """A template that asks for what nobody gives does not go out with a hole in it."""
    with pytest.raises(UndefinedError, match="columns"):
        render("table.html", title="", lead="", rows=())

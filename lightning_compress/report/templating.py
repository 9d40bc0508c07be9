"""Rendering of the HTML templates beside this file, with automatic escaping."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

__all__ = ["breakable", "render"]


def breakable(name: str) -> Markup:
    """Allow line breaks after the dots, underscores and slashes of a name.

    Example:
        >>> str(breakable("layer1.0<x>"))
        'layer1.<wbr>0&lt;x&gt;'
    """
    text = str(escape(name or "(the model)"))
    for character in "._/":
        text = text.replace(character, f"{character}<wbr>")
    return Markup(text)


def render(template: str, **values: Any) -> str:
    """Render a template.

    Args:
        template: name of a file in ``templates/``.
        values: values of the template's variables; a missing one is an error.

    Example:
        >>> "<h3>Net&lt;1&gt;" in render("table.html", title="Net<1>", lead="", columns=("a",), rows=(("b",),))
        True
    """
    return _environment().get_template(template).render(**values)


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("lightning_compress.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., Any]] = {"breakable": breakable}
    environment.filters.update(filters)
    return environment

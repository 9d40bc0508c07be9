"""What griffe does to each docstring: an example is shown as code, and not as a box of quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

_HEADING = re.compile(r"^Example:$", re.MULTILINE)


class ExampleSections(griffe.Extension):
    """``Example:``, as the docstrings have it, is the section that griffe knows as ``Examples:``."""

    def on_object(self, *, obj: griffe.Object, **rest: Any) -> None:
        """Rename the heading."""
        if obj.docstring is not None:
            obj.docstring.value = _HEADING.sub("Examples:", obj.docstring.value)

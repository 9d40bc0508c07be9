"""Import of user-defined functions by path, so that YAML files can name them."""

from __future__ import annotations

import difflib
import importlib
import inspect
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from lightning_compress.trainer.packages import MisconfigurationException


def check_takes(function: Any, argument: str, names: Sequence[str]) -> None:
    """Check that a function of the user's can be called with some positional arguments.

    Args:
        function: the function; one without a signature is not checked.
        argument: name of the argument that holds it, for the error.
        names: what it is called with.

    Raises:
        MisconfigurationException: if it takes other arguments.

    Example:
        >>> check_takes(lambda group, evidence: None, "criterion", ["a group", "an `Evidence`"])
    """
    try:
        inspect.signature(function).bind(*names)
    except ValueError:
        return
    except TypeError as error:
        raise MisconfigurationException(
            f"The function `{argument}={function!r}` must take {' and '.join(names)}: {error}."
        ) from error


def imported(path: Any, argument: str, choices: Iterable[str]) -> Any:
    """Import the callable at an import path.

    Args:
        path: ``"package.module:function"`` or ``"package.module.function"``.
        argument: name of the argument that holds the path, for the error.
        choices: names that the argument accepts beside import paths, for the error.

    Returns:
        The callable.

    Raises:
        MisconfigurationException: if there is no such callable.

    Example:
        >>> imported("math:floor", "schedule", ["linear"])
        <built-in function floor>
    """
    module, _, name = ("", "", "")
    if isinstance(path, str):
        module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        target = operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        near = difflib.get_close_matches(str(path).lower(), choices, 1)
        why = f": {error}." if module else "."
        raise MisconfigurationException(
            f"`{argument}={path!r}` is neither one of {', '.join(sorted(choices))} nor the import path of a function "
            f"('package.module:function'){f'. Did you mean {near[0]!r}?' if near else why}"
        ) from error
    if not callable(target):
        raise MisconfigurationException(f"`{argument}={path!r}` is a {type(target).__name__}, not a function.")
    return target

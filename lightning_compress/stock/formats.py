"""The two protocols by which packages save networks: those of transformers and of diffusers.

Neither package is imported. Models of transformers are built from a configuration object (``to_dict``, ``from_dict``),
those of diffusers from a mapping by ``from_config``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from engine.errors import InputError
from engine.surgery import original
from lightning_compress.stock.fields import Path, Values, numbers, set_numbers

__all__ = ["Form", "Format", "format_of", "silent"]


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Suppress warnings of classes about trial configurations."""
    level = logging.root.manager.disable
    try:
        logging.disable(logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


class Form(Protocol):
    """Construction of a class from numbers."""

    @property
    def cls(self) -> Any:
        """The class."""

    def build(self, values: Values, device: str = "meta") -> nn.Module:
        """Return a new instance, with the given numbers replaced."""

    def fields(self) -> dict[Path, int | float | None]:
        """Return the numbers that the class is built from."""


@dataclass(frozen=True)
class Format:
    """Construction of a class from a configuration, and loading of saved networks.

    Attributes:
        cls: the original class.
        config: the old configuration, as primitives.
        kind: class of the configuration object; None if it is a mapping.
    """

    cls: Any
    config: Mapping[str, Any]
    kind: Any = None

    def build(self, values: Values, device: str = "meta") -> nn.Module:
        """Return a new instance, with the given numbers of the old configuration replaced."""
        config = set_numbers(self.config, values)
        with silent(), torch.random.fork_rng(devices=[]), torch.device(device):
            model: nn.Module = (
                self.cls.from_config(config) if self.kind is None else self.cls(self.kind.from_dict(config))
            )
        return model

    def unlisted(self) -> list[Path]:
        """Return the optional fields that the class looks up but this configuration does not have.

        Many classes use ``head_dim`` if the configuration has it, and else derive the size of a head from the width.
        """
        if self.kind is None:
            return []
        config = self.kind.from_dict(dict(self.config))
        parts = {id(part): path for path, part in _parts(config, ())}
        with silent(), torch.random.fork_rng(devices=[]), torch.device("meta"), _missing(self.kind) as missing:
            self.cls(config)
        paths = [(*parts[id(part)], name) for part, name in missing if id(part) in parts and name[0] != "_"]
        return list(dict.fromkeys(paths))

    def fields(self) -> dict[Path, int | float | None]:
        """Return the numbers of the configuration, and the fields without a value."""
        return {**numbers(self.config), **dict.fromkeys(self.unlisted())}

    def load(self, directory: str | os.PathLike[str], dtype: torch.dtype) -> nn.Module:
        """Load a saved network as users do."""
        name = "torch_dtype" if self.kind is None else "dtype"
        model: nn.Module = self.cls.from_pretrained(os.fspath(directory), **{name: dtype})
        return model


def _parts(config: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield a configuration object and those nested in it."""
    yield path, config
    for name, value in vars(config).items():
        if callable(getattr(value, "to_dict", None)) and not isinstance(value, type):
            yield from _parts(value, (*path, name))


@contextlib.contextmanager
def _missing(kind: Any) -> Iterator[list[tuple[Any, str]]]:
    """Record missing attributes of configurations that are looked up inside the context."""
    base = next(cls for cls in reversed(kind.__mro__) if "from_dict" in vars(cls))
    names: list[tuple[Any, str]] = []

    def note(config: Any, name: str) -> Any:
        names.append((config, name))
        raise AttributeError(f"{type(config).__name__!r} object has no attribute {name!r}")

    if hasattr(base, "__getattr__"):
        yield names
        return
    try:
        base.__getattr__ = note
        yield names
    finally:
        del base.__getattr__


def format_of(model: nn.Module) -> Format:
    """Return the format of a model.

    Raises:
        InputError: if it follows neither protocol.
    """
    cls: Any = original(type(model))
    config = getattr(model, "config", None)
    if callable(getattr(cls, "from_pretrained", None)) and callable(getattr(cls, "save_pretrained", None)):
        if callable(getattr(type(config), "from_dict", None)) and callable(getattr(config, "to_dict", None)):
            return Format(cls, _primitives(config), type(config))
        if isinstance(config, Mapping) and callable(getattr(cls, "from_config", None)):
            return Format(cls, dict(config))
    inside = [name for name, part in model.named_modules() if name and hasattr(type(part), "save_pretrained")]
    hint = f" Pass its submodule {inside[0]!r}." if inside else " For other networks, use `save_stock`."
    raise InputError(f"{cls.__name__} has no configuration and no `from_pretrained`.{hint}")


def _primitives(config: Any) -> dict[str, Any]:
    values: dict[str, Any] = config.to_dict()
    return values

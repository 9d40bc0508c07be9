"""Constructor arguments of networks of installed packages, such as timm and torchvision.

This works for any package. The functions in the module of a class that build it without arguments, such as
``resnet50``, run on the meta device, and the constructor's arguments are recorded. The search for the arguments of the
small network starts from those of the most similar network.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.surgery import original
from lightning_compress.stock.calls import Call, fields_of, recorded, source_of_call, with_values
from lightning_compress.stock.describe import Look, look_at
from lightning_compress.stock.fields import Path, Values
from lightning_compress.stock.formats import silent

__all__ = ["Constructor", "constructor_of"]

_MOST = 40  # functions to try


@dataclass(frozen=True)
class Constructor:
    """Construction of a class from arguments.

    Attributes:
        cls: the original class.
        call: a call of its constructor.
    """

    cls: Any
    call: Call

    def build(self, values: Values, device: str = "meta") -> nn.Module:
        """Return a new instance, with the given numbers among the arguments replaced."""
        with silent(), torch.random.fork_rng(devices=[]), torch.device(device):
            model: nn.Module = with_values(self.call, values).result()
        return model

    def fields(self) -> dict[Path, int | float | None]:
        """Return the numbers among the arguments."""
        return fields_of(self.call)

    def source(self, values: Values) -> tuple[list[str], str] | None:
        """Return imports and an expression that builds the network; None if an argument cannot be written."""
        return source_of_call(with_values(self.call, values))


def constructor_of(model: nn.Module) -> Constructor | None:
    """Return the constructor of a network's class, with the arguments of the most similar network of its module.

    None if the class does not belong to an installed package, or no function without arguments builds the same layers.
    """
    cls = original(type(model))
    look, nearest = look_at(model), None
    for build in _builders(model, cls) if _is_installed(cls) else ():
        call = _call(build, cls)
        if call is None or source_of_call(call) is None:
            continue
        candidate = Constructor(cls, call)
        distance = _distance(look, candidate)
        if distance is not None and (nearest is None or distance < nearest[0]):
            nearest = distance, candidate
    return None if nearest is None else nearest[1]


@functools.cache
def _packages() -> Mapping[str, Any]:
    return importlib.metadata.packages_distributions()


def _is_installed(cls: type) -> bool:
    """Whether others can import the class by installing a package."""
    return cls.__module__.partition(".")[0] in _packages()


def _builders(model: nn.Module, cls: type) -> Iterator[Callable[[], Any]]:
    """Yield the functions of a class's module that are annotated to return it, need no arguments and load no weights.

    Only the function that built the model, if known: timm stores its name in ``pretrained_cfg``.
    """
    module = sys.modules[cls.__module__]
    functions = {
        name: f for name, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == cls.__module__
    }
    config = getattr(model, "pretrained_cfg", None)
    own = config.get("architecture") if isinstance(config, Mapping) else None
    names = [own] if own in functions else [name for name in functions if name[0] != "_"][:_MOST]
    yield from (functions[name] for name in names if _builds(functions[name], cls))


def _builds(function: Callable[..., Any], cls: type) -> bool:
    parameters = inspect.signature(function).parameters.values()
    free = all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    loads = any(p.name in ("pretrained", "weights") and p.default not in (None, False, p.empty) for p in parameters)
    return free and not loads and function.__annotations__.get("return") in (cls, cls.__name__)


def _call(build: Callable[[], Any], cls: type) -> Call | None:
    try:
        with silent(), torch.random.fork_rng(devices=[]), torch.device("meta"):
            return recorded(build, cls)
    except Exception:  # the package may raise anything
        return None


def _distance(look: Look, constructor: Constructor) -> int | None:
    """Return the number of tensors with different shapes; None if the layers differ."""
    try:
        other = look_at(constructor.build({}))
    except Exception:  # as above
        return None
    return len(look.misfits(other)) if look.shapes.keys() == other.shapes.keys() else None

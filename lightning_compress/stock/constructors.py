"""Networks of installed packages by the arguments of their class's constructor, as those of timm and torchvision.

Nothing is known of a package. The functions in the module of a class that build one without arguments, as
``resnet50``, are run on the meta device, and the constructor's arguments are recorded. The one whose network is nearest
is where the search for the arguments of the small network starts.
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

_MOST = 40  # functions that are run


@dataclass(frozen=True)
class Constructor:
    """How a class is built from arguments.

    Attributes:
        cls: the class as its package has it.
        call: a call of it.
    """

    cls: Any
    call: Call

    def build(self, values: Values, device: str = "meta") -> nn.Module:
        """Return a new instance under the arguments with other numbers."""
        with silent(), torch.random.fork_rng(devices=[]), torch.device(device):
            model: nn.Module = with_values(self.call, values).result()
        return model

    def fields(self) -> dict[Path, int | float | None]:
        """Return the numbers among the arguments."""
        return fields_of(self.call)

    def source(self, values: Values) -> tuple[list[str], str] | None:
        """Return imports and an expression that builds the network; None where an argument cannot be written."""
        return source_of_call(with_values(self.call, values))


def constructor_of(model: nn.Module) -> Constructor | None:
    """Return the constructor of a network's class with the arguments of the nearest network that its module builds.

    None where the class is of no installed package, or no function without arguments builds one of the same layers.
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
    """Yield the functions of a class's module that are said to return it, need no arguments and load no weights.

    Only the one that built the model, if it says so: timm notes the name in ``pretrained_cfg``.
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
    except Exception:  # of any kind: it is a package's own code, and may build anything
        return None


def _distance(look: Look, constructor: Constructor) -> int | None:
    """Return how many tensors have another shape; None where the layers are others."""
    try:
        other = look_at(constructor.build({}))
    except Exception:  # of any kind, as above
        return None
    return len(look.misfits(other)) if look.shapes.keys() == other.shapes.keys() else None

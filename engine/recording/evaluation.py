"""Running a model in eval mode so that it leaves no trace on it."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from engine.program.stored import distinct_modules
from engine.recording.memos import forgetting
from engine.recording.opaque import storage_of

__all__ = ["evaluation"]


@contextmanager
def evaluation(model: nn.Module, train: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Run the body in eval mode (``train`` names the modules that stay in train mode), leaving no trace on the model.

    Modes, module attributes and what lies in lists, sets and dictionaries among them, buffers' identity, the memory
    that parameters and buffers stand for (``self.weight.data = …``) and the random state are restored.
    """
    modules = list(distinct_modules(model).values())
    before = [dict(vars(m)) for m in modules]
    memory = [(t, t.data) for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if _is_plain(t)]
    contents: dict[int, tuple[Any, Any]] = {}
    for m, attributes in zip(modules, before, strict=True):
        contents |= {id(table): (table, table.copy()) for table in (m._parameters, m._buffers, m._modules)}
        for name in attributes.keys() - _OF_EVERY_MODULE:
            _keep_contents(attributes[name], contents)
    devices = {p.device for m in modules for p in m._parameters.values() if p is not None and p.device.type == "cuda"}
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with torch.random.fork_rng(devices=[d.index for d in devices]), _uncompiled(), forgetting(model):
        try:
            torch.backends.mha.set_fastpath_enabled(False)  # it would hide the attention in one fused op
            training = set(map(id, train))
            for m in modules:
                m.training = id(m) in training
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            for m, attributes in zip(modules, before, strict=True):
                vars(m).clear()
                vars(m).update(attributes)
            for container, kept in contents.values():
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(kept)
            for tensor, data in memory:
                if not _same_memory(tensor, data):
                    tensor.data = data


def _same_memory(one: Tensor, other: Tensor) -> bool:
    place = one.data_ptr()
    if place != other.data_ptr() or one.dtype is not other.dtype or one.stride() != other.stride():
        return False
    return one.shape == other.shape and (place != 0 or storage_of(one) == storage_of(other))


def _is_plain(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return type(tensor) in (nn.Parameter, Tensor) and tensor.layout is torch.strided  # type: ignore[union-attr]


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _keep_contents(value: Any, contents: dict[int, tuple[Any, Any]]) -> None:
    """Copy what lies in a container, and in those inside of it: a forward may keep in there what it computed."""
    if isinstance(value, (dict, list, set, deque)) and id(value) not in contents:
        contents[id(value)] = (value, copy.copy(value))
        for inner in value.values() if isinstance(value, dict) else value:
            _keep_contents(inner, contents)


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run compiled modules as they are written; else torch notes that their code cannot be compiled, for good."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and to ask for it would import the compiler
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield

"""Which modules without children need a recording in train mode; each is run on its own to find out.

A stochastic depth or a noise layer reads its mode, and then only multiplies by or adds random numbers elementwise.
Recording the whole model again would double the work without showing any further coupling of channels. A module that
reads other parameters, or does anything else, is not such a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from engine.alternatives.modes import Calls
from engine.errors import TraceError
from engine.program.graph import Node, Value
from engine.program.stored import distinct_modules
from engine.recording.recorder import Recorder
from engine.running.evaluation import Contents, evaluating

__all__ = ["modules_needing_train_mode"]


def modules_needing_train_mode(
    another: Callable[[], Recorder],
    model: nn.Module,
    readers: list[nn.Module],
    calls: Calls,
    entrywise: Callable[[Node], bool],
    contents: Contents,
) -> list[nn.Module]:
    """Return the modules that read their mode and whose train mode has to be recorded.

    Args:
        another: returns a recorder of the model.
        model: the model that contains them.
        readers: the modules.
        calls: calls of the modules without children.
        entrywise: whether a call changes single entries only.
        contents: of the model.
    """
    alone = [(m, arguments) for m in readers if (arguments := calls.arguments(m)) is not None]
    if not alone:
        return readers
    recorder = another()
    names, plain = {id(m): name for name, m in distinct_modules(model).items()}, set()
    with evaluating(model, contents=contents), torch.inference_mode():
        for module, (args, kwargs) in alone:
            if _alters_values_only(recorder, module, args, kwargs, names[id(module)], entrywise):
                plain.add(id(module))
    return [m for m in readers if id(m) not in plain]


def _alters_values_only(
    recorder: Recorder,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    name: str,
    entrywise: Callable[[Node], bool],
) -> bool:
    """Whether all that a module does in train mode is to change single entries at random.

    Args:
        recorder: a recorder of the model, from which the run is dropped again.
        module: in eval mode.
        args: of a call of it.
        kwargs: of that call.
        name: its name.
        entrywise: whether a call changes single entries only.
    """
    mark = recorder.mark()
    try:
        recorder.run(lambda a, k: module(*a, **k), args, dict(kwargs), [name], "eval")
        module.training = True
        recorder.run(lambda a, k: module(*a, **k), args, dict(kwargs), [name], "train")
    except (TraceError, RuntimeError, ValueError, TypeError, IndexError):  # alone it does not run: record all of it
        return False
    finally:
        module.training = False
    nodes = recorder.since(mark).nodes
    runs = {path: [node for node in nodes if node.path == path] for path in ("eval", "train")}
    recorder.drop(mark)
    if [_summary(n) for n in runs["eval"]] == [_summary(n) for n in runs["train"]]:
        return True
    stored = {v.name for n in runs["eval"] for v in n.inputs if v.stored}
    return all(entrywise(node) and _reads_only(node.inputs, stored) for node in runs["train"])


def _summary(node: Node) -> Any:
    return node.op, [(v.shape, v.name) for v in node.inputs], [v.shape for v in node.outputs]


def _reads_only(values: Iterable[Value], stored: set[str | None]) -> bool:
    return all((not v.stored or v.name in stored) and (v.data is None or v.data.numel() == 1) for v in values)

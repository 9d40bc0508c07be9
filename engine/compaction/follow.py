"""Adapt a model to the state dict that it loads: compacted, uncompacted, or compacted differently.

All ways of loading go through one ``load_state_dict`` pre-hook. It runs before any weight is copied, reads from the
state dict's metadata which compactions the weights went through, applies these to the model, and rejects weights that
do not fit before anything is changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from engine.bounds import check_kinds
from engine.compaction.compact import Compaction, separate
from engine.compaction.digest import digest
from engine.compaction.format import KEY, VERSION, upgraded
from engine.compaction.history import Entry, history, is_compacted, same_steps
from engine.compaction.parts import part_entry
from engine.compaction.plan import Plan
from engine.compaction.slices import Unpacked
from engine.errors import CheckpointError, EngineError, PlanError
from engine.program.defaults import own_defaults
from engine.program.stored import stored_tensors
from engine.surgery.spans import check_spans

__all__ = ["Shapes", "adapt", "compactable", "entries", "is_compactable", "joined_entries", "reshape", "shapes_in"]

Shapes = Mapping[str, tuple[int, ...]]
Queue = list[Callable[[], Compaction]]

_ADVICE = "Load the compacted checkpoint to keep it small; further training needs a new optimizer."
_MOST = 10_000  # maximum number of compacted modules in a checkpoint


def compactable(model: nn.Module) -> nn.Module:
    """Let a model adapt to any state dict that it loads, compacted or not.

    ``model.load_state_dict(small.state_dict())`` then first removes from ``model`` what was removed from ``small``. A
    compacted model is always compactable: it grows back, with a warning, to load weights from before its compaction.

    Args:
        model: any module, for instance a LightningModule that contains the compacted model.

    Returns:
        The model.

    Raises:
        CheckpointError: by ``load_state_dict``, if the weights belong to another model; nothing is changed in that
            case.

    Example:
        >>> import engine
        >>> def net():
        ...     return nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 2, 1))
        >>> small, fresh, mask = net(), engine.compactable(net()), torch.tensor([1, 0, 1, 0])
        >>> masks = {"0": {"weight": mask.view(4, 1, 1, 1), "bias": mask}}
        >>> _ = engine.ModelSpeedup(small, torch.randn(2, 1, 4, 4), masks).speedup_model()
        >>> fresh.load_state_dict(small.state_dict())
        <All keys matched successfully>
        >>> fresh[0]
        Conv2d(1, 2, kernel_size=(1, 1), stride=(1, 1))
    """
    check_kinds(compactable, locals())
    if not is_compactable(model):
        model.register_load_state_dict_pre_hook(adapt)
    return model


def is_compactable(model: nn.Module) -> bool:
    """Whether `compactable` was called on the model, or the model was compacted."""
    return any(getattr(hook, "hook", None) is adapt for hook in model._load_state_dict_pre_hooks.values())


def adapt(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    *rest: Any,
    advice: str = _ADVICE,
) -> None:
    """Adapt a module to a state dict before it is loaded; a hook of ``load_state_dict``.

    Args:
        module: the module that loads the state dict.
        state_dict: the state dict to load.
        prefix: prefix of the module's names in the state dict.
        local_metadata: metadata of the module itself.
        rest: further arguments that torch passes to such a hook.
        advice: what to do if the module grows back, for the warning.

    Raises:
        CheckpointError: if the state dict does not fit; the module is left unchanged.
    """
    everything = getattr(state_dict, "_metadata", None) or {prefix[:-1]: local_metadata}
    contents = {name: content for name, meta in everything.items() if (content := meta.get(KEY)) is not None}
    inside = {
        f"{name}.".removeprefix(prefix).removesuffix("."): content
        for name, content in contents.items()
        if f"{name}.".startswith(prefix)
    }
    wanted = joined_entries(inside)
    undo = reshape(module, shapes_in(state_dict, prefix), wanted if inside else None, advice)
    own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
    try:
        check_spans(module, own, strict=False)  # torch does not tell a hook whether it is strict
    except CheckpointError:
        undo()
        raise
    if inside:
        separate(module, own)


def shapes_in(state_dict: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors in a state dict whose names start with a prefix, without the prefix."""
    return {
        name.removeprefix(prefix): tuple(value.shape)
        for name, value in state_dict.items()
        if name.startswith(prefix) and isinstance(value, Tensor)
    }


def _joined(prefix: str, name: str) -> str:
    return ".".join(part for part in (prefix, name) if part)


def entries(content: Any) -> dict[str, Entry]:
    """Return the compactions stored in a checkpoint, by path of the compacted module; reads all versions.

    Raises:
        CheckpointError: if they are damaged, or newer than this version.
    """
    version = content.get("version") if isinstance(content, Mapping) else None
    if type(version) is not int or version < 1:
        raise CheckpointError("It contains no compaction plan: it was not written by `ModelCompaction`.")
    if version > VERSION:
        raise CheckpointError(
            f"Its format {version} is newer than format {VERSION}, the newest that this version of lightning_compress "
            "reads. Install a newer version."
        )
    try:
        if version == 1:
            plans = [] if content["plan"] is None else [content["plan"]]
            return {str(content["target"]): {"plans": plans, "certificates": [content["certificate"]][: len(plans)]}}
        return {
            str(path): {"plans": _listed(entry["plans"]), "certificates": _listed(entry["certificates"])}
            for path, entry in content["compacted"].items()
        }
    except (LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"It is damaged: its compaction plan is incomplete ({error!s}).") from error


def _listed(items: Any) -> list[Any]:
    if not isinstance(items, (list, tuple)):  # such as a tensor of a billion entries
        raise TypeError(f"a {type(items).__name__} instead of a list")
    return list(items)


def joined_entries(contents: Mapping[str, Any]) -> dict[str, Entry]:
    """Merge the compactions stored for parts of a model, by path in the model.

    Args:
        contents: path of the part -> content for `entries`.

    Raises:
        CheckpointError: if they are damaged, or implausibly many.
    """
    entries_by_path: dict[str, Entry] = {}
    for name, content in contents.items():
        entries_by_path |= {_joined(name, path): entry for path, entry in entries(content).items()}
        if len(entries_by_path) > _MOST:
            raise CheckpointError(f"It is damaged: it lists more than {_MOST} compacted modules.")
    return entries_by_path


@own_defaults()
def reshape(
    model: nn.Module, shapes: Shapes, wanted: Mapping[str, Entry] | None, advice: str = _ADVICE
) -> Callable[[], None]:
    """Adapt a model to the shapes of weights; all or nothing.

    Args:
        model: a model, compacted or not.
        shapes: shapes of the weights to load, by name.
        wanted: path in the model -> compactions that the weights went through; None if unknown: the model is then left
            alone, or grows back if it is compacted and the weights do not fit.
        advice: what to do if it grows back, for the warning.

    Returns:
        A function that undoes the change.

    Raises:
        CheckpointError: if the weights do not fit; the model is left unchanged.
    """
    if wanted is None:
        if not is_compacted(model) or _misfit(model, shapes) is None:
            return lambda: None
    before = {name: tensor.shape for name, tensor in stored_tensors(model).items() if not is_lazy(tensor)}
    changes: list[Compaction] = []

    def undo() -> None:
        for change in reversed(changes):
            change.rollback()

    try:
        present = {path: _upgraded(entry) for path, entry in (wanted or {}).items()}
        _in_turn(_growths(model, present), changes)
        _in_turn(_compactions(model, present), changes)
        wrong = _misfit(model, shapes)
        if wrong is not None:
            raise CheckpointError(f"The weights do not fit {type(model).__name__}: {wrong}")
    except (EngineError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        undo()
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"The weights belong to another model than {type(model).__name__}: {error}") from error
    except BaseException:
        undo()
        raise
    _warn_of_growth(model, before, advice)
    return undo


def _upgraded(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with its plans in the current format."""
    return {**entry, "plans": [upgraded(plan, Plan) for plan in entry["plans"]]}


def _in_turn(queues: list[Queue], changes: list[Compaction]) -> None:
    """Apply changes of modules, in order for each module; modules may be nested, so apply whichever fits next."""
    while queues := [queue for queue in queues if queue]:
        failures: list[PlanError] = []
        for queue in queues:
            try:
                change = queue[0]()
            except PlanError as error:
                failures.append(error)
                continue
            changes.append(change)
            change.commit()
            queue.pop(0)
        if len(failures) == len(queues):
            raise failures[0]


def _growths(model: nn.Module, wanted: Mapping[str, Entry]) -> list[Queue]:
    """Return changes that undo compactions of each module beyond those that it shares with the wanted ones."""

    def grow(module: nn.Module) -> Compaction:
        change = Compaction(module)
        change.add_growth()
        return change

    queues: list[Queue] = []
    for path, module in model.named_modules():
        steps = history(module)
        in_common = same_steps(steps, wanted[path]["plans"]) if path in wanted else 0
        queues.append([lambda m=module: grow(m)] * (len(steps) - in_common))  # type: ignore[misc]
    return queues


def _compactions(model: nn.Module, wanted: Mapping[str, Entry]) -> list[Queue]:
    """Return changes that apply the remaining wanted compactions to each module."""
    queues: list[Queue] = []
    unpacked = Unpacked()
    for path, entry in wanted.items():
        module = _submodule(model, path)
        if _is_part_with(module, entry):
            continue
        plans = [Plan.from_state_dict(state, unpacked).structure() for state in entry["plans"]]
        certificates = entry["certificates"]
        queues.append(
            [
                lambda m=module, p=plan, c=certificate: _certified(p, m, c)  # type: ignore[misc]
                for plan, certificate in list(zip(plans, certificates, strict=True))[len(history(module)) :]
            ]
        )
    return queues


def _is_part_with(module: nn.Module, entry: Entry) -> bool:
    """Whether a module is part of a compacted model, and its share of the plans is the wanted one."""
    share = None if history(module) else part_entry(module)
    return share is not None and digest(share["plans"]) == digest(list(entry["plans"]))


def _certified(plan: Plan, module: nn.Module, certificate: Mapping[str, Any] | None) -> Compaction:
    change = plan.prepare(module)
    change.add_history(plan.state_dict(), certificate)
    return change


def _submodule(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise PlanError(f"The plan belongs to another model: {type(model).__name__} has no module {path!r}.") from error


def _misfit(model: nn.Module, shapes: Shapes) -> str | None:
    """Return a sentence that describes the first mismatch, or None."""
    for name, tensor in stored_tensors(model).items():
        shape = None if is_lazy(tensor) else shapes.get(name, tuple(tensor.shape))
        if shape is not None and shape != tuple(tensor.shape):
            return f"{name!r} has shape {shape} in the state dict, but {tuple(tensor.shape)} in the model."
    return None


def _warn_of_growth(model: nn.Module, before: Mapping[str, Any], advice: str) -> None:
    now = stored_tensors(model)
    grown = [name for name, shape in before.items() if name in now and now[name].numel() > shape.numel()]
    if grown:
        name = grown[0]
        warnings.warn(
            f"The weights to be loaded are from before a compaction of {type(model).__name__}, so it grows back to its "
            f"old size ({name!r} from {list(before[name])} to {list(now[name].shape)}, and {len(grown) - 1} more). "
            f"{advice}",
            stacklevel=2,
        )

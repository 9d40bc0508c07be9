"""Measure how a model's metric responds to pruning one layer at a time, and derive amounts to prune."""

from __future__ import annotations

import math
import operator
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from engine.bounds import check_kinds
from engine.errors import InputError
from engine.groups import Group, dependency_groups
from engine.program.defaults import own_defaults
from engine.progress import bar as progress_bar
from engine.sensitivity.importance import CRITERIA, Masking, mask_groups, mask_layer, masked
from engine.sensitivity.journal import Journal, Key, fingerprint
from engine.sensitivity.metric import Metric
from engine.sensitivity.table import DIGITS, SensitivityTable, columns, fraction

__all__ = ["SensitivityAnalysis", "SensitivityTable"]

_LEVEL = "level"
_BETTER = {"minimize": "higher", "dropped": "higher", "maximize": "lower", "raised": "lower"}
_STOPS: Mapping[str, Callable[[float, float, float], bool]] = {
    "minimize": lambda metric, baseline, value: metric < value,
    "maximize": lambda metric, baseline, value: metric > value,
    "dropped": lambda metric, baseline, value: metric < baseline - value,
    "raised": lambda metric, baseline, value: metric > baseline + value,
}


def _never(metric: float, baseline: float, value: float) -> bool:
    return False


@dataclass(frozen=True, eq=False)
class _Target:
    """What is pruned together: a layer, or all layers that are coupled with it.

    Attributes:
        name: name of the layer, or of the layers' groups.
        layers: layers that share this row of the table.
        masking: creates the function sparsity -> masks, on first use.
    """

    name: str
    layers: tuple[str, ...]
    masking: Callable[[], Masking]


class SensitivityAnalysis:
    """Prune one layer at a time at increasing sparsity, and measure the metric.

    The model is pruned in place, one layer at a time while all others keep their weights, and restored afterwards, even
    if ``val_func`` raises. Channels are masked in the layer's weight and bias.

    Args:
        model: the model.
        val_func: returns the metric, a number; its arguments are passed to `analysis`.
        sparsities: fractions in [0, 1) to prune of each layer; 0.1, 0.2 … 0.9 by default.
        prune_type: order in which channels are pruned: ``"l1"``, ``"l2"`` or ``"fpgm"``; ``"level"`` prunes single
            weights.
        early_stop_mode: stop a layer's sweep when the metric is below (``"minimize"``) or above (``"maximize"``) a
            value, or has fallen (``"dropped"``) or risen (``"raised"``) by more than that value; the last metric is
            recorded.
        early_stop_value: the value.
        group: also prune all layers coupled with the layer, and their norms, as removing channels requires; otherwise
            the other branch of a sum hides the damage. Layers whose channels are frozen are omitted and listed in
            ``skipped``.
        dummy_input: input of the model; required for ``group``.
        results_path: file to which each metric is appended immediately, one JSON object per line. A later analysis with
            the same weights and settings reuses them. Use one file per ``val_func`` and its data.
        progress: show the progress of what takes more than two seconds, on rank 0.

    Attributes:
        sensitivities: the table of all results.
        ori_metric: metric of the unpruned model.
        already_pruned: layer -> fraction pruned already; sparsities are relative to the remainder.
        skipped: layer -> why it is omitted.

    Raises:
        InputError: for invalid arguments.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
        >>> analyzer = SensitivityAnalysis(net, lambda model: float(model[0].weight.count_nonzero()), [0.25, 0.5])
        >>> dict(analyzer.analysis(val_args=[net], specified_layers=["0"]))
        {'0': {0.25: 27.0, 0.5: 18.0}}

    NNI: ``nni.compression.pytorch.utils.SensitivityAnalysis``.
    """

    @own_defaults()
    def __init__(
        self,
        model: nn.Module,
        val_func: Callable[..., Any],
        sparsities: Sequence[float] | None = None,
        prune_type: str = "l1",
        early_stop_mode: str | None = None,
        early_stop_value: float | None = None,
        *,
        group: bool = False,
        dummy_input: Any = None,
        results_path: str | os.PathLike[str] | None = None,
        progress: bool = True,
    ) -> None:
        _check(model, val_func, prune_type, early_stop_mode, early_stop_value, group)
        check_kinds(SensitivityAnalysis.__init__, locals())
        self.model, self.val_func = model, val_func
        self.sparsities = columns(sparsities)
        self.prune_type, self.early_stop_mode, self.early_stop_value = prune_type, early_stop_mode, early_stop_value
        self.group, self.progress = group, progress
        self.target_layer = {n: m for n, m in model.named_modules() if isinstance(m, (_ConvNd, nn.Linear))}
        if not self.target_layer:
            raise InputError(f"{type(model).__name__} has neither convolutions nor linear layers to analyse.")
        self.already_pruned = dict.fromkeys(self.target_layer, 0.0)
        self.ori_metric: float | None = None
        self.skipped: dict[str, str] = {}
        self._groups = self._coupled(dummy_input) if group else {}
        self._rows: dict[str, dict[float, float]] = {}
        self._journal = Journal(results_path)
        self._fingerprint = ""

    @property
    def layers_count(self) -> int:
        """Number of layers."""
        return len(self.target_layer)

    @property
    def sensitivities(self) -> SensitivityTable:
        """All results, in the order of the model."""
        rows = {name: self._rows[name] for name in self.target_layer if name in self._rows}
        baseline = math.nan if self.ori_metric is None else self.ori_metric
        return SensitivityTable(rows, self.sparsities, baseline, _BETTER.get(self.early_stop_mode or ""))

    @own_defaults()
    def analysis(
        self,
        val_args: Sequence[Any] | None = None,
        val_kwargs: Mapping[str, Any] | None = None,
        specified_layers: Sequence[str] | None = None,
        *,
        shard: tuple[int, int] | None = None,
    ) -> SensitivityTable:
        """Measure the metric of all layers and sparsities.

        Args:
            val_args: positional arguments of ``val_func``.
            val_kwargs: keyword arguments of ``val_func``.
            specified_layers: names of layers to analyse; all by default.
            shard: (index, count) analyses only the index-th of count parts, to divide the work among processes, each
                with its own ``results_path``; `load_results` merges them.

        Returns:
            ``sensitivities``: layer -> sparsity -> metric.

        Raises:
            InputError: for unknown layers, invalid arguments, or a metric that is not a number. Exceptions from
                ``val_func`` propagate.
        """
        if not isinstance(val_args or [], (list, tuple)) or not isinstance(val_kwargs or {}, Mapping):
            raise InputError("`val_args` is a list of arguments for `val_func`, `val_kwargs` a mapping of these.")
        targets = _share(self._targets(specified_layers), shard)
        metric = Metric(self.val_func, val_args or (), val_kwargs or {})
        self._recognise()
        with progress_bar(len(targets) * len(self.sparsities), "Sensitivity", "evaluations", self.progress) as bar:
            self.ori_metric = self._evaluate(None, 0.0, dict, metric)
            for target in targets:
                row = self._sweep(target, metric, self.ori_metric, bar)
                self._rows.update({layer: dict(row) for layer in target.layers})
        return self.sensitivities

    def load_results(self, *paths: str | os.PathLike[str], required: bool = True) -> None:
        """Read results of other processes, which `analysis` then reuses.

        Args:
            paths: their ``results_path``.
            required: whether each file must contain results for these weights and settings.

        Raises:
            InputError: if a file is missing or invalid, or contains no results for these weights and settings.
        """
        weights = fingerprint(self.model)
        for path in map(Path, paths):
            if not path.is_file():
                raise InputError(f"There is no file {str(path)!r} with results.")
            keys = self._journal.read(path)
            if required and not any(key.setting == (weights, self.prune_type, self.group) for key in keys):
                raise InputError(f"{str(path)!r} holds no results of a model with these weights and these settings.")

    def export(self, filepath: str | os.PathLike[str]) -> None:
        """Write the table as CSV: the header ``layername,0.1,0.2…``, then a row per layer, shorter if it was stopped.

        Args:
            filepath: file to write.
        """
        self._finished().export(filepath)

    def suggest(self, budget: float, better: str | None = None) -> dict[str, float]:
        """Return how much of each layer can be pruned; see `SensitivityTable.suggest`.

        Args:
            budget: allowed deterioration of the metric.
            better: ``"higher"`` or ``"lower"`` metrics are better; None: derived from the table.

        Raises:
            InputError: before `analysis`, or if it is unclear which metrics are better.
        """
        return self._finished().suggest(budget, better)

    def plot(self, path: str | os.PathLike[str] | None = None, kind: str = "heatmap", *, writer: Any = None) -> Any:
        """Plot the table; see `SensitivityTable.plot`.

        Args:
            path: image file; its extension determines the format. None: no file.
            kind: ``"heatmap"`` or ``"curves"``.
            writer: a TensorBoard ``SummaryWriter``, or None.
        """
        return self._finished().plot(path, kind, writer=writer)

    def update_already_pruned(self, layername: str, ratio: float) -> None:
        """Declare that a fraction of a layer is pruned already; sparsities are then relative to the remainder.

        Args:
            layername: a layer of the model.
            ratio: fraction in [0, 1).
        """
        self._check_layers([layername])
        self.already_pruned[layername] = fraction(ratio, "`ratio`")

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load other weights into the model, from which the next analysis starts.

        Args:
            state_dict: a state dict of the model.

        Raises:
            InputError: if names or shapes do not match the model; nothing is changed in that case.
        """
        check_kinds(SensitivityAnalysis.load_state_dict, locals())
        have = {name: tuple(value.shape) for name, value in self.model.state_dict().items()}
        new_shapes = {name: tuple(value.shape) for name, value in state_dict.items()}
        wrong = sorted(name for name in have.keys() | new_shapes.keys() if have.get(name) != new_shapes.get(name))
        if wrong:
            raise InputError(f"The state dict does not fit the model at {wrong[0]!r} ({len(wrong)} places in all).")
        self.model.load_state_dict(state_dict)

    # ------------------------------------------------------------------ what to prune

    def _finished(self) -> SensitivityTable:
        if not self._rows:
            raise InputError("Nothing has been analysed yet; call `analysis` first.")
        return self.sensitivities

    def _check_layers(self, names: Sequence[str]) -> None:
        unknown = [name for name in names if name not in self.target_layer]
        if unknown:
            some = ", ".join(list(self.target_layer)[:8])
            raise InputError(f"There is no convolution or linear layer {unknown[0]!r}; the layers are {some} …")

    def _coupled(self, dummy_input: Any) -> dict[str, tuple[Group, ...]]:
        """Return layer -> the groups that contain its channels."""
        if dummy_input is None:
            raise InputError("`group=True` needs `dummy_input`, to see which layers are coupled.")
        groups_by_layer: dict[str, tuple[Group, ...]] = {}
        for group in dependency_groups(self.model, dummy_input):
            for layer in group.layers:
                groups_by_layer[layer] = (*groups_by_layer.get(layer, ()), group)
                if group.reason is not None:
                    self.skipped[layer] = group.reason
        for layer in self.target_layer.keys() - groups_by_layer.keys():
            self.skipped[layer] = "it did not run"
        return groups_by_layer

    def _targets(self, specified: Sequence[str] | None) -> list[_Target]:
        asked = [specified] if isinstance(specified, str) else specified
        self._check_layers(asked or ())
        names = [name for name in self.target_layer if asked is None or name in asked]
        if not self.group:
            return [_Target(name, (name,), partial(self._layer, name)) for name in names]
        frozen = [name for name in names if name in self.skipped]
        if asked is not None and frozen:
            raise InputError(f"The channels of {frozen[0]!r} have to stay ({self.skipped[frozen[0]]}).")
        together: dict[tuple[str, ...], list[str]] = {}
        for name in names:
            if name not in self.skipped:
                together.setdefault(tuple(group.name for group in self._groups[name]), []).append(name)
        return [
            _Target(" + ".join(groups), tuple(layers), partial(self._units, layers[0]))
            for groups, layers in together.items()
        ]

    def _layer(self, name: str) -> Masking:
        return mask_layer(self.model, name, CRITERIA.get(self.prune_type))

    def _units(self, layer: str) -> Masking:
        return mask_groups(self._groups[layer], self.model, CRITERIA[self.prune_type])

    # ------------------------------------------------------------------ evaluation

    def _recognise(self) -> None:
        """Compute the fingerprint of the weights, so that results of other weights are not reused."""
        self._fingerprint = fingerprint(self.model)
        metrics = self._journal.metrics
        if metrics and not any(key.setting == (self._fingerprint, self.prune_type, self.group) for key in metrics):
            warnings.warn(
                f"The results in {str(self._journal.path)!r} come from other weights or settings; everything is "
                "evaluated again.",
                stacklevel=3,
            )

    def _sweep(self, target: _Target, metric: Metric, baseline: float, bar: Any) -> dict[float, float]:
        row: dict[float, float] = {}
        masking: list[Masking] = []

        def masks(sparsity: float) -> Mapping[str, Tensor]:
            if not masking:  # scores take time, and are not needed for cached results
                masking.append(target.masking())
            return masking[0](sparsity)

        pruned = max(self.already_pruned[layer] for layer in target.layers)
        stop = _STOPS.get(self.early_stop_mode or "", _never)
        for place, sparsity in enumerate(self.sparsities):
            real = round(pruned + (1 - pruned) * sparsity, DIGITS)
            row[sparsity] = self._evaluate(target.name, real, partial(masks, real), metric)
            stopped = stop(row[sparsity], baseline, self.early_stop_value or 0.0)
            if bar is not None:
                bar.update(len(self.sparsities) - place if stopped else 1)
            if stopped:
                break
        return row

    def _evaluate(
        self, layer: str | None, sparsity: float, masks: Callable[[], Mapping[str, Tensor]], metric: Metric
    ) -> float:
        key = Key(self._fingerprint, self.prune_type, self.group, layer, sparsity)
        if key in self._journal.metrics:
            return self._journal.metrics[key]
        place = "the un-pruned model" if layer is None else f"{layer!r} at sparsity {sparsity}"
        with masked(self.model, masks()):
            value = metric(place)
        self._journal.add(key, value)
        return value


def _check(model: Any, val_func: Any, prune_type: Any, mode: Any, value: Any, group: bool) -> None:
    checks = {
        f"`model` is a module, not {type(model).__name__}.": isinstance(model, nn.Module),
        f"`val_func` is a function that returns the metric, not {type(val_func).__name__}.": callable(val_func),
        f"`prune_type` is one of {', '.join([*sorted(CRITERIA), _LEVEL])}; got {prune_type!r}.": (
            prune_type in (*CRITERIA, _LEVEL)
        ),
        "`group=True` prunes channels; with 'level', which prunes single weights, nothing is coupled.": (
            not group or prune_type in CRITERIA
        ),
        f"`early_stop_mode` is one of {', '.join(_STOPS)}; got {mode!r}.": mode is None or mode in _STOPS,
        f"`early_stop_mode` and `early_stop_value` go together; got {mode!r} and {value!r}.": (
            (mode is None) == (value is None)
        ),
        f"`early_stop_value` is a number; got {value!r}.": (
            value is None or isinstance(value, (int, float)) and not math.isnan(value)
        ),
    }
    for message, holds in checks.items():
        if not holds:
            raise InputError(message)


def _share(targets: list[_Target], shard: tuple[int, int] | None) -> list[_Target]:
    if shard is None:
        return targets
    try:
        index, count = (operator.index(n) for n in shard)
    except (TypeError, ValueError) as error:
        raise InputError(f"`shard` is (index, count), two integers; got {shard!r}.") from error
    if not 0 <= index < count:
        raise InputError(f"`shard` is (index, count) with 0 <= index < count; got {shard!r}.")
    return targets[index::count]

"""The dispatch mode behind `engine.trace`: turns op calls into nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from engine.alternatives.data_decisions import DataDecisions
from engine.alternatives.mutable_state import MutableState
from engine.errors import TraceError
from engine.flow.coverage import CoverageTracer
from engine.flow.effects import Functions
from engine.flow.forward_arguments import ForwardArguments
from engine.flow.idle_conditions import places_of_idle_conditions
from engine.observations.assumptions import Assumptions
from engine.observations.recorded_runs import RecordedRuns
from engine.program.graph import Origin, walk_values
from engine.program.signature import Signature, signature, without_out
from engine.program.storages import storage_of
from engine.program.stored import distinct_modules, unsettled
from engine.program.trees import list_tensors, map_tensors, results_in, tensors_in
from engine.recording.buffer_vectors import BufferVectors, VectorCall
from engine.recording.versions import Versions
from engine.running.escapes import outliving_tensors
from engine.running.fakes import Fakes
from engine.running.opaque_modules import OpaqueCall
from engine.running.provenance import METADATA_FUNCTIONS, QUERY_PREFIXES, Provenance
from engine.running.run_length import RunLength
from engine.running.tensor_backup import TensorBackup
from engine.source.model_code import code_of, source_files
from engine.unrecorded.unreached import assumptions_about_unreached_code

__all__ = ["MODULE", "Recorder"]

MODULE = "engine::module"
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class Recorder(Versions, TorchDispatchMode):
    """Records one or more runs of a model into one program.

    Args:
        model: gives the names of parameters and buffers, which are known by identity.
        fakes: substitutes tensors without data, or None to run on the real ones.
        changing: the tensors whose numbers may change between calls; none by default.

    Attributes:
        data_decisions: the decisions of code on the numbers in tensors, in the latest run.
    """

    def __init__(self, model: nn.Module, fakes: Fakes | None, changing: MutableState | None = None) -> None:
        TorchDispatchMode.__init__(self)  # type: ignore[no-untyped-call]
        Versions.__init__(self, model, changing)
        self._maker = fakes
        self.data_decisions = DataDecisions(lambda: self._stack[-1])
        self._length = RunLength()
        own, entry, step = source_files(model), code_of(type(model).forward), self._length.step
        kept = self._kept, self._contents, self._running
        self.coverage = CoverageTracer(own, *kept, entry, lambda t: self._fakes.get(id(t), t), step, self.origins)
        self._provenance = Provenance(self._peek, self, self.coverage, self.data_decisions, self._reassigned)

    # ------------------------------------------------------------------ a run

    def reached_new_code(self) -> bool:  # noqa: D102 -- as in the base class
        return self.coverage.caught_new_error or self.coverage.opened_branches or self._provenance.reached_new_code

    def _forget(self) -> None:
        super()._forget()
        self._fakes: dict[int, Tensor] = {}
        self._overwritten = TensorBackup(self._tensors)
        self._vectors = BufferVectors(self._names)
        self._inside: OpaqueCall | None = None

    def run(self, call: Callable[[Any, Any], Any], args: Any, kwargs: Any, stack: list[str], path: str) -> None:
        """Record ``call(args, kwargs)``; ``stack`` has the name of the running module on top."""
        self._forget()
        self._stack, self._path = stack, path
        self.data_decisions.restart()
        args, kwargs = (map_tensors(t, lambda t: self._substitute(t, is_input=True)) for t in (args, kwargs))
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) not in self._names and id(tensor) not in self._owned:  # else a parameter of the model
                self._current[id(tensor)] = value = self._value(tensor)
                self._place(tensor)
                self._leaves.add(id(tensor))
                self._inputs.append(value)
        with unsettled(self._model), self._length.run(closely=bool(self.data_decisions.answers)):
            try:
                with self._provenance, self, self.coverage.watching():
                    out = self._provenance.leave(call(args, kwargs))
            finally:
                self._overwritten.restore()
                self._guards += self._provenance.take_guards()
            self._leave_with(out)

    def _leave_with(self, out: Any) -> None:
        """Note the outputs: returned tensors, others that outlive the call, and existing ones that were written to."""
        self._outputs += [self._read(t) for t in tensors_in(out)]
        leaves = {key: t for key, t in self._alive.items() if key in self._leaves}
        for tensor in [t for key, t in leaves.items() if key in self._homes and self._homes[key].storage.version]:
            self._exit(tensor, "is written into a tensor that existed before the call")
        stored = self._names.keys() | self._owned.keys() | leaves.keys() | self._fakes.keys()
        stand_ins = set(map(id, self._fakes.values()))
        held = outliving_tensors(self._alive, stored | {id(t) for t in tensors_in(out)}, self._hidden, stand_ins)
        weights = self._maker is None
        for tensor in held:
            key = id(tensor)
            if key not in self._current:
                if key in self._hidden:
                    raise TraceError(
                        "A tensor that a replaced module computes internally outlives the call; exclude the module."
                    )
            elif key not in stored and not self._is_stored(self._read(tensor)):
                self._exit(tensor, "outlives the call, although forward does not return it")
            else:
                weights = weights or (key not in stand_ins and self._is_stored(self._read(tensor)))
        if weights:
            self._weights |= set(self._computed_weights())

    def _computed_weights(self) -> Iterator[tuple[str, str]]:
        """Yield module and name of each attribute with tensors that were computed from parameters and buffers alone."""
        for name, module in distinct_modules(self._model).items():
            for key, held in vars(module).items():
                holds = key not in _OF_EVERY_MODULE and next(tensors_in(held), None) is not None
                if holds and all(id(t) in self._current and self._is_stored(self._read(t)) for t in results_in(held)):
                    yield name, key

    def has_computed(self, tensor: Tensor) -> bool:
        """Whether an op of the current run, or of the one that has just ended, computed a tensor."""
        value = self._current.get(id(tensor))
        return value is not None and value.producer is not None

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is part of the program, and no opaque module is running."""
        if self._inside is not None:
            return False
        key = id(tensor)
        return key in self._current or key in self._fakes or key in self._names or key in self._owned

    def read(self, tensor: Tensor) -> None:
        """Note that Python reads the numbers in a tensor: all of it is used, and whatever depends on it varies."""
        site = self._provenance.site
        self._provenance.reads = True
        self._decisions.setdefault(site, None)
        self._exit(tensor if self._maker is None else self._substitute(tensor), f"is read by the code ({site})")

    def another(self) -> Recorder:
        """Return an empty recorder of the same model; code that runs in it counts as having run here, too."""
        recorder = Recorder(self._model, self._maker, self._changing)
        recorder.coverage.functions, recorder.coverage.unread = self.coverage.functions, self.coverage.unread
        recorder.coverage.package_lines = self.coverage.package_lines
        return recorder

    def assumptions(self, args: Any, kwargs: Any, functions: Functions) -> Assumptions:
        """Return the assumptions about code that no run reached.

        Args:
            args, kwargs: of the example.
            functions: effects of torch's functions on the entries of tensors.
        """
        declared = (lambda name: False) if self._changing is None else self._changing.declared
        runs = RecordedRuns(
            modules=distinct_modules(self._model),
            coverage=self.coverage,
            nodes=self._nodes,
            values=self._values,
            guards=self._guards,
            sized=self.others.places(),
            stored={name: self._stored[own] for name, own in self._aliases.items() if own in self._stored},
            parameters={n for n, t in self._tensors.items() if isinstance(t, nn.Parameter) and t.numel()},
            of_entries=self.coverage.codes_of_entries,
            state=self._changing,
        )
        arguments = ForwardArguments(self._model, args, kwargs, declared, runs.sized)
        return assumptions_about_unreached_code(runs, arguments, declared, functions)

    def assume_unreached(self, args: Any, kwargs: Any, functions: Functions) -> None:
        """Add to the program what code that no run reached could do.

        Args:
            args, kwargs, functions: as for `assumptions`.
        """
        assumptions = self.assumptions(args, kwargs, functions)
        outputs = {value.index for value in self._outputs}
        for value, reason in assumptions.used.values():
            if value.index not in outputs:
                self._exits[value.index] = reason
                self._outputs.append(value)
        self._unsettled = dict.fromkeys(self.others.carried(self._nodes), True)
        self._unsettled |= {value.index: zeros_stay for value, zeros_stay in assumptions.varying.values()}
        self._interchangeable = tuple(tuple(value.index for value in own) for own in assumptions.interchangeable)
        self._whole_along = {index: dims for index, (_, dims) in assumptions.whole_along.items()}
        doubted = assumptions.doubted.items()
        self._uncertain |= {index: (*self._uncertain.get(index, ()), *numbers) for index, numbers in doubted}
        self.notes += assumptions.notes
        idle = places_of_idle_conditions(self.coverage.functions.values(), self._nodes, functions)
        self._guards = [guard for guard in self._guards if guard.place not in idle]

    # ------------------------------------------------------------------ an op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op; record it if it reads the inputs, a parameter, or something computed from these."""
        with torch._C.DisableTorchFunction():  # vmap calls ops with the model's function modes on, and ours
            return self._op(func, args, kwargs or {})

    def _op(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._length.step()
        what = signature(func)
        if what.writes:
            written = [what.bind(args, kwargs)[name] for name in what.writes]
            self._overwritten.keep(t for t in written if not isinstance(t, FakeTensor))
        if not what.recorded or not self._relevant(what, func, list_tensors((args, kwargs))):
            out = self._beside(self._keep_unrecorded(func(*args, **kwargs)), args, kwargs)
            numbers = tuple(self._provenance.numbers)
            self._vectors.add(VectorCall(what, func, args, kwargs, out, numbers, self._provenance.site))
            return out
        if self._inside is not None:
            return self._unseen(self._inside, what, func, args, kwargs)
        for call in list(self._vectors.needed_for(func, args, kwargs)):
            self._record_vector(call)
        args, kwargs = map_tensors(args, self._substitute), map_tensors(kwargs, self._substitute)
        bound = what.bind(args, kwargs)
        values = map_tensors(bound, self._read)
        out = func(*args, **kwargs) if self._maker is None else self._maker.run(func, args, kwargs)
        if self._maker is None:
            self._length.compute(out)
        written = [bound[name] for name in what.writes if isinstance(bound[name], Tensor)]
        plain = without_out(func)
        if plain is None:
            self._add(what.op, func, bound, values, written, out)
        else:
            self._add_and_copy(what.op, plain, bound, values, written)
        return out

    def _add_and_copy(
        self, op: str, func: Any, bound: Mapping[str, Any], values: dict[str, Any], written: list[Tensor]
    ) -> None:
        """Add a call that writes to `out` arguments as a call that returns its results, which are then copied.

        The previous content of such an argument is no operand, but its size has to remain that of the result.
        """
        names = signature(func).names
        results = [torch.empty_like(tensor) for tensor in written]
        self._add(op, func, {n: bound[n] for n in names}, {n: values[n] for n in names}, [], results)
        before = {id(bound[name]): values[name] for name in bound.keys() - names}
        for tensor, result in zip(written, results, strict=True):
            self._copy(before[id(tensor)], self._read(result), tensor)

    def _record_vector(self, call: VectorCall) -> None:
        """Record a call on buffers alone, after it has run."""
        provenance = self._provenance
        now = provenance.numbers, provenance.site
        provenance.numbers, provenance.site = list(call.numbers), call.site
        args, kwargs = map_tensors(call.args, self._substitute), map_tensors(call.kwargs, self._substitute)
        bound = call.signature.bind(args, kwargs)
        values = map_tensors(bound, self._read)
        out = call.out if self._maker is None else self._maker.run(call.func, args, kwargs)
        self._add(call.signature.op, call.func, bound, values, [], out)
        if self._maker is not None:
            self._fakes[id(call.out)] = out
        self._hold(call.out)
        provenance.numbers, provenance.site = now

    # ------------------------------------------------------------------ a module whose ops are not recorded

    def enter(self, module: nn.Module) -> None:
        """Stop recording: the module becomes one node, whatever it does inside."""
        if self._inside is None:
            self._inside = OpaqueCall(module)
        elif self._inside.module is module:
            self._inside.depth += 1

    def leave(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """Resume recording, with a node that reads everything the module could."""
        inside = self._inside
        if inside is None or not inside.left(module):
            return
        self._inside, self._provenance.numbers = None, []
        with _disable_current_modes(), torch._C.DisableTorchFunction():  # what follows is not part of the program
            self._whole(inside, module, args, kwargs, out)

    def _whole(self, inside: OpaqueCall, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        self._hidden.update(inside.intermediates)
        arguments, own = (map_tensors(t, self._substitute) for t in ((args, dict(kwargs)), inside.own()))
        others = {id(t): t for t in (*own, *inside.reads.values())}
        for tensor in tensors_in(arguments):
            others.pop(id(tensor), None)
        bound = {"args": arguments[0], "kwargs": arguments[1], "others": list(others.values()), "module": module}
        values = map_tensors(bound, self._read)
        written = inside.changed(tensors_in((bound["others"], arguments)))
        values["results"] = inside.results(written, list(tensors_in(out)), lambda t: self._read(t).stored)
        self._add(MODULE, None, bound, values, written, out)

    def _unseen(self, inside: OpaqueCall, what: Signature, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = map_tensors(args, self._substitute), map_tensors(kwargs, self._substitute)
        for tensor in tensors_in((args, kwargs)):
            value = self._peek(tensor)
            if value is not None and value.data is None:
                inside.reads[id(tensor)] = tensor
        out = func(*args, **kwargs) if self._maker is None else self._maker.run(func, args, kwargs)
        bound = what.bind(args, kwargs)
        inside.written |= {storage_of(bound[name]) for name in what.writes if isinstance(bound[name], Tensor)}
        inside.intermediates.update((id(t), t) for t in tensors_in(out) if id(t) not in self._current)
        return out

    def _keep_unrecorded(self, out: Any) -> Any:
        return out

    def _beside(self, out: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an op outside the program; it varies if an input or memory that was read may vary."""
        if self._provenance.reads and any(isinstance(argument, torch.UntypedStorage) for argument in args):
            for tensor in tensors_in(out):
                self.adopt(tensor)
        if self._changing is not None and any(map(self._may_change, tensors_in((args, kwargs)))):
            self._changing.add_computed(tensors_in(out))
        return out

    def _relevant(self, what: Signature, func: Any, tensors: Sequence[Tensor]) -> bool:
        for tensor in tensors:
            if type(tensor) is FakeTensor or id(tensor) in self._current or id(tensor) in self._fakes:
                return True
            if isinstance(tensor, FakeTensor) or self._is_weight(tensor) or (what.writes and id(tensor) in self._names):
                return True
        drawn = torch.Tag.nondeterministic_seeded in func.tags  # and a factory whose size follows a shape: no constants
        return (drawn and not self._in_train_mode) or (not tensors and self._provenance.tagged)

    def _substitute(self, tensor: Tensor, is_input: bool = False) -> Tensor:
        if self._maker is None or isinstance(tensor, FakeTensor):
            return tensor
        fake = self._fakes.get(id(tensor))
        if fake is None:
            fake = (self._maker.of_stored if id(tensor) in self._names else self._maker.of)(tensor)
            self._fakes[id(tensor)] = fake
            self._hold(tensor, fake)
            if id(tensor) in self._names:
                self._owned[id(fake)] = self._names[id(tensor)]
            elif not is_input and not isinstance(tensor, nn.Parameter) and id(tensor) not in self._current:
                if not self._varies(tensor):
                    self._constants(tensor, fake)
        return fake

    def assign(self, tensor: Tensor, data: Tensor) -> None:
        """Perform ``tensor.data = data``: from now on the tensor stands for other memory, and so for another value.

        A real tensor with a substitute keeps its own memory, or the model would lose its weights.
        """
        self._written.update(filter(None, [self._names.get(id(tensor))]))
        if self._maker is None or isinstance(tensor, FakeTensor):
            with _disable_current_modes():  # torch asks whether they are compatible
                tensor.data = data
            self._current[id(tensor)] = self._read(data)
            self._place(tensor)
        else:
            self._fakes[id(tensor)] = self._substitute(data)
            self._hold(tensor)

    def _add(
        self, op: str, func: Any, bound: Mapping[str, Any], values: dict[str, Any], written: list[Tensor], out: Any
    ) -> None:
        inputs = tuple(walk_values(values))
        out_tensors, arguments = list_tensors(out), list_tensors(bound)
        if not written and len(out_tensors) == 1 and any(out_tensors[0] is t for t in arguments):
            return  # nothing happened: the op gave its input back
        fresh = out_tensors
        if written:
            fresh = [t for t in out_tensors if not any(storage_of(t) == storage_of(w) for w in written)]
        origin = None if written else Origin.of(op, func, values, inputs)
        outputs = tuple(self._value(t, producer=len(self._nodes), origin=origin) for t in (*written, *fresh))
        if self._maker is None:
            self.data_decisions.note_sizes(func, inputs, outputs)
        sizes = self._sizes(func, values)
        node = self._emit(op, func, values, sizes, inputs, outputs)
        for tensor in () if outputs or op in METADATA_FUNCTIONS or op.startswith(QUERY_PREFIXES) else arguments:
            self.read(tensor)
        for tensor, value in zip(written, outputs, strict=False):
            self._write(tensor, value)
        for position, tensor in enumerate(fresh):
            self._current[id(tensor)] = outputs[len(written) + position]
            self._place(tensor, node, len(written) + position, self._parent(tensor, arguments))
        for tensor in out_tensors:  # an in-place op may return another object for the same memory
            if id(tensor) not in self._current:
                self._current[id(tensor)] = outputs[0]
                self._homes[id(tensor)] = self._homes[id(written[0])]
                self._hold(tensor)

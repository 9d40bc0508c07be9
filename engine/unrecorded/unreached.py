"""What code that no recording ran could do to recorded values.

A branch that the example does not take, or code after an early return, may read everything its variables hold there.
Values that it passes to a module that never ran, returns, assigns to another variable, or reshapes to a literal size
count as used; values that it only scales or shifts vary. Notes name the lines of code that does anything else.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import CodeType

from engine.alternatives.attribute_choices import use_values_chosen_by_lists
from engine.flow.branches import RESULT, Branch
from engine.flow.coverage import FunctionCoverage
from engine.flow.effects import Effect, Functions
from engine.flow.forward_arguments import ForwardArguments
from engine.flow.held_types import branches_without_other, may_continue_after_error
from engine.flow.mutability import Mutability
from engine.flow.tested import ANY, attributes_tested, variables_tested
from engine.observations.assumptions import Assumptions
from engine.observations.dataflow import Dataflow
from engine.observations.recorded_runs import RecordedRuns
from engine.observations.surroundings import use_values_around_code
from engine.program.graph import Value
from engine.source.model_code import source_files
from engine.unrecorded.argument_fallbacks import assume_fallbacks_vary
from engine.unrecorded.branch_notes import BranchNotes, notes_on_modules, reason_of_reading, reason_of_replacing
from engine.unrecorded.combined_operands import adds_results_alone, keep_beside_operands
from engine.unrecorded.dynamic_calls import assume_nothing_of_dynamic_calls
from engine.unrecorded.idle_modules import IdleModules, unrecorded_methods
from engine.unrecorded.inline_choices import parameters_instead, values_instead
from engine.unrecorded.looked_up import values_looked_up
from engine.unrecorded.mentioned_modules import use_values_near_idle_modules
from engine.unrecorded.module_results import results_used_otherwise
from engine.unrecorded.omitted_options import use_values_beside_omitted_options
from engine.unrecorded.optional_layers import values_around_optional_layers
from engine.unrecorded.picked_items import use_values_picked_by_numbers
from engine.unrecorded.removable_hooks import use_values_around_removable_hooks
from engine.unrecorded.replaced_calls import assume_other_choices
from engine.unrecorded.returned_parts import asks_about_result, returned_alike
from engine.unrecorded.settable_numbers import doubt_numbers_set_later, reads_attribute
from engine.unrecorded.skipped_code import before_and_after, values_alike
from engine.unrecorded.unread_functions import assume_nothing_of_unread_functions
from engine.unrecorded.untaken import UntakenBranch

__all__ = ["assumptions_about_unreached_code"]


def assumptions_about_unreached_code(
    runs: RecordedRuns, arguments: ForwardArguments, declared: Callable[[str], bool], functions: Functions
) -> Assumptions:
    """Return assumptions under which any code that no recording ran may run.

    Args:
        runs: the recordings.
        arguments: of the model's forward.
        declared: returns whether the user declares that an attribute keeps its value, by its name in the model.
        functions: effects of torch's functions on the entries of tensors.
    """
    assumptions, idle = Assumptions(), IdleModules(runs.parameters, runs.stored)
    dataflow = Dataflow(runs.nodes, runs.values, functions, runs.parameters)
    mutability = Mutability(runs.modules[""], runs.modules.values())
    branches = _UntakenBranches(runs, dataflow, idle, mutability, arguments, declared, assumptions)
    branches.assume()
    assume_other_choices(branches.open(), runs, dataflow, assumptions)
    idle.use_values_of_siblings(runs.modules, dataflow, assumptions)
    use_values_near_idle_modules(runs.coverage, runs.modules, idle, dataflow, assumptions)
    for code in runs.coverage.cut_off:
        reason = f"could be used by the code of {code.co_name} that an error skipped"
        use_values_around_code(code, runs.modules, dataflow, assumptions, reason)
    coverages = runs.coverage.functions.values()
    assume_fallbacks_vary(coverages, arguments.that_vary_in, runs.parameters, dataflow, assumptions)
    assume_nothing_of_dynamic_calls(runs.nodes, coverages, arguments.options_of, mutability, assumptions)
    use_values_chosen_by_lists(runs, dataflow, assumptions)
    use_values_beside_omitted_options(runs, arguments.omitted_in, declared, mutability, dataflow, assumptions)
    doubt_numbers_set_later(runs, assumptions)
    use_values_picked_by_numbers(runs, arguments.options_of, mutability, dataflow, assumptions)
    assume_nothing_of_unread_functions(runs, idle, mutability, dataflow, assumptions)
    use_values_around_removable_hooks(runs.modules, dataflow, assumptions)
    assumptions.notes += notes_on_modules(idle.owners, unrecorded_methods(runs.modules.values()))
    assumptions.notes += branches.notes.messages()
    return assumptions


class _UntakenBranches:
    """The branches that no recording took, and what their code could do.

    Args:
        runs: the recordings.
        dataflow: of the recorded ops.
        idle: modules that did not run.
        mutability: of the model's attributes.
        arguments: of the model's forward.
        declared: returns whether the user declares that an attribute keeps its value.
        assumptions: is extended.
    """

    def __init__(
        self,
        runs: RecordedRuns,
        dataflow: Dataflow,
        idle: IdleModules,
        mutability: Mutability,
        arguments: ForwardArguments,
        declared: Callable[[str], bool],
        assumptions: Assumptions,
    ) -> None:
        self._runs, self._dataflow, self._idle, self._mutability = runs, dataflow, idle, mutability
        self._arguments, self._declared, self._assumptions = arguments, declared, assumptions
        self._places = {guard.place for guard in runs.guards if not reads_attribute(guard.expr, runs.set_later)}
        self._files, self._types_matter = source_files(runs.modules[""]), False
        self._open: dict[tuple[CodeType, str], list[UntakenBranch]] = {}
        self._names = {id(module): name for name, module in runs.modules.items()}
        self.notes = BranchNotes()
        self._fixed: dict[tuple[Branch, str, bool], bool] = {}
        self._values_of_calls: dict[str, dict[int, Value]] = {}

    def assume(self) -> None:
        """Extend the assumptions by what the code of each branch could do."""
        by_function: dict[tuple[CodeType, str], list[UntakenBranch]] = {}
        for coverage in self._runs.coverage.functions.values():
            by_function[coverage.function.code, coverage.owner] = [
                self._untaken(branch, coverage)
                for branch in (*coverage.function.untaken(coverage.ran), *coverage.repeated())
                if not branch.computes_nothing
            ]
        self._open, self._all = {function: [] for function in by_function}, sum(by_function.values(), [])
        self._find_open_branches(by_function)
        if self._other_types_lead_elsewhere() or any(map(self._returned_alike, self.open())):
            self._types_matter = True
            self._find_open_branches(by_function)
        for branch in (branch for branches in by_function.values() for branch in branches):
            self._follow(branch)

    def _find_open_branches(self, by_function: Mapping[tuple[CodeType, str], Sequence[UntakenBranch]]) -> None:
        """Find the branches that other calls may run; their assignments may make further ones possible."""
        self._fixed.clear()
        for function, branches in by_function.items():
            own = self._open[function]
            while more := [branch for branch in branches if branch not in own and self._may_run_in_others(branch)]:
                own += more
                for branch, by_user in itertools.product(branches, (True, False)):
                    self._fixed.pop((branch.branch, branch.owner, by_user), None)

    def _may_run_in_others(self, branch: UntakenBranch) -> bool:
        if branch.has_run:
            return not (self._is_settled(branch) or self._is_decided_by_size_alone(branch))
        return branch.is_interrupted or not (self._would_fail(branch) or self._is_settled(branch))

    def _would_fail(self, branch: UntakenBranch) -> bool:
        return branch.would_fail(functools.partial(self._mutability.never_changed, self._runs.modules[branch.owner]))

    def open(self) -> list[UntakenBranch]:
        """Return the branches that other calls may run."""
        return [branch for branches in self._open.values() for branch in branches]

    def _returned_alike(self, branch: UntakenBranch) -> frozenset[str]:
        alike = returned_alike(branch)
        return frozenset() if alike and any(asks_about_result(branch, b) for b in self._all) else alike

    def _untaken(self, branch: Branch, coverage: FunctionCoverage) -> UntakenBranch:
        return UntakenBranch(branch, coverage, self._runs.modules, self._names, self._dataflow)

    def _follow(self, branch: UntakenBranch) -> None:
        if branch.has_run and branch not in self._open[branch.code, branch.owner]:
            return
        if branch.has_run and (values := values_around_optional_layers(branch, self._dataflow, self._runs.stored)):
            self._assumptions.interchange(values)
            return
        if branch.is_interrupted or (
            self._idle.includes_any(branch.mentioned_modules()) and not self._is_settled(branch)
        ):
            self._use_replaced(branch)
        if branch in self._open[branch.code, branch.owner]:
            if not self._is_decided_by_size_alone(branch):
                self._use_results(branch)
                if branch.branch.skipped:
                    self._leave_out(branch)
            for name in branch.replaced(self._selects_alone(branch)) - self._returned_alike(branch):
                self._touch(branch.values_of(name, self._runs.stored), Effect.USES, branch)
            self._touch(values_instead(branch, self._runs, self._dataflow), Effect.USES, branch)
            self._assumptions.vary(parameters_instead(branch, self._runs))
        values_read = branch.values_read(self._runs.stored)
        used = self._variables_used(branch, values_read) if values_read else None
        if used is None:
            return
        effects = branch.effects()
        self._touch(self._values_of_calls.pop(branch.place, {}).values(), Effect.USES, branch)
        if not used.isdisjoint(branch.passed_through()):
            consumer = branch.consumer()  # a module that is called with the result
            read = (v for node in self._runs.nodes if node.module == consumer for v in node.inputs if not v.stored)
            self._touch(read, Effect.USES, branch)
        for name, values in values_read.items():
            effect = Effect.USES if name in used else effects.get(name, Effect.KEEPS)
            is_weight = effect is Effect.CHANGES and any(value.stored for value in values)
            if is_weight:  # what is added to it has its full shape
                effect = Effect.USES
                self._assumptions.vary(values)
            elif effect is Effect.CHANGES and adds_results_alone(branch, name):
                effect = Effect.KEEPS_ZERO  # the results and the variable lose the same channels
            if is_weight or name in used or effect not in (Effect.KEEPS, Effect.USES):
                self._note(self.notes.read, branch)
                self._touch(values, effect, branch)
                keep_beside_operands(branch, name, values, self._runs.stored, self._dataflow, self._assumptions)
            elif effect is Effect.USES:
                self.notes.not_analyzed[branch.place] = None

    def _use_results(self, branch: UntakenBranch) -> None:
        """Count as used the results of modules that a branch calls and uses otherwise, and what it looks up."""
        looked_up = values_looked_up(branch, self._runs, self._files, self._dataflow)
        self._assumptions.vary(value for value in looked_up if value.stored)
        if values := [*results_used_otherwise(branch, self._runs.modules, self._dataflow), *looked_up]:
            self._note(self.notes.read, branch)
            self._touch(values, Effect.USES, branch)

    def _leave_out(self, branch: UntakenBranch) -> None:
        """Let variables keep the values from before code that always ran, or ran in some rounds."""
        if branch.has_run and branch.branch.skips_results:  # the first or last item is another one then
            self._note(self.notes.left_out, branch)
            reason = f"may be passed on by {branch.code.co_name} in other rounds"
            use_values_around_code(branch.code, self._runs.modules, self._dataflow, self._assumptions, reason)
        for name, effect in branch.effects_of_skipping().items():
            values = branch.values_of(name, self._runs.stored)
            replaces, is_read = effect in (Effect.MOVES, Effect.USES), not branch.holds_unread(name, self._runs.stored)
            if replaces and is_read and (alike := values_alike(branch, values, effect, self._dataflow)):
                for group in alike:
                    self._assumptions.interchange(group)
            elif effect is Effect.MOVES and is_read:
                self._touch(values, effect, branch)
            elif replaces and values:
                self._note(self.notes.left_out, branch)
                self._assumptions.use(values, reason_of_replacing(branch.place))
                self._assumptions.vary(values)
            elif effect in (Effect.KEEPS_ZERO, Effect.CHANGES):
                pair = before_and_after(branch.branch, branch.code, values, self._dataflow)
                self._assumptions.vary(values) if pair is None else self._assumptions.interchange(pair)

    def _is_decided_by_size_alone(self, branch: UntakenBranch) -> bool:
        """Whether only sizes that are the same for all inputs decide, and no arguments or attributes that code sets."""
        alone = branch.is_decided_at(self._places) and not branch.is_decided_at(self._runs.sized)
        alone = alone and branch.code not in self._runs.of_entries  # of which no other sizes are recorded
        return alone and not self._options_tested(branch) and not self._tests_what_is_set(branch)

    def _options_tested(self, branch: UntakenBranch) -> set[str]:
        """Return the arguments that are no tensors in the example, and on which the condition of a branch depends."""
        options = set(self._arguments.options_of(branch.code))
        return self._undeclared(branch, options & variables_tested(branch.tests(), branch.tree)) if options else set()

    def _tests_what_is_set(self, branch: UntakenBranch) -> bool:
        """Whether the condition of a branch depends on an attribute that code may set."""
        module, prefix = self._runs.modules[branch.owner], f"{branch.owner}." if branch.owner else ""
        paths = set(attributes_tested(branch.tests(), branch.tree, branch.self_name, module))
        undeclared = (path for path in paths if not self._declared(prefix + path))
        return any(path == ANY or not self._mutability.never_changed(module, path) for path in undeclared)

    def _note(self, places: dict[str, None], branch: UntakenBranch) -> None:
        prefix = f"{branch.owner}." if branch.owner else ""
        places[branch.place] = None
        self.notes.options.update(dict.fromkeys(prefix + name for name in sorted(self._options_tested(branch))))

    def _touch(self, values: Iterable[Value], effect: Effect, branch: UntakenBranch) -> None:
        reason = reason_of_reading(branch.place, branch.has_run)
        if effect is Effect.USES:
            self._assumptions.use(values, reason, branch.place)
        elif effect is Effect.MOVES:
            self._assumptions.move(list(values), reason, branch.place)
        else:
            self._assumptions.vary(values, zeros_stay=effect is Effect.KEEPS_ZERO)

    def _variables_used(self, branch: UntakenBranch, values_read: Mapping[str, list[Value]]) -> frozenset[str] | None:
        """Return the variables that count as used; None if the code cannot run, or is covered elsewhere."""
        if branch.is_interrupted:  # any size may decide whether the error occurs
            return frozenset(values_read)
        if self._is_fixed(branch, by_user=True):
            return None
        if self._idle.includes_any(branch.mentioned_modules()):
            if not self._is_settled(branch):  # what those modules return may go to others that ran
                self._variables_of_other_calls(branch, values_read)
            return frozenset(values_read)
        if self._would_fail(branch) or self._is_decided_by_size_alone(branch):
            return None
        if self._is_fixed(branch, by_user=False):
            return self._reshaped_to_literals(branch, beside_attributes=False) or None
        used = {name for name, effect in branch.effects().items() if effect is Effect.USES}
        used |= {name for name in values_read if name.endswith(" ")}  # parameters, by their names
        if self._selects_alone(branch):
            used -= branch.indexed_beside_channels()
        passed = (branch.passed_through() | (used - branch.passed_on())) - self._returned_alike(branch)
        others = self._variables_of_other_calls(branch, values_read)
        return frozenset(self._reshaped_to_literals(branch) | passed | branch.branch.measured_names | others)

    def _reshaped_to_literals(self, branch: UntakenBranch, beside_attributes: bool = True) -> frozenset[str]:
        """Return the variables reshaped to literal sizes; results of modules that are reshaped so count as used."""
        for module in branch.modules_reshaped_to_literals(beside_attributes):
            self._touch(self._dataflow.boundary(module)[1], Effect.USES, branch)
            self._note(self.notes.read, branch)
        return frozenset(branch.reshaped_to_literals(beside_attributes))

    def _selects_alone(self, branch: UntakenBranch) -> bool:
        """Whether a branch of a plain function depends on nothing but the function's arguments."""
        if branch.self_name is not None:
            return False
        never_changed = functools.partial(self._mutability.never_changed, self._runs.modules[branch.owner])
        return branch.is_fixed((), never_changed, sized=self._runs.sized)

    def _variables_of_other_calls(self, branch: UntakenBranch, values_read: Mapping[str, list[Value]]) -> set[str]:
        """Return the variables passed to modules that were called with other values where they ran."""
        result: set[str] = set()
        for module, names in branch.module_calls():
            inputs, outputs = self._dataflow.boundary(module)
            indices = {value.index for value in inputs}
            others = {name for name in names if any(v.index not in indices for v in values_read.get(name, ()))}
            if others:
                result |= others
                self._values_of_calls.setdefault(branch.place, {}).update((v.index, v) for v in (*inputs, *outputs))
        return result

    def _use_replaced(self, branch: UntakenBranch) -> None:
        """Count as used the values that a branch would replace, and the values around modules that it would replace."""
        for name in (*branch.branch.assigned, RESULT):
            self._touch(branch.values_of(name, self._runs.stored), Effect.USES, branch)
        for values in itertools.chain(*map(self._dataflow.boundary, branch.modules_replaced())):
            self._touch(values, Effect.USES, branch)

    def _is_settled(self, branch: UntakenBranch) -> bool:
        return self._is_fixed(branch, by_user=True) or self._is_fixed(branch, by_user=False)

    def _is_fixed(self, branch: UntakenBranch, by_user: bool) -> bool:
        """Whether the code, or a user's declaration, determines that a branch never runs."""
        key = branch.branch, branch.owner, by_user
        if key not in self._fixed:
            self._fixed[key] = self._is_declared(branch) if by_user else self._is_fixed_by_code(branch)
        return self._fixed[key]

    def _declared_of(self, branch: UntakenBranch) -> Callable[[str], bool]:
        """Return whether an attribute of the module that runs a branch is declared, by its path from there."""
        prefix = f"{branch.owner}." if branch.owner else ""
        return lambda path: self._declared(prefix + path)

    def _is_declared(self, branch: UntakenBranch) -> bool:
        free = self._undeclared(branch, branch.arguments() | branch.enclosing_variables())
        may_run, declared = functools.partial(self._may_run, branch), self._declared_of(branch)
        return branch.is_fixed(free, declared, declared, self._runs.sized, may_run)

    def _may_run(self, branch: UntakenBranch, node: ast.AST) -> bool:
        """Whether syntax that did not run is in another branch of the same function that other calls may run."""
        return any(b.branch.contains(node) for b in self._open.get((branch.code, branch.owner), ()) if b is not branch)

    def _is_fixed_by_code(self, branch: UntakenBranch, types_agree: bool = False) -> bool:
        """Whether the code fixes a condition; ``types_agree``: whether results of ops have one type in every call."""
        elsewhere = branch.code.co_filename not in self._files  # only sizes decide there, and no enclosing variable
        if elsewhere and branch.code.co_freevars:
            return True
        module, names = self._runs.modules[branch.owner], set[str]() if elsewhere else branch.arguments()
        if branch.code in self._runs.of_entries:
            names = branch.arguments()
        elif branch.owner != "" or branch.code not in self._arguments.codes:
            names &= self._arguments.that_vary_in(branch.code, module)
        names |= branch.enclosing_variables()
        never_changed = functools.partial(self._mutability.never_changed, module)
        never_reassigned = functools.partial(self._mutability.never_reassigned, module)

        def computed(variable: ast.Name) -> bool:
            return branch.types.are_computed(variable) and (types_agree or not self._types_matter)

        free = self._undeclared(branch, names)
        may_run, declared = functools.partial(self._may_run, branch), self._declared_of(branch)
        return branch.is_fixed(free, never_changed, never_reassigned, self._runs.sized, may_run, computed, declared)

    def _other_types_lead_elsewhere(self) -> bool:
        """Whether an argument of another type than in the recordings may lead to code that did not run.

        Until that happens, results of ops have the same type in every call, because ops fail on other types.
        """
        caught = any(map(may_continue_after_error, self._runs.coverage.functions.values()))
        return caught or any(map(self._asks_for_type, self._conditions()))

    def _conditions(self) -> Iterator[UntakenBranch]:
        """Yield the branches that another type may run or skip, including those that compute nothing."""
        for coverage in self._runs.coverage.functions.values():
            for branch in (*coverage.function.untaken(coverage.ran), *branches_without_other(coverage)):
                if not (branch.is_condition or any(isinstance(node, ast.Raise) for node in branch.nodes)):
                    yield self._untaken(branch, coverage)

    def _asks_for_type(self, branch: UntakenBranch) -> bool:
        """Whether the condition of a branch may have another outcome for an argument of another type."""
        others = branch.types.others() & branch.arguments() - {branch.self_name}
        others -= set(self._arguments.options_of(branch.code))
        if branch.code.co_filename not in self._files or others & branch.types.checked():
            return bool(others)
        if branch.owner != "" or branch.code not in self._arguments.codes:
            others &= self._arguments.that_vary_in(branch.code, self._runs.modules[branch.owner])
        return bool(others) and not self._is_fixed_by_code(branch, types_agree=True)

    def _undeclared(self, branch: UntakenBranch, names: Collection[str]) -> set[str]:
        return {name for name in names if name != branch.self_name and not self._declared_of(branch)(name)}

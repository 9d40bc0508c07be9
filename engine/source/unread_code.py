"""Functions whose source is not available: what their instructions show about other calls.

Code that was typed into an interpreter, read from a pipe or compiled from a string runs without a file. Its branches
cannot be read, but its jumps can be watched: a conditional jump that went one way only has another side.
"""

from __future__ import annotations

import ast
import dis
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from engine.source.instructions import arguments_of, named_instructions

__all__ = ["UnreadFunction", "chooses_by_value", "condition_at", "conditional_jumps", "has_sizes"]

_JUMPS = ("POP_JUMP", "JUMP_IF", "FOR_ITER")
_ENDS = ("RETURN", "JUMP", "POP_JUMP", "FOR_ITER", "RERAISE", "SEND")
"""Beginnings of the names of instructions after which code need not go on to raise an error."""


@dataclass
class UnreadFunction:
    """The directions that the conditional jumps of a function took, in all calls for one module.

    Attributes:
        code: of the function.
        owner: name of the module.
        space: globals of the function.
        is_passed_functions: whether an argument was a function, which the caller chooses.
        ways: for the offset of each jump that ran, whether it continued with the next instruction, or elsewhere.
    """

    code: CodeType
    owner: str
    space: Mapping[str, Any]
    is_passed_functions: bool = False
    ways: dict[int, set[bool]] = field(default_factory=dict)

    def tracer(self, frame: FrameType) -> Callable[[FrameType, str, Any], Any]:
        """Return a local trace function for a call.

        Args:
            frame: of the call.
        """
        frame.f_trace_opcodes = True
        held = (frame.f_locals.get(name) for name in arguments_of(self.code))
        self.is_passed_functions |= any(callable(v) and not isinstance(v, (type, nn.Module, Tensor)) for v in held)
        jumps, waiting = conditional_jumps(self.code), -1

        def step(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal waiting
            if event == "opcode":
                offset = frame.f_lasti
                if waiting >= 0:
                    self.ways.setdefault(waiting, set()).add(offset == jumps[waiting])
                waiting = offset if offset in jumps else -1
            elif event == "exception":
                waiting = -1
            return step

        return step

    def merge(self, other: UnreadFunction) -> None:
        """Add the directions of another run, which did not fail.

        Args:
            other: the same function for the same module.
        """
        self.is_passed_functions |= other.is_passed_functions
        for jump, ways in other.ways.items():
            self.ways.setdefault(jump, set()).update(ways)

    def one_way(self) -> Iterator[int]:
        """Yield the offsets of the jumps whose other side does more than raise an error, and did not run."""
        steps = {step.offset: step for step in dis.get_instructions(self.code)}
        for jump, ways in self.ways.items():
            if len(ways) == 1:
                other = steps[jump].argval if True in ways else conditional_jumps(self.code)[jump]
                if not _only_raises(self.code, other):
                    yield jump


@functools.cache
def conditional_jumps(code: CodeType) -> Mapping[int, int]:
    """Return the offsets of the conditional jumps of a function, each with that of the next instruction.

    Example:
        >>> len(conditional_jumps((lambda x: 1 if x else 2).__code__)), len(conditional_jumps((lambda x: x).__code__))
        (1, 0)
    """
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
    pairs = zip(steps, steps[1:], strict=False)
    return {step.offset: after.offset for step, after in pairs if step.opname.startswith(_JUMPS)}


def _only_raises(code: CodeType, offset: int) -> bool:
    for step in dis.get_instructions(code):
        if step.offset >= offset and step.opname.startswith("RAISE"):
            return True
        if step.offset >= offset and step.opname.startswith(_ENDS):
            return False
    return False


# ---------------------------------------------------------------- conditions


def condition_at(code: CodeType, jump: int) -> ast.expr | None:
    """Return the condition of a jump, if it consists of arguments, globals, attributes and constants.

    Args:
        code: of the function.
        jump: offset of the jump.

    Example:
        >>> code = (lambda self, x: x if self.gate is None else self.gate(x)).__code__
        >>> [ast.unparse(condition_at(code, jump)) for jump in conditional_jumps(code)]
        ['self.gate is None']
    """
    stack: list[ast.expr] | None = []
    assigned = {s.argval for s in dis.get_instructions(code) if s.opname.startswith(("STORE_FAST", "DELETE_FAST"))}
    arguments = set(arguments_of(code)) - assigned
    for step in dis.get_instructions(code):
        if step.is_jump_target:
            stack = []
        if step.offset == jump:
            break
        if step.opname.startswith((*_JUMPS, "STORE", "POP_TOP", "RESUME")):
            stack = []
        elif stack is not None and not step.opname.startswith(_NEUTRAL) and not _push(stack, step, arguments):
            stack = None
    if not stack:
        return None
    line = next((line for offset, line, _ in reversed(named_instructions(code)) if offset <= jump), code.co_firstlineno)
    test = stack[-1]
    if step.opname.endswith("NONE"):
        test = ast.Compare(test, [ast.Is()], [ast.Constant(None)])
    for node in ast.walk(test):
        if isinstance(node, ast.expr):
            node.lineno = node.end_lineno = line
            node.col_offset = node.end_col_offset = 0
    return test


_NEUTRAL = ("CACHE", "COPY_FREE_VARS", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "TO_BOOL")
_COMPARISONS = {
    "<": ast.Lt, "<=": ast.LtE, "==": ast.Eq, "!=": ast.NotEq, ">": ast.Gt, ">=": ast.GtE,
}  # fmt: skip


def _push(stack: list[ast.expr], step: dis.Instruction, arguments: set[str]) -> bool:
    """Execute an instruction on a stack of expressions; return whether it is supported."""
    name, value = step.opname, step.argval
    if name == "LOAD_FAST" and value in arguments or name == "LOAD_GLOBAL":
        stack.append(ast.Name(value, ast.Load()))
    elif name == "LOAD_CONST" and not isinstance(value, CodeType):
        stack.append(ast.Constant(value))
    elif name in ("LOAD_ATTR", "LOAD_METHOD") and stack:
        stack.append(ast.Attribute(stack.pop(), value, ast.Load()))
    elif name == "UNARY_NOT" and stack:
        stack.append(ast.UnaryOp(ast.Not(), stack.pop()))
    elif name in ("COMPARE_OP", "IS_OP", "CONTAINS_OP") and len(stack) > 1:
        right, left = stack.pop(), stack.pop()
        stack.append(ast.Compare(left, [_comparison(step)], [right]))
    elif name == "BUILD_TUPLE" and len(stack) >= value:
        stack[len(stack) - value :] = [ast.Tuple(stack[len(stack) - value :], ast.Load())]
    elif name == "CALL" and len(stack) > value:
        function, *passed = stack[len(stack) - value - 1 :]
        stack[len(stack) - value - 1 :] = [ast.Call(function, passed, [])]
    else:
        return False
    return True


def _comparison(step: dis.Instruction) -> ast.cmpop:
    if step.opname == "IS_OP":
        return ast.IsNot() if step.arg else ast.Is()
    if step.opname == "CONTAINS_OP":
        return ast.NotIn() if step.arg else ast.In()
    return _COMPARISONS[step.argval.removeprefix("bool(").removesuffix(")")]()


# ---------------------------------------------------------------- what is chosen without a branch


_LOOK_UPS = frozenset(
    [*"__dict__ __getattr__ __getitem__ attrgetter eval exec find get getattr globals index itemgetter locals".split()]
    + ["methodcaller", "next", "pop", "popleft", "setdefault", "vars"]
)
_KEEPS_STATE = ("STORE_DEREF", "STORE_GLOBAL")


def chooses_by_value(code: CodeType, space: Mapping[str, Any]) -> bool:
    """Whether a function may do something else in another call although its jumps take the same directions.

    It may look up a name, or an item of a container by a variable, read a global flag or container, or change a
    variable of an enclosing function.

    Args:
        code: of the function.
        space: globals of the function.

    Example:
        >>> [chooses_by_value(f.__code__, {}) for f in (lambda x: x[:, 0] + abs(x), lambda x, i: x[i])]
        [False, True]
    """
    before = ""
    outer = {*code.co_freevars, *code.co_names}
    for step in dis.get_instructions(code):
        is_item = step.opname in ("BINARY_SUBSCR", "BINARY_OP") and (step.opname != "BINARY_OP" or "[" in step.argrepr)
        if is_item and before not in ("LOAD_CONST", "BUILD_SLICE", "BUILD_TUPLE"):
            return True
        if step.opname == "LOAD_GLOBAL" and not _is_fixed(space.get(step.argval, abs)):
            return True
        if step.opname in _KEEPS_STATE and step.argval in outer:
            return True
        if step.opname not in ("CACHE", "EXTENDED_ARG"):
            before = step.opname
    return not _LOOK_UPS.isdisjoint(code.co_names)


def _is_fixed(value: Any) -> bool:
    """Whether a global is a function, a class, a Python module, a number or a string, which no call changes."""
    if isinstance(value, (bool, Tensor)):
        return False
    kinds = (type, ModuleType, FunctionType, BuiltinFunctionType, int, float, str)
    return isinstance(value, kinds) or type(value).__module__ == "torch"


def has_sizes(code: CodeType) -> bool:
    """Whether a function contains whole numbers above one, which may be sizes of channels.

    Example:
        >>> has_sizes((lambda x: x.flatten(1)).__code__), has_sizes((lambda x: x.view(-1, 8)).__code__)
        (False, True)
    """
    numbers = (n for c in code.co_consts for n in (c if isinstance(c, tuple) else (c,)) if isinstance(n, int))
    return any(number > 1 for number in numbers)

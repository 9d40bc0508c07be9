"""Every public name says what it takes, with shapes and units, what it returns, what it raises, and shows it."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import pytest

import engine
import lightning_compress

PUBLIC = {
    f"{package.__name__}.{name}": getattr(package, name)
    for package in (engine, lightning_compress)
    for name in package.__all__
    if callable(getattr(package, name))
}


def parameters(thing: Any) -> list[str]:
    """Names that a caller passes."""
    if dataclasses.is_dataclass(thing):
        return [field.name for field in dataclasses.fields(thing) if field.init]
    found = inspect.signature(thing).parameters.values()
    return [p.name for p in found if p.name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def section(doc: str, title: str) -> str:
    """The indented lines below a heading."""
    found = re.search(rf"^{title}:\n((?:[ ]+.*\n|\n)*)", doc + "\n", re.MULTILINE)
    return found.group(1) if found else ""


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_documents_what_it_takes(name: str) -> None:
    """Each parameter (or attribute of a data class) has its line."""
    doc = inspect.getdoc(PUBLIC[name]) or ""
    told = section(doc, "Args") + section(doc, "Attributes")
    missing = [
        p for p in parameters(PUBLIC[name]) if not re.search(rf"^ +(?:\w+, )*{p}(?:, \w+)*:", told, re.MULTILINE)
    ]
    assert not missing, f"{name} does not document {missing}"


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_an_example(name: str) -> None:
    """One that runs as a test, or says why it does not."""
    assert ">>>" in section(inspect.getdoc(PUBLIC[name]) or "", "Example"), name


FUNCTIONS = [name for name, thing in PUBLIC.items() if inspect.isfunction(thing)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_says_what_it_returns(name: str) -> None:
    """In its first line, or in a section; what returns nothing is left out."""
    doc = inspect.getdoc(PUBLIC[name]) or ""
    returns = inspect.signature(PUBLIC[name]).return_annotation
    assert returns in (None, "None") or section(doc, "Returns") or re.match(r"(?:Return|Write|The|How)\b", doc), name


NEVER = {"engine.read_masks"}  # takes any model
RAISING = [
    name
    for name, thing in PUBLIC.items()
    if name not in NEVER and not (inspect.isclass(thing) and dataclasses.is_dataclass(thing))
]


@pytest.mark.parametrize("name", RAISING)
def test_a_public_name_says_what_it_raises(name: str) -> None:
    """Whatever checks what it is given has errors to name."""
    doc = inspect.getdoc(PUBLIC[name]) or ""
    assert not parameters(PUBLIC[name]) or section(doc, "Raises"), name


CLASSES = [name for name, thing in PUBLIC.items() if inspect.isclass(thing)]


@pytest.mark.parametrize("name", CLASSES)
def test_public_methods_are_documented(name: str) -> None:
    """With each of their parameters; hooks of Lightning have its documentation."""
    fields = getattr(PUBLIC[name], "__dataclass_fields__", {})
    for key, method in vars(PUBLIC[name]).items():
        if (
            inspect.isfunction(method)
            and key not in fields
            and not key.startswith("_")
            and not hasattr(method, "__override__")
        ):
            doc = inspect.getdoc(method) or ""
            named = [p for p in parameters(method) if p not in ("trainer", "pl_module")]
            missing = [
                p for p in named if not re.search(rf"^ +(?:\w+, )*{p}(?:, \w+)*:", section(doc, "Args"), re.MULTILINE)
            ]
            plain = re.fullmatch(r".*", doc.split("\n\n")[0].replace("\n", " ")) and all(
                f"``{p}``" in doc for p in missing
            )
            assert doc and (not missing or plain), f"{name}.{key} does not document {missing}"


HOLDS_TENSORS = re.compile(r"^(?:Tensor|(?:Mapping|dict)\[str, Tensor\])(?: \| None)?$")
SHAPED = re.compile(r"``\(.*\)``|\bshape\b|\brank\b|broadcastable|state dict|the tensor itself")
DURATION = re.compile(r"\b(?:latency|duration|median time|how long)\b")
UNIT = re.compile(r"(?:milli)?seconds?\b|\bms\b|_ms\b|``\"latency\"``|latency_runs|`LatencyTable`|timed|measure")


def told_of(thing: Any) -> dict[str, str]:
    """What is said of each parameter or attribute, by name."""
    doc = inspect.getdoc(thing) or ""
    lines = section(doc, "Args") + section(doc, "Attributes")
    entries = re.findall(r"^ {4}((?:\w+, )*\w+):(.*(?:\n {5,}.*)*)", lines, re.MULTILINE)
    return {name: text for names, text in entries for name in names.split(", ")}


def callables(name: str) -> list[Any]:
    """A public name, and where it is a class, its public methods."""
    thing = PUBLIC[name]
    methods = vars(thing).items() if inspect.isclass(thing) else ()
    return [thing, *(method for key, method in methods if inspect.isfunction(method) and not key.startswith("_"))]


@pytest.mark.parametrize("name", PUBLIC)
def test_tensors_have_shapes_and_times_have_units(name: str) -> None:
    """Whoever passes a tensor reads which shape it has, and whoever reads a time, in which unit it is."""
    for thing in callables(name):
        told = told_of(thing)
        for parameter in inspect.signature(thing).parameters.values():
            if HOLDS_TENSORS.match(str(parameter.annotation)) and parameter.name in told:
                assert SHAPED.search(told[parameter.name]), f"{name}: {parameter.name} has no shape"
        for parameter_name, text in told.items():
            if DURATION.search(text):
                assert UNIT.search(text), f"{name}: {parameter_name} has no unit"

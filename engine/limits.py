"""Limits of the analysis: how far it looks into code and objects, and how much it tries, each with its reason."""

__all__ = [
    "ALWAYS_ON_DATA",
    "DEEPEST_CHOICE",
    "DEEPEST_INPUT",
    "DEEPEST_OUTER",
    "DEEPEST_TABLE",
    "FRUITLESS_ATTEMPTS",
    "FURTHEST_SIZE",
    "LARGEST_SIZE",
    "LEAST_RUNS",
    "LONGEST_OPTION",
    "MOST_ATTRIBUTE_CHOICES",
    "MOST_CALLS",
    "MOST_CHANGES",
    "MOST_CHOICES",
    "MOST_COMBINED_ITEMS",
    "MOST_COMPUTED_NAMES",
    "MOST_DECIDING_SETTINGS",
    "MOST_DIMENSIONS",
    "MOST_ENTRIES",
    "MOST_FUNCTIONS",
    "MOST_FURTHER_ITEMS",
    "MOST_FURTHER_OPS",
    "MOST_HELD_OBJECTS",
    "MOST_HELD_TENSORS",
    "MOST_LIST_ITEMS",
    "MOST_NUMBERS_FURTHER",
    "MOST_OBJECTS",
    "MOST_OUTER_RUNS",
    "MOST_OUTER_VALUES",
    "MOST_PICKED_TENSORS",
    "MOST_RESTORED_ENTRIES",
    "MOST_SETTINGS",
    "MOST_STARTS",
    "MOST_STATE_OBJECTS",
    "MOST_STEPS_TO_INDEX",
    "MOST_TABLE_ITEMS",
    "MOST_TABLE_KEYS",
    "MOST_TIMES_FURTHER",
    "MOST_TIMES_LARGER",
    "MOST_VALUES",
    "MOST_WORDS",
    "NEIGHBOURS",
]

# ---------------------------------------------------------------- reading the code of a model

MOST_TABLE_ITEMS = 1000
"""Items of a container that are visited; tables of functions and modules are small, larger containers are data."""

DEEPEST_TABLE = 3
"""Containers within one another in which modules are looked up."""

MOST_TABLE_KEYS = 64
"""Keys of a table that are compared with a size; larger tables are caches or vocabularies."""

MOST_COMPUTED_NAMES = 64
"""Names that an f-string may stand for; beyond, it stands for any name."""

LONGEST_OPTION = 40
"""Characters of a text that may be the value of an option; longer ones are messages."""

MOST_DIMENSIONS = 6
"""Dimensions of a tensor, for tuples that are as long as these are many."""

MOST_VALUES = 200
"""Values of a variable that are noted at a line; beyond, it may hold anything."""

MOST_FUNCTIONS = 100
"""Functions that are followed from code that did not run, since they may call each other in turns."""

MOST_STEPS_TO_INDEX = 4
"""Variables between an index and the values that it is computed from."""

# ---------------------------------------------------------------- state of a model and its surroundings

MOST_OBJECTS = 20_000
"""Objects that a snapshot visits; those further away are not considered part of the model."""

MOST_RESTORED_ENTRIES = 10_000
"""Entries from which on a container is restored, but not the contents of its entries."""

MOST_STATE_OBJECTS = 5_000
"""Objects that are searched for tensors that may change between calls."""

MOST_HELD_OBJECTS = 2000
"""Objects that are searched for tensors within one variable."""

MOST_HELD_TENSORS = 64
"""Tensors that one variable is taken to hold."""

MOST_PICKED_TENSORS = 64
"""Tensors in a container from which an item is picked; a larger one counts as if it held other things, too."""

DEEPEST_OUTER = 6
"""Objects within one another in which the modules around a model are looked up."""

# ---------------------------------------------------------------- other values that are tried

NEIGHBOURS = 16
"""Distance up to which the neighbours of an integer are tried one by one."""

MOST_CALLS = 48
"""Calls with other arguments that are recorded."""

DEEPEST_INPUT = 3
"""Containers within one another in which arguments are varied."""

MOST_FURTHER_ITEMS = 2
"""Items that are added to a list of tensors among the arguments."""

MOST_SETTINGS = 24
"""Settings of attributes that are recorded; the attributes of further ones are named."""

MOST_ATTRIBUTE_CHOICES = 16
"""Integers from zero on, layers of a list and keys of a table that are tried as values of an attribute."""

MOST_WORDS = 6
"""Texts in the code that are tried as values of an attribute or an argument."""

MOST_LIST_ITEMS = 8
"""Numbers in a list whose items are varied one by one."""

MOST_NUMBERS_FURTHER = 16
"""Steps from a number on that are tried one by one as long as each leads to something new."""

MOST_CHOICES = 64
"""Items of a collection by which code may choose (``return_layers``); larger ones are data."""

DEEPEST_CHOICE = 3
"""Collections within one another by which code may choose."""

MOST_OUTER_RUNS = 32
"""Runs with other values of what the code reads outside the model."""

MOST_OUTER_VALUES = 8
"""Other values of one of these."""

MOST_DECIDING_SETTINGS = 16
"""Settings that are recorded since an attribute decides whether code runs."""

# ---------------------------------------------------------------- sizes that are tried

LARGEST_SIZE = 8192
"""Largest size that is tried because of a number in the code."""

MOST_ENTRIES = 2**24
"""Entries of one input at the sizes that are tried."""

FURTHEST_SIZE = 32
"""Distance from the present size up to which one is searched that reverses a decision."""

MOST_CHANGES = 2
"""Sizes that are tried of those that the search discovers away from the numbers in the code."""

MOST_TIMES_FURTHER = 16
"""Size at which a loop has another number of rounds, as a multiple of the present one."""

MOST_TIMES_LARGER = 8
"""Size of inputs that run on data, as a multiple of that of the example."""

ALWAYS_ON_DATA = 1024
"""Entries of inputs that run on data in any case."""

# ---------------------------------------------------------------- code that did not run

MOST_COMBINED_ITEMS = 10_000
"""Combinations of what the items of a result held, to learn whether they are the usual ones."""

# ---------------------------------------------------------------- further runs

MOST_FURTHER_OPS = 20_000
"""Budget of ops for runs with other answers to decisions on data, and for combinations of conditions."""

LEAST_RUNS = 4
"""Runs for which this budget suffices in any case, however many ops the run on the example has."""

MOST_STARTS = 24
"""Runs from which combinations of conditions start."""

FRUITLESS_ATTEMPTS = 2
"""Decisions at a place in the code for which no other answer led to anything new, before it is skipped."""

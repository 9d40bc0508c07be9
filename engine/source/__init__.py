"""Reading of the user's Python code, without running it: its syntax, names, attributes and writes."""

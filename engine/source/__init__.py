"""Analysis of the user's Python code: where its numbers come from, and what it could do in other calls."""

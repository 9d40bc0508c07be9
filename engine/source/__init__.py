"""The user's Python code: where its numbers come from, and how they are made to follow."""

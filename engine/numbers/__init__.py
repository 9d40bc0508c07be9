"""Numbers in the user's code: how they follow from sizes and attributes, and which of them the source fixes."""

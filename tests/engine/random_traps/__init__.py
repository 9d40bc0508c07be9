"""Random networks of the blocks that an analysis could get wrong: reads, state, odd outputs, sizes, modes, control."""

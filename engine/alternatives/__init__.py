"""What may differ in another call: sizes, arguments, attributes, modes, buffers, and decisions on data."""

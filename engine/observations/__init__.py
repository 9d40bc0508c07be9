"""What the recorded runs show about a model: the flow of values, and what is assumed about them in other calls."""

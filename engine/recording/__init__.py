"""Running a model so that it leaves no trace, on tensors without data, and writing down what it does."""

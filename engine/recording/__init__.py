"""Recording of a model: its ops and values, in runs on the example and in runs that differ from it."""

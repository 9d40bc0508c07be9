"""Networks of other packages, by their own constructors, small: one file per field."""

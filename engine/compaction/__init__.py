"""The plan of a compaction, and the change of the model that it makes: all of it or nothing."""

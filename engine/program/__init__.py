"""The recorded program as plain data: what everything else speaks of."""

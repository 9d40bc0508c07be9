"""The recorded program as plain data, on which all analyses build."""

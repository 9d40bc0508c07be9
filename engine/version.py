"""The version of both packages, of which the distribution takes its own."""

__all__ = ["__version__"]

__version__ = "0.2.0"

"""What code that no recording ran could do to recorded values."""

"""The analyses that rules feed: slots and their constraints, constants, and use."""

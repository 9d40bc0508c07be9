"""What rules write to: slots and what ties them, constants, and use."""

"""Selection of the units to prune: criteria, amounts, schedules, targets and their allocation over groups."""

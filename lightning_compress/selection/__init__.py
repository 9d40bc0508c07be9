"""Which units go: criteria, amounts, schedules, targets and their allocation over groups."""

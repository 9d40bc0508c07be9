"""Which slots can be removed: groups, sizes in the code that follow, and slots that have to be kept."""

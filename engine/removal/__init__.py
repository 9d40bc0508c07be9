"""Which slots may go: groups that go together, sizes that follow, and what has to stay."""

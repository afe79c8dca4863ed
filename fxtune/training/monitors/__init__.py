"""What a run observes of its own steps: time, energy, loss, and steps that go wrong."""

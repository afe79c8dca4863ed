"""Observations of a run's own steps: time, energy, loss, and steps that go wrong."""

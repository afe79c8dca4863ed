"""Forecasts of a run before it starts: its memory, steps and time, and changes that make it fit."""

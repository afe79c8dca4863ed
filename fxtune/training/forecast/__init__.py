"""A run before it starts: its memory, its steps, its time, and single changes that let it fit."""

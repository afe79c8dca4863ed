"""The files of a run: its folder and its checkpoints."""

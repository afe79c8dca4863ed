"""Reports from the folder of a run: its difference from another run, what its time is made of, an HTML page."""

"""The data from which techniques decide: the options of all techniques, and the facts of a run."""

"""What the folder of a run says: its difference to another run, why a step takes so long, a page to look at."""

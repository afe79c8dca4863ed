"""This process: its signals, threads and limits, its memory errors, and the operators that it runs."""

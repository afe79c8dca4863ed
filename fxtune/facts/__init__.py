"""What a technique may decide by: the options of every technique, and the facts of a run. Plain data, below them."""

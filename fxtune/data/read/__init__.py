"""Files and hub datasets to rows."""

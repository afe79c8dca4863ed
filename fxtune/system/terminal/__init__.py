"""What a person reads: text and tables, progress, warnings of libraries, without secrets."""

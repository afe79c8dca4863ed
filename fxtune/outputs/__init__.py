"""What a run has left on disk, used: found by its name, merged, asked, evaluated, refreshed."""

"""Files and caches on disk, and models found on disk or on the hub."""

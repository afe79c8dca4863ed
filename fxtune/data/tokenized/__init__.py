"""Turns sources into token tables on disk, with several processes and a cache."""

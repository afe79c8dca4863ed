"""The device of this process. Ranks, mesh and collectives will belong here."""

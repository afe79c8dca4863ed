"""Recipes that fxtune writes: from rows (`fxtune new`), or from another tool's config (fxtune/migration)."""

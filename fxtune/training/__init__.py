"""One run: built, looped, resumed."""

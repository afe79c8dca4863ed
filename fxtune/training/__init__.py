"""One training run: how it is built, looped, evaluated and resumed."""

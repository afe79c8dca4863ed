"""`fxtune import`: recipes from the configs of other tools. keys.yaml says what becomes of each key, account.py reads
it, and trainer_arguments.py and a module for each tool have what several keys decide together."""

"""`fxtune import`: recipes from the configs of other tools. account.py follows keys.yaml for each key that acts alone.
trainer_arguments.py and a module for each tool translate keys that act together."""

"""Recipes from the configs of other tools: `fxtune import FILE`.

account.py holds what became of each key of a config; trainer_arguments.py has the keys that tools share because they
pass them to transformers' Trainer; each other module reads the configs of one tool; draft.py writes the recipe.
"""

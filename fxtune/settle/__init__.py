"""From a config and a machine to what will run: one function, settle(), for training and for every command."""

"""Exports of a trained model: written, read back and compared before they count, with a model card."""

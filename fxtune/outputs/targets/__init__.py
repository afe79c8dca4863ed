"""What a trained model is exported for: one file for each target."""

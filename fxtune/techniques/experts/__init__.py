"""The experts of a mixture: adapted, trained in full, quantized."""

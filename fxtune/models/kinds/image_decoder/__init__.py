"""Decoders that also read images: the kind, its families, their vision encoders and what images are to a batch."""

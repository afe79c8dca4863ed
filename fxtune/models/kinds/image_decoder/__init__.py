"""Decoders that also read images: the kind, its families, their vision encoders, and the tensors of images in a
batch."""

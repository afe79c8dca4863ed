"""LoRA adapters, plain and fused."""

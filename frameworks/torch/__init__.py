"""PyTorch: gradients travel from post-accumulate hooks through slices into buckets, and back into `.grad`."""

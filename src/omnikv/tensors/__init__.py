"""KV caches as torch tensors: cut, merged, packed and placed. No I/O."""

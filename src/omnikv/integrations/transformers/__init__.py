"""Between the caches of Hugging Face transformers and the layers that omnikv hands over; transformers loads on use."""

from omnikv.integrations.transformers.caches import cache_from_layers, layers_from_cache

__all__ = ["cache_from_layers", "layers_from_cache"]

"""Engines that omnikv fits into; none is imported unless asked for."""

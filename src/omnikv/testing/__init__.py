"""Conformance suites and simulated peers, shipped for those who write transports of their own; needs no pytest."""

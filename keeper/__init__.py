"""The keeper: brings runs back after a loss, works a stack's queue, and gives idle slices back, without a person.

`store` has what is wanted and known, as documents that several programs change. `rules` decides what to do about a
run; it is pure. `passes` carries out one pass, in which `slices` sees to the slices at Google and `hosts` to runs and
their hosts; `news` tells people. A pass remembers nothing but what the store holds. `commands` is what a person types,
`install` puts the keeper on a machine, and `login` lets it log in to hosts from a gateway.

`queue`, `queue_worker`, `queue_commands` and `sweep` are the queue. `idle`, `zombies` and `capacity` are about slices
that nobody uses, that nobody knows of, and that zones did not have.

It stands above `launch` and `infra.cloud_tpu`, and does by their code what `fab recover` and `pulumi up` do.
"""

"""The keeper: without a person, restarts runs after a loss, works a stack's queue and gives idle slices back.

`launch.control` has the documents that say what people want, `launch.policy` decides what to do about them,
and `launch.reconcile` does it. `world` is what the reconciler observes and acts on, `stack_store` the documents that
Pulumi and the keeper write, `notices` the messages to people. `__main__` is one pass, which a timer starts.
`keep_commands`, `queue_commands`, `sweep`, `capacity_history` and `zombies` are commands of `fab`; `submissions` keeps
the code of runs that wait; `reclaim` releases slices that nobody uses. `installation` installs the keeper on a machine,
and `gateway_login` lets it reach hosts from there.

It stands above `launch`, `backends` and `infra.cloud_tpu`, and uses their code as `fab recover` and `pulumi up` do.
"""

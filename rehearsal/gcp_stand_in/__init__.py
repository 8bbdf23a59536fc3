"""A stand-in for Pulumi's gcp provider: the engine talks to it as to the real one, and nothing is made at Google.

It may import the pulumi package's protocol and reads the source of pulumi_gcp; of ours only its own files, the
catalogue and `rehearsal.local_servers`. `rehearsal/bin/pulumi-resource-gcp` starts it; where that folder is on PATH the
engine takes it and downloads none."""

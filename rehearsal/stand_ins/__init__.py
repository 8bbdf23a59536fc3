"""Stand-ins for the commands `gcloud` and `pulumi` while a rehearsal is up; `rehearsal/bin` puts them on PATH.

Each is one file that the standard library is enough for and that imports nothing of ours: a launch starts them often.
"""

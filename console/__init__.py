"""What people look at, and the commands other than training: a module for each, whose functions return its exit code.

`hosts/` are the commands on a slice's hosts, `models/` those on exported models, `compiler/` those of the TPU compiler;
`doctor/` finds problems, `dashboard/` shows runs in a browser.
"""

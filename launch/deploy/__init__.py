"""`fab deploy`: what every host needs before a run, found or made, and said.

`steps` and `python_environment` say what there is to do (pure), `deploy` has it done on every host and reports.
"""

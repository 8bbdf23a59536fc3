"""The stacks' images: built here from images/, tried, listed, and pushed to where a stack's hosts pull them from.

build, push and listing are what the commands call; recipe, context, answers, refusals and tables are pure.

It imports of launch errors, stack_output, runs, jobs, bundle and display alone, so that images are built with no target
in sight; fabfile and the rest of launch may import it.
"""

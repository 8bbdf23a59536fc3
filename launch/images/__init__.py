"""The frameworks' images: built here from images/, tried, listed, and pushed to where a stack's hosts pull them from.

build, push and local_images are what the commands call; recipe is pure. BuildKit builds (`docker build`), and
Docker's API answers what there is.

It imports of launch only output, runs, jobs and inventories, so that images are built with no target in
sight; fabfile and the rest of launch may import it.
"""

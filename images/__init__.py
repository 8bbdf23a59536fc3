"""The frameworks' images: built from these folders, tried, listed, and pushed to where a stack's hosts pull them.

build, push and local_images are what the commands call; recipe is pure. BuildKit builds (`docker build`), and
Docker's API answers what there is.

It imports of launch only output, runs, jobs and inventories, so that images are built with no target in
sight. In an image there is only `smoke/`.
"""

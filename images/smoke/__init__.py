"""The test that a built image passes before it gets its name.

    docker run --rm IMAGE /opt/tpu-stack/smoke --platform cpu

In the image the folder is /opt/tpu-stack/smoke and holds one file more, the framework's own `smoke.py` as
`framework.py` (`checks.Framework` says what is in that). It imports Python's standard library only, and nothing of this
project; the framework's file imports its framework.
"""

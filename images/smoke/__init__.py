"""The test that a built image passes before it gets its name.

    docker run --rm IMAGE /opt/tpu-stack/smoke --platform cpu

In the image the folder is /opt/tpu-stack/smoke and holds one file more, the stack's own `smoke.py` as `stack.py`
(contract.py says what is in that). Python's standard library alone, but for what the stack's file imports; nothing of
this project.
"""

"""What holds for every test: how hypothesis looks for examples, and that Ctrl-C is heard."""

import signal

from hypothesis import settings

# A shell starts its background jobs with Ctrl-C ignored, and that is handed on to whatever a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: on a machine shared with others a slow example is no bug. The same examples every time, so that
# a red test is red for the next person too; `pytest --hypothesis-profile explore` looks for new ones.
settings.register_profile("house", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("house")

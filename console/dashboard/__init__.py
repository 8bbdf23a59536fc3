"""`fab dashboard`: shows runs in a browser, from their directories only; it can change nothing."""

"""`fab dashboard`: runs in a browser, from their directories only; it can change nothing."""

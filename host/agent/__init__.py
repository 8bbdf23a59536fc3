"""The agent of one host: a request in, a response out, both JSON. It imports the standard library alone."""

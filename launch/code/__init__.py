"""The code of a run as hosts get it: a folder as an archive, the packages it needs, a compiled training step."""

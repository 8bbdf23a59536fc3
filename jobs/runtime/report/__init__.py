"""report.html: one self-contained page made from a run directory. Standard library only; `render` is the way in."""

"""A run on a page: report.html, and what the dashboard shows of a run. `render` is the way in."""

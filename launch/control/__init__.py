"""What people want of runs and slices: the documents that say it, and the store that keeps them."""

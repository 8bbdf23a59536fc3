"""Files of data, models and runs, on a disk or in a bucket, and caches of them."""

"""The exported model of a run: delivered to a folder or a bucket, asked for predictions, served over HTTP."""

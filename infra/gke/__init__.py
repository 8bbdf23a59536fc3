"""The cluster of a stack whose slices are node pools: what is declared of it, and what its pools are like."""

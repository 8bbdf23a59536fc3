"""What jobs on TensorFlow share: the group and its strategy."""

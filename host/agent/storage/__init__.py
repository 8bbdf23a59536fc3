"""What lies on the disks of this host: the files of a supervisor and of its run, and the bundles that were sent."""

"""What ties a job to the cluster engines that start it; they stay the engines."""

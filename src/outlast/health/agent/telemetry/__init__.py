"""Reading the state of devices and host in a collector process, and the agent's hold on that process."""

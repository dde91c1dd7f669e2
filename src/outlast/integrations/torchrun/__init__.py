"""The rendezvous of outlast under torchrun's own agent."""

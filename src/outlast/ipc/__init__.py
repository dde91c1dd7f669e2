"""Communication between processes of one node: shared memory, sockets, clocks."""

"""``outlast dashboard`` and ``outlast report --html``: a run as one page, made on the server."""

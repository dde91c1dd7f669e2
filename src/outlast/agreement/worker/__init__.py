"""How ranks vote, meet and report to each other."""

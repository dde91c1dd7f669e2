"""Names and signatures of other projects, so that their users can move."""

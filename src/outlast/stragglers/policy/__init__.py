"""Who slows the job: scores of measured sections, and the decision."""

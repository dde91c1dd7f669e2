"""The restart policy, the fault history and the job."""
